// Large private memory that is about to be filled: fewer page faults, where the kernel has huge
// pages to give.
#pragma once

#include <cstddef>

namespace simpler {

// A hint for the whole huge pages inside [data, data + nbytes) (MADV_HUGEPAGE); never fails.
void prefer_huge_pages(void* data, std::size_t nbytes) noexcept;

}  // namespace simpler
