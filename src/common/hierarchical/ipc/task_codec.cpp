#include "hierarchical/ipc/task_codec.h"

#include <type_traits>

#include "hierarchical/ipc/task_wire.h"

namespace simpler {
namespace {

using task_wire::ItemKind;
using task_wire::ScalarRecord;
using task_wire::TensorRecord;

void append(std::vector<std::byte>& wire, const void* data, std::size_t nbytes) {
  const auto* const bytes = static_cast<const std::byte*>(data);
  wire.insert(wire.end(), bytes, bytes + nbytes);
}

[[noreturn]] void throw_invalid(const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, "task argument: " + what);
}

void append_tensor(std::vector<std::byte>& wire, const TensorArg& tensor) {
  if (tensor.shape.size() > static_cast<std::size_t>(kMaxDims)) {
    throw_invalid("a tensor has " + std::to_string(tensor.shape.size()) +
                  " dimensions, the most is " + std::to_string(kMaxDims));
  }
  if (tensor.shape.size() != tensor.strides.size())
    throw_invalid("a tensor's shape and strides differ in length");
  const TensorRecord record{static_cast<std::uint32_t>(ItemKind::kTensor),
                            static_cast<std::int32_t>(tensor.shape.size()),
                            tensor.address,
                            tensor.nbytes,
                            tensor.dtype,
                            tensor.tag};
  if (const char* fault = task_wire::tensor_fault(record)) throw_invalid(fault);
  for (const std::int64_t extent : tensor.shape) {
    if (extent < 0) throw_invalid("negative extent");
  }
  append(wire, &record, sizeof record);
  append(wire, tensor.shape.data(), tensor.shape.size() * sizeof(std::int64_t));
  append(wire, tensor.strides.data(), tensor.strides.size() * sizeof(std::int64_t));
}

void append_scalar(std::vector<std::byte>& wire, ItemKind kind, std::uint64_t bits) {
  const ScalarRecord record{static_cast<std::uint32_t>(kind), 0, bits};
  append(wire, &record, sizeof record);
}

std::vector<std::int64_t> read_dims(const std::byte* from, std::size_t count) {
  std::vector<std::int64_t> dims(count);
  if (count > 0) std::memcpy(dims.data(), from, count * sizeof(std::int64_t));
  return dims;
}

}  // namespace

std::vector<std::byte> encode_task(std::span<const TaskItem> items) {
  if (items.size() > kMaxTaskItems) {
    throw_invalid("a task has " + std::to_string(items.size()) + " arguments, the most is " +
                  std::to_string(kMaxTaskItems));
  }
  std::vector<std::byte> wire;
  const task_wire::TaskHeader header{task_wire::kTaskMagic,
                                     static_cast<std::uint32_t>(items.size())};
  wire.reserve(sizeof header + items.size() * sizeof(TensorRecord));
  append(wire, &header, sizeof header);
  for (const TaskItem& item : items) {
    if (const auto* tensor = std::get_if<TensorArg>(&item)) {
      append_tensor(wire, *tensor);
    } else if (const auto* flag = std::get_if<bool>(&item)) {
      append_scalar(wire, ItemKind::kBool, *flag ? 1 : 0);
    } else if (const auto* integer = std::get_if<std::int64_t>(&item)) {
      append_scalar(wire, ItemKind::kInt64, std::bit_cast<std::uint64_t>(*integer));
    } else {
      append_scalar(wire, ItemKind::kFloat64, std::bit_cast<std::uint64_t>(std::get<double>(item)));
    }
  }
  return wire;
}

std::vector<TaskItem> decode_task(std::span<const std::byte> wire) {
  std::vector<TaskItem> items;
  const auto on_tensor = [&items](const TensorRecord& record, const std::byte* dims) {
    const auto ndim = static_cast<std::size_t>(record.ndim);
    items.emplace_back(TensorArg{record.address, record.nbytes, read_dims(dims, ndim),
                                 read_dims(dims + ndim * sizeof(std::int64_t), ndim), record.dtype,
                                 record.tag});
  };
  const auto on_scalar = [&items](const ScalarRecord& record) {
    switch (static_cast<ItemKind>(record.kind)) {
      case ItemKind::kBool:
        items.emplace_back(record.bits != 0);
        break;
      case ItemKind::kInt64:
        items.emplace_back(std::bit_cast<std::int64_t>(record.bits));
        break;
      default:
        items.emplace_back(std::bit_cast<double>(record.bits));
        break;
    }
  };
  task_wire::visit(wire, on_tensor, on_scalar);
  return items;
}

}  // namespace simpler
