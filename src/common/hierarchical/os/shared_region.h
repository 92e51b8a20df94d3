// Memory shared with children forked later: a memfd mapped MAP_SHARED, its descriptor closed at
// once.
//
// The mapping is at one address in the parent and every child. No name exists, so nothing is left
// behind whatever dies when (LC-3, LC-7).
//
// Thread safety: all methods may be called from any thread.
// Fork: construct before the fork. A child calls seal_regions_except() first, so that the memory of
// regions belonging to other trees ends with their owner.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace simpler {

class SharedRegion {
 public:
  enum class Pages : std::uint8_t {
    kSparse,     // pages come with the first touch, MAP_NORESERVE
    kCommitted,  // fallocate at once: what cannot be had is refused here, never a SIGBUS later
  };

  // Rounds nbytes up to whole pages. Throws Error{kInvalidArgument} for 0 bytes,
  // Error{kOutOfMemory} naming the bytes needed and free when committed pages cannot be had (also
  // under the memory control group's limit), Error{kSystem} otherwise. `name` shows in
  // /proc/PID/maps. Core files leave the region out.
  SharedRegion(std::size_t nbytes, const std::string& name, Pages pages);
  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] std::uintptr_t address() const noexcept {
    return reinterpret_cast<std::uintptr_t>(data_);
  }
  [[nodiscard]] bool contains(std::uintptr_t address, std::size_t nbytes) const noexcept;

  // Gives the whole pages inside [offset, offset + nbytes) back to the kernel (MADV_REMOVE); they
  // read as zero afterwards in every process. REQUIRES: the range lies inside the region.
  void release_pages(std::size_t offset, std::size_t nbytes) const noexcept;
  // Bytes of the region whose pages some process has touched and not released, as mincore tells
  // (st_blocks needs a descriptor, or privileges for /proc/self/map_files). Committed pages count
  // from their first touch.
  [[nodiscard]] std::size_t resident_bytes() const;

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// In a child just after the fork: every region of this process that is not in `keep` is replaced by
// an inaccessible mapping at the same address. Async-signal-safe apart from the registry's own
// storage: takes no lock (the fork handlers of the registry hold it across the fork).
void seal_regions_except(std::span<const SharedRegion* const> keep) noexcept;

}  // namespace simpler
