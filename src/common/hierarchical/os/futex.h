// Futex words shared between processes (never FUTEX_PRIVATE: the peer is another process).
//
// std::atomic::wait does not wake another process with libstdc++ 12, so the system call is used.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

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

// Several words to sleep on at once.
struct FutexExpectation {
  const std::atomic<std::uint32_t>* word;
  std::uint32_t expected;
};
inline constexpr std::size_t kMaxFutexExpectations = 128;  // the kernel's limit

struct FutexAny {
  enum class Kind : std::uint8_t {
    kWoken,        // somebody woke the sleepers of the word at `position`
    kLookAgain,    // a word did not hold what was expected, or a signal handler ran
    kUnsupported,  // Linux older than 5.16, or the call is forbidden
  };
  Kind kind;
  std::size_t position = 0;
};

// Sleeps while every word holds what is expected. REQUIRES: at most kMaxFutexExpectations.
FutexAny futex_wait_any(std::span<const FutexExpectation> words) noexcept;

// Wakes at most `count` sleepers.
void futex_wake(const std::atomic<std::uint32_t>& word, int count) noexcept;

}  // namespace simpler
