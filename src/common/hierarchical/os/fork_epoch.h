// Tells an object that it has been copied into another process by fork().
#pragma once

#include <cstdint>

namespace simpler {

// A number that is one larger in every forked copy of this process than in the process itself. No
// system call.
std::uint32_t fork_epoch() noexcept;

}  // namespace simpler
