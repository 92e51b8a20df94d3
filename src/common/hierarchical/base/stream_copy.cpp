#include "hierarchical/base/stream_copy.h"

#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace simpler {

namespace {

#ifdef __SSE2__
constexpr std::size_t kVector = sizeof(__m128i);
constexpr std::size_t kLine = 4 * kVector;
constexpr std::size_t kAhead = 8 * kLine;  // reads are asked for so far ahead

// `to` is aligned; `lines` of kLine bytes.
void stream_lines(std::byte* to, const std::byte* from, std::size_t lines) noexcept {
  for (std::size_t line = 0; line < lines; ++line, to += kLine, from += kLine) {
    __builtin_prefetch(from + kAhead, 0, 0);
    __m128i parts[4];
    for (std::size_t i = 0; i < 4; ++i)
      parts[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * kVector));
    for (std::size_t i = 0; i < 4; ++i)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i * kVector), parts[i]);
  }
  _mm_sfence();  // streaming stores are not ordered by the locks of whoever reads next
}

bool overlaps(const std::byte* to, const std::byte* from, std::size_t nbytes) noexcept {
  return to < from + nbytes && from < to + nbytes;
}
#endif

}  // namespace

void stream_copy(std::byte* to, const std::byte* from, std::size_t nbytes,
                 std::size_t whole) noexcept {
#ifdef __SSE2__
  if (whole >= kStreamBytes && nbytes >= 2 * kLine && !overlaps(to, from, nbytes)) {
    const std::size_t head = (kVector - reinterpret_cast<std::uintptr_t>(to) % kVector) % kVector;
    const std::size_t lines = (nbytes - head) / kLine;
    const std::size_t body = head + lines * kLine;
    std::memcpy(to, from, head);
    stream_lines(to + head, from + head, lines);
    std::memcpy(to + body, from + body, nbytes - body);
    return;
  }
#endif
  std::memmove(to, from, nbytes);
}

}  // namespace simpler
