#include "hierarchical/os/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif

namespace simpler {
namespace {

// struct futex_waitv, which headers older than Linux 5.16 lack.
struct WaitEntry {
  std::uint64_t expected;
  std::uint64_t address;
  std::uint32_t flags;
  std::uint32_t reserved;
};
constexpr std::uint32_t kWordOf32Bits = 2;  // FUTEX_32, and not FUTEX_PRIVATE

static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));

constexpr Nanoseconds kNanosecondsPerSecond = 1'000'000'000;

}  // namespace

FutexResult futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected,
                       Deadline deadline) noexcept {
  timespec end{};
  const timespec* timeout = nullptr;
  if (!deadline.is_never()) {
    const Nanoseconds ns =
        std::max<Nanoseconds>(deadline.ns(), 0);  // the kernel refuses times before its epoch
    end.tv_sec = static_cast<time_t>(ns / kNanosecondsPerSecond);
    end.tv_nsec = static_cast<long>(ns % kNanosecondsPerSecond);
    timeout = &end;
  }
  // FUTEX_WAIT takes a relative time; the BITSET form an absolute one, which a restart after a
  // signal keeps.
  if (syscall(SYS_futex, &word, FUTEX_WAIT_BITSET, expected, timeout, nullptr,
              FUTEX_BITSET_MATCH_ANY) == 0) {
    return FutexResult::kWoken;
  }
  switch (errno) {
    case EAGAIN:
      return FutexResult::kChanged;
    case ETIMEDOUT:
      return FutexResult::kTimedOut;
    case EINTR:
      return FutexResult::kInterrupted;
    default:
      return FutexResult::kWoken;
  }
}

FutexAny futex_wait_any(std::span<const FutexExpectation> words) noexcept {
  std::array<WaitEntry, kMaxFutexExpectations> entries;
  for (std::size_t i = 0; i < words.size(); ++i) {
    entries[i] = {words[i].expected, reinterpret_cast<std::uintptr_t>(words[i].word), kWordOf32Bits,
                  0};
  }
  const long woken = syscall(SYS_futex_waitv, entries.data(), words.size(), 0U, nullptr, 0);
  if (woken >= 0) return {FutexAny::Kind::kWoken, static_cast<std::size_t>(woken)};
  if (errno == EAGAIN || errno == EINTR) return {FutexAny::Kind::kLookAgain};
  return {FutexAny::Kind::kUnsupported};
}

void futex_wake(const std::atomic<std::uint32_t>& word, int count) noexcept {
  syscall(SYS_futex, &word, FUTEX_WAKE, count, nullptr, nullptr, 0);
}

}  // namespace simpler
