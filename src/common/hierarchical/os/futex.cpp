#include "hierarchical/os/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace simpler {
namespace {

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

void futex_wake(const std::atomic<std::uint32_t>& word, int count) noexcept {
  syscall(SYS_futex, &word, FUTEX_WAKE, count, nullptr, nullptr, 0);
}

}  // namespace simpler
