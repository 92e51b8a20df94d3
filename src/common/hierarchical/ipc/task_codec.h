// A task's arguments on the wire: tensors and scalars in the order the caller added them.
//
// Wire form (little endian, 8-byte aligned): a header with counts, then one record an item; a
// tensor record is followed by `ndim` shapes and `ndim` strides (int64, bytes).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <variant>
#include <vector>

namespace simpler {

inline constexpr int kMaxDims = 16;
inline constexpr std::size_t kMaxTaskItems = 4096;

struct TensorArg {
  std::uint64_t address = 0;  // in the chip's process
  std::int64_t nbytes = 0;    // bytes from address that the view spans
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;  // bytes, one a dimension
  std::int32_t dtype = 0;             // simpler_dtype of kernel.h
  std::int32_t tag = 0;               // simpler_tag of kernel.h
  bool operator==(const TensorArg&) const = default;
};
using TaskItem = std::variant<TensorArg, bool, std::int64_t, double>;

std::vector<std::byte> encode_task(std::span<const TaskItem> items);
// Throws Error{kProtocol} on anything out of bounds, over the limits or with bytes left over.
std::vector<TaskItem> decode_task(std::span<const std::byte> wire);

}  // namespace simpler
