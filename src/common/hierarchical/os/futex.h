// Futex words shared between processes (never FUTEX_PRIVATE: the peer is another process).
//
// std::atomic::wait does not wake another process with libstdc++ 12, so the system call is used.
#pragma once

#include <atomic>
#include <cstdint>

#include "hierarchical/base/deadline.h"

namespace simpler {

enum class FutexResult : std::uint8_t {
  kWoken,        // woken, or a spurious return: look at the word again
  kChanged,      // the word did not hold `expected`
  kTimedOut,     // the deadline passed
  kInterrupted,  // a signal handler ran in this thread
};

// Sleeps while *word == expected, until woken, the deadline (CLOCK_MONOTONIC, absolute) or a
// signal.
FutexResult futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected,
                       Deadline deadline) noexcept;

// Wakes at most `count` sleepers.
void futex_wake(const std::atomic<std::uint32_t>& word, int count) noexcept;

}  // namespace simpler
