// Copies that are large beside the processor's caches.
//
// Thread safety: any thread; the bytes are the caller's.
#pragma once

#include <cstddef>

namespace simpler {

// From so many bytes on, of one copy or of several that belong together, a copy goes past the
// caches: a store that misses them reads the line first, which is a third of the traffic.
inline constexpr std::size_t kStreamBytes = std::size_t{4} << 20;

// memmove of `nbytes`, part of a move of `whole` bytes.
void stream_copy(std::byte* to, const std::byte* from, std::size_t nbytes,
                 std::size_t whole) noexcept;

}  // namespace simpler
