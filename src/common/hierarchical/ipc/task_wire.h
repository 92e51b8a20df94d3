// The bytes of an encoded task: shared by the codec and by the call of native kernels.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

#include "hierarchical/base/error.h"
#include "hierarchical/ipc/task_codec.h"
#include "simpler/kernel.h"

namespace simpler::task_wire {

static_assert(std::endian::native == std::endian::little);

inline constexpr std::uint32_t kTaskMagic = 0x314B5354;  // "TSK1"

struct TaskHeader {
  std::uint32_t magic;
  std::uint32_t num_items;
};
static_assert(sizeof(TaskHeader) == 8);

// Every record begins with its kind, and is a multiple of 8 bytes long.
enum class ItemKind : std::uint32_t { kTensor = 1, kBool = 2, kInt64 = 3, kFloat64 = 4 };

struct ScalarRecord {
  std::uint32_t kind;
  std::uint32_t reserved;  // 0
  std::uint64_t bits;      // bool: 0 or 1
};
static_assert(sizeof(ScalarRecord) == 16);

// Where the bits of scalar `index` are in a task that has nothing but scalars.
constexpr std::size_t scalar_place(std::size_t index) noexcept {
  return sizeof(TaskHeader) + index * sizeof(ScalarRecord) + offsetof(ScalarRecord, bits);
}

struct TensorRecord {  // followed by ndim shapes and ndim strides, int64 each
  std::uint32_t kind;
  std::int32_t ndim;
  std::uint64_t address;
  std::int64_t nbytes;
  std::int32_t dtype;
  std::int32_t tag;
};
static_assert(sizeof(TensorRecord) == 32);

[[noreturn]] inline void throw_malformed(const char* what) {
  throw Error(ErrorCode::kProtocol, std::string("encoded task: ") + what);
}

// What is wrong with a tensor's fixed part, or nullptr.
inline const char* tensor_fault(const TensorRecord& tensor) noexcept {
  if (tensor.ndim < 0 || tensor.ndim > kMaxDims) return "number of dimensions out of range";
  if (tensor.nbytes < 0) return "negative size of a tensor";
  if (tensor.address + static_cast<std::uint64_t>(tensor.nbytes) < tensor.address)
    return "tensor beyond the address space";
  if (tensor.dtype < SIMPLER_BOOL || tensor.dtype > SIMPLER_FLOAT8_E5M2) return "unknown dtype";
  if (tensor.tag < SIMPLER_IN || tensor.tag > SIMPLER_NO_DEP) return "unknown tag";
  return nullptr;
}

// Calls on_tensor(const TensorRecord&, const std::byte* dims) and on_scalar(const ScalarRecord&) in
// wire order, each record checked first. `dims` is aligned as `wire` is. Throws Error{kProtocol}.
template <typename OnTensor, typename OnScalar>
void visit(std::span<const std::byte> wire, OnTensor&& on_tensor, OnScalar&& on_scalar) {
  TaskHeader header;
  if (wire.size() < sizeof header) throw_malformed("shorter than its header");
  std::memcpy(&header, wire.data(), sizeof header);
  if (header.magic != kTaskMagic) throw_malformed("wrong magic number");
  if (header.num_items > kMaxTaskItems) throw_malformed("too many items");
  std::size_t at = sizeof header;
  for (std::uint32_t item = 0; item < header.num_items; ++item) {
    if (wire.size() - at < sizeof(ScalarRecord)) throw_malformed("ends inside an item");
    ScalarRecord scalar;
    std::memcpy(&scalar, wire.data() + at, sizeof scalar);
    if (scalar.kind == static_cast<std::uint32_t>(ItemKind::kTensor)) {
      if (wire.size() - at < sizeof(TensorRecord)) throw_malformed("ends inside a tensor");
      TensorRecord tensor;
      std::memcpy(&tensor, wire.data() + at, sizeof tensor);
      at += sizeof tensor;
      if (const char* fault = tensor_fault(tensor)) throw_malformed(fault);
      const std::size_t dims_bytes =
          static_cast<std::size_t>(tensor.ndim) * 2 * sizeof(std::int64_t);
      if (wire.size() - at < dims_bytes) throw_malformed("ends inside a shape");
      for (std::size_t dim = 0; dim < static_cast<std::size_t>(tensor.ndim); ++dim) {
        std::int64_t extent = 0;
        std::memcpy(&extent, wire.data() + at + dim * sizeof extent, sizeof extent);
        if (extent < 0) throw_malformed("negative extent");
      }
      on_tensor(tensor, wire.data() + at);
      at += dims_bytes;
      continue;
    }
    if (scalar.kind < static_cast<std::uint32_t>(ItemKind::kBool) ||
        scalar.kind > static_cast<std::uint32_t>(ItemKind::kFloat64)) {
      throw_malformed("unknown kind of item");
    }
    if (scalar.reserved != 0) throw_malformed("reserved bits set");
    if (scalar.kind == static_cast<std::uint32_t>(ItemKind::kBool) && scalar.bits > 1)
      throw_malformed("bool beyond 1");
    on_scalar(scalar);
    at += sizeof scalar;
  }
  if (at != wire.size()) throw_malformed("bytes left over");
}

}  // namespace simpler::task_wire
