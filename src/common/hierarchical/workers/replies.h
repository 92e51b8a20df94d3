// From a replied slot to the reply's bytes, or to the error that it stands for.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "hierarchical/workers/call_error.h"
#include "hierarchical/workers/child_process.h"

namespace simpler {

// The reply in `slot`, valid until the slot is released by the caller. When the reply is an error
// the slot is released here and CallError is thrown. REQUIRES: the wait for the slot returned kOk.
std::span<const std::byte> take_reply(ChildProcess& child, int slot);

// As take_reply, as a copy; the slot is released in every case.
std::vector<std::byte> take_reply_copy(ChildProcess& child, int slot);

}  // namespace simpler
