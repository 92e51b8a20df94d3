#include "hierarchical/ipc/arena_allocator.h"

#include <iterator>
#include <string>

#include "hierarchical/base/error.h"

namespace simpler {

ArenaAllocator::ArenaAllocator(std::size_t nbytes, std::size_t alignment)
    : capacity_(nbytes & ~(alignment - 1)), alignment_(alignment) {
  if (capacity_ > 0) insert_free(0, capacity_);
}

std::optional<std::size_t> ArenaAllocator::allocate(std::size_t nbytes) {
  if (nbytes == 0) throw Error(ErrorCode::kInvalidArgument, "allocation of 0 bytes");
  if (nbytes > capacity_) return std::nullopt;  // also keeps the rounding below from overflowing
  const std::size_t size = (nbytes + alignment_ - 1) & ~(alignment_ - 1);
  const auto best = free_by_size_.lower_bound({size, 0});
  if (best == free_by_size_.end()) return std::nullopt;
  const auto [block_size, offset] = *best;
  live_.emplace(offset, size);
  erase_free(free_by_offset_.find(offset));
  if (block_size > size) insert_free(offset + size, block_size - size);
  used_ += size;
  return offset;
}

std::size_t ArenaAllocator::release(std::size_t offset) {
  const auto block = live_.find(offset);
  if (block == live_.end()) {
    throw Error(ErrorCode::kInvalidArgument,
                "offset " + std::to_string(offset) + " is not allocated, or already freed");
  }
  const std::size_t size = block->second;
  std::size_t start = offset;
  std::size_t end = offset + size;
  live_.erase(block);
  used_ -= size;
  auto next = free_by_offset_.lower_bound(offset);
  if (next != free_by_offset_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == start) {
      start = previous->first;
      erase_free(previous);
    }
  }
  if (next != free_by_offset_.end() && next->first == end) {
    end += next->second;
    erase_free(next);
  }
  insert_free(start, end - start);
  return size;
}

std::size_t ArenaAllocator::largest_free() const noexcept {
  return free_by_size_.empty() ? 0 : free_by_size_.rbegin()->first;
}

void ArenaAllocator::insert_free(std::size_t offset, std::size_t nbytes) {
  free_by_offset_.emplace(offset, nbytes);
  free_by_size_.emplace(nbytes, offset);
}

void ArenaAllocator::erase_free(std::map<std::size_t, std::size_t>::iterator it) {
  free_by_size_.erase({it->second, it->first});
  free_by_offset_.erase(it);
}

}  // namespace simpler
