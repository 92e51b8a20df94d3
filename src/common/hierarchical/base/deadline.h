// Points on the monotonic clock, and the clock itself, which tests replace.
//
// CLOCK_MONOTONIC is the same in all processes of one machine, so a deadline may cross to a child.
#pragma once

#include <cstdint>
#include <limits>

namespace simpler {

using Nanoseconds = std::int64_t;

// Nanoseconds on CLOCK_MONOTONIC, or what the function given to set_clock_for_testing returns.
Nanoseconds monotonic_now() noexcept;

using ClockFunction = Nanoseconds (*)() noexcept;
void set_clock_for_testing(ClockFunction clock) noexcept;  // nullptr restores the real one

class Deadline {
 public:
  static constexpr Nanoseconds kForever = std::numeric_limits<Nanoseconds>::max();

  static constexpr Deadline never() noexcept { return Deadline(kForever); }
  static constexpr Deadline at(Nanoseconds ns) noexcept { return Deadline(ns); }
  // Infinity and anything beyond the clock's range is never(); REQUIRES: not NaN.
  static Deadline after_seconds(double seconds) noexcept;

  [[nodiscard]] constexpr Nanoseconds ns() const noexcept { return ns_; }
  [[nodiscard]] constexpr bool is_never() const noexcept { return ns_ == kForever; }
  [[nodiscard]] bool passed() const noexcept { return !is_never() && monotonic_now() >= ns_; }
  // 0 once passed; kForever for never().
  [[nodiscard]] Nanoseconds remaining_ns() const noexcept;
  [[nodiscard]] constexpr Deadline earlier(Deadline other) const noexcept {
    return ns_ < other.ns_ ? *this : other;
  }

 private:
  explicit constexpr Deadline(Nanoseconds ns) noexcept : ns_(ns) {}
  Nanoseconds ns_;
};

}  // namespace simpler
