#include "hierarchical/workers/native_kernel.h"

#include <array>
#include <bit>
#include <cstring>
#include <exception>
#include <memory>
#include <vector>

#include "hierarchical/ipc/task_wire.h"

namespace simpler {
namespace {

using task_wire::ItemKind;
using task_wire::ScalarRecord;
using task_wire::TensorRecord;

constexpr std::size_t kErrorBytes = std::size_t{16} << 10;

struct Scratch {
  std::vector<simpler_tensor> tensors;
  std::vector<simpler_scalar> scalars;
  std::vector<std::uint64_t> aligned_wire;
  std::array<char, kErrorBytes> error;
};

// Behind a pointer: 16 KiB in every thread that never runs a kernel would be too much.
Scratch& thread_scratch() {
  thread_local const std::unique_ptr<Scratch> scratch = std::make_unique<Scratch>();
  return *scratch;
}

std::span<const std::byte> aligned(std::span<const std::byte> wire, Scratch& scratch) {
  if (reinterpret_cast<std::uintptr_t>(wire.data()) % alignof(std::int64_t) == 0) return wire;
  scratch.aligned_wire.resize((wire.size() + sizeof(std::uint64_t) - 1) / sizeof(std::uint64_t));
  std::memcpy(scratch.aligned_wire.data(), wire.data(), wire.size());
  return std::as_bytes(std::span(scratch.aligned_wire)).first(wire.size());
}

void decode(std::span<const std::byte> wire, Scratch& scratch) {
  scratch.tensors.clear();
  scratch.scalars.clear();
  const auto on_tensor = [&scratch](const TensorRecord& record, const std::byte* dims) {
    const auto* const shape = reinterpret_cast<const std::int64_t*>(dims);
    scratch.tensors.push_back({reinterpret_cast<void*>(static_cast<std::uintptr_t>(record.address)),
                               record.nbytes, shape, shape + record.ndim, record.ndim, record.dtype,
                               record.tag, 0});
  };
  const auto on_scalar = [&scratch](const ScalarRecord& record) {
    simpler_scalar scalar{};
    switch (static_cast<ItemKind>(record.kind)) {
      case ItemKind::kBool:
        scalar.kind = SIMPLER_SCALAR_BOOL;
        break;
      case ItemKind::kInt64:
        scalar.kind = SIMPLER_SCALAR_INT64;
        break;
      default:
        scalar.kind = SIMPLER_SCALAR_FLOAT64;
        break;
    }
    std::memcpy(&scalar.v, &record.bits, sizeof record.bits);
    scratch.scalars.push_back(scalar);
  };
  task_wire::visit(wire, on_tensor, on_scalar);
}

}  // namespace

KernelOutcome call_native_kernel(simpler_kernel_fn kernel, std::span<const std::byte> wire,
                                 std::int32_t device_id) {
  Scratch& scratch = thread_scratch();
  decode(aligned(wire, scratch), scratch);
  scratch.error.front() = '\0';
  const simpler_kernel_args args{sizeof(simpler_kernel_args),
                                 SIMPLER_KERNEL_ABI_VERSION,
                                 device_id,
                                 static_cast<std::uint32_t>(scratch.tensors.size()),
                                 static_cast<std::uint32_t>(scratch.scalars.size()),
                                 scratch.tensors.data(),
                                 scratch.scalars.data(),
                                 nullptr,
                                 scratch.error.data(),
                                 scratch.error.size()};
  int code = 0;
  try {
    code = kernel(&args);
  } catch (const std::exception& error) {
    return {-1, std::string("kernel threw a C++ exception: ") + error.what()};
  }
  if (code == 0) return {};
  scratch.error.back() = '\0';
  if (scratch.error.front() == '\0') return {code, "kernel returned " + std::to_string(code)};
  return {code, scratch.error.data()};
}

}  // namespace simpler
