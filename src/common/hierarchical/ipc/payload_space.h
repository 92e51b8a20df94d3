// Where one child's large payloads lie in the tree's payload region.
#pragma once

#include <cstddef>

namespace simpler {

struct PayloadSpace {
  std::size_t request_base = 0;
  std::size_t request_bytes = 0;
  std::size_t reply_base = 0;
  std::size_t reply_bytes = 0;

  // A block of `nbytes` at `offset` lies wholly inside the reply half.
  [[nodiscard]] constexpr bool reply_contains(std::size_t offset,
                                              std::size_t nbytes) const noexcept {
    return offset >= reply_base && nbytes <= reply_bytes &&
           offset - reply_base <= reply_bytes - nbytes;
  }
};

}  // namespace simpler
