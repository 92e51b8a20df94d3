// Allocates offsets inside a region it never touches: best fit, coalescing, aligned.
//
// Used for device memory of the cpu chip, the shared host heap and the payload arenas.
// Thread safety: one thread at a time (callers lock).
// Complexity: O(log n) allocate and release in the number of free blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

namespace simpler {

class ArenaAllocator {
 public:
  // REQUIRES: alignment is a power of two. `nbytes` is rounded down to a multiple of it.
  explicit ArenaAllocator(std::size_t nbytes, std::size_t alignment = 256);

  // An aligned offset, or nullopt when no free block is large enough. REQUIRES: nbytes > 0 (throws
  // Error{kInvalidArgument}). Sizes that overflow when aligned are simply not available.
  std::optional<std::size_t> allocate(std::size_t nbytes);
  // Returns the aligned size of the block. Throws Error{kInvalidArgument} for an offset that is not
  // the start of a live block ("not allocated, or already freed").
  std::size_t release(std::size_t offset);

  [[nodiscard]] std::size_t capacity() const noexcept { return capacity_; }
  [[nodiscard]] std::size_t used_bytes() const noexcept { return used_; }
  [[nodiscard]] std::size_t largest_free() const noexcept;
  [[nodiscard]] std::size_t block_count() const noexcept { return live_.size(); }

 private:
  void insert_free(std::size_t offset, std::size_t nbytes);
  void erase_free(std::map<std::size_t, std::size_t>::iterator it);

  std::size_t capacity_;
  std::size_t alignment_;
  std::size_t used_ = 0;
  std::map<std::size_t, std::size_t> free_by_offset_;           // offset -> size
  std::set<std::pair<std::size_t, std::size_t>> free_by_size_;  // (size, offset)
  std::unordered_map<std::size_t, std::size_t> live_;           // offset -> size
};

}  // namespace simpler
