// The one exception of the control plane: a code, a sentence, and where it happened.
//
// Thread safety: values; freely copied between threads.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace simpler {

enum class ErrorCode : std::uint8_t {
  kInvalidArgument,  // the caller's mistake; nothing was sent
  kClosed,           // used in the wrong lifecycle state
  kWorkerDied,       // the child owing the answer is gone
  kTimedOut,         // a deadline passed
  kRemote,           // the child answered with an error of its own
  kProtocol,         // a child sent bytes that do not decode or lie out of bounds
  kBackPressure,     // slots, queue or arena full past the deadline
  kOutOfMemory,      // an allocator has no block of that size
  kSystem,           // a system call failed; the message names it and errno
  kUnsupported,      // the platform lacks something; the message says what
};

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}

  [[nodiscard]] ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

// kSystem with `what` and the text of the current errno, e.g. "mmap of 4096 bytes: Cannot allocate
// memory".
[[noreturn]] void throw_errno(const std::string& what);

}  // namespace simpler
