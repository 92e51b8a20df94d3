// Calls a native kernel with decoded task arguments: no GIL, no Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "simpler/kernel.h"

namespace simpler {

struct KernelOutcome {
  int code = 0;         // what the kernel returned; 0 is success
  std::string message;  // with code != 0: the kernel's own text, else "kernel returned N"
};

// Decodes `wire` (ipc/task_codec.h) and calls `kernel`. Uses per-thread storage that is reused, so
// that a call with few arguments allocates nothing. Throws Error{kProtocol} when the arguments do
// not decode.
KernelOutcome call_native_kernel(simpler_kernel_fn kernel, std::span<const std::byte> wire,
                                 std::int32_t device_id);

}  // namespace simpler
