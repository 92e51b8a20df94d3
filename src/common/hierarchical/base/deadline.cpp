#include "hierarchical/base/deadline.h"

#include <time.h>

#include <atomic>

namespace simpler {
namespace {

constexpr Nanoseconds kNanosecondsPerSecond = 1'000'000'000;

Nanoseconds kernel_clock() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<Nanoseconds>(now.tv_sec) * kNanosecondsPerSecond + now.tv_nsec;
}

constinit std::atomic<ClockFunction> current_clock{&kernel_clock};

}  // namespace

Nanoseconds monotonic_now() noexcept { return current_clock.load(std::memory_order_relaxed)(); }

void set_clock_for_testing(ClockFunction clock) noexcept {
  current_clock.store(clock != nullptr ? clock : &kernel_clock, std::memory_order_relaxed);
}

Deadline Deadline::after_seconds(double seconds) noexcept {
  const Nanoseconds now = monotonic_now();
  if (seconds <= 0) return Deadline(now);
  const double nanoseconds = seconds * static_cast<double>(kNanosecondsPerSecond);
  if (nanoseconds >= 0x1p63) return never();
  Nanoseconds end = 0;
  if (__builtin_add_overflow(now, static_cast<Nanoseconds>(nanoseconds), &end)) return never();
  return Deadline(end);
}

Nanoseconds Deadline::remaining_ns() const noexcept {
  if (is_never()) return kForever;
  const Nanoseconds now = monotonic_now();
  if (now >= ns_) return 0;
  Nanoseconds left = 0;
  return __builtin_sub_overflow(ns_, now, &left) ? kForever : left;
}

}  // namespace simpler
