// Spinning that is bounded, adaptive, and counted across the processes of a tree (CP-11).
//
// A seat is one bit of TreeHeader::spinners: a child has its own, callers of the parent share the
// rest, so the parent can clear the seat of a child that died in it. A child keeps its seat while
// it serves what its spin caught: it occupies a core then, too.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <thread>

#include "hierarchical/base/deadline.h"
#include "hierarchical/ipc/layout.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace simpler {

inline constexpr int kChildSeats = 40;  // children beyond these never spin
inline constexpr std::uint64_t kCallerSeats = ~std::uint64_t{0} << kChildSeats;

inline void cpu_relax() noexcept {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Takes one of the seats in `wanted`; 0 when all of them, or the limit, are taken.
template <template <typename> class Atom>
std::uint64_t spin_sit(TreeHeader<Atom>& tree, std::uint64_t wanted) {
  std::uint64_t taken = tree.spinners.load(std::memory_order_relaxed);
  for (;;) {
    const std::uint64_t free = wanted & ~taken;
    if (free == 0 || static_cast<std::uint32_t>(std::popcount(taken)) >= tree.spin_limit) return 0;
    const std::uint64_t seat = free & (~free + 1);
    if (tree.spinners.compare_exchange_weak(taken, taken | seat, std::memory_order_relaxed))
      return seat;
  }
}

template <template <typename> class Atom>
void spin_leave(TreeHeader<Atom>& tree, std::uint64_t seat) {
  if (seat != 0) tree.spinners.fetch_and(~seat, std::memory_order_relaxed);
}

// How long the next wait should spin: the full bound while waits are short, almost nothing while
// they are long, so that a paced caller does not pay for spins that never catch anything.
class AdaptiveSpin {
 public:
  explicit AdaptiveSpin(Nanoseconds bound) noexcept : bound_(bound), current_(bound) {}

  [[nodiscard]] Nanoseconds bound() const noexcept {
    return current_.load(std::memory_order_relaxed);
  }

  // The wait ended while spinning.
  void caught() noexcept { set(bound_); }
  // The wait ended in a sleep of `ns` after the spin. A sleep that a few spins would have covered
  // counts as short: two ends that both sleep see each other's wake-up time in it, and would never
  // find back to spinning.
  void slept(Nanoseconds ns) noexcept {
    set(ns <= 4 * bound_ ? bound_ : std::max(bound() / 2, std::min<Nanoseconds>(bound_, kFloor)));
  }

 private:
  void set(Nanoseconds next) noexcept {
    if (next != bound()) current_.store(next, std::memory_order_relaxed);
  }

  static constexpr Nanoseconds kFloor = 3000;
  const Nanoseconds bound_;
  std::atomic<Nanoseconds> current_;
};

// Spins until `done()` or `bound` has passed; true when done. After the first few microseconds, in
// which the answer of a running peer comes, the core is offered to whoever else is ready: with more
// processes than cores it may be the very one that is waited for.
template <typename Done>
bool spin_until(Done done, Nanoseconds bound) {
  constexpr int kChecksPerClock = 16;
  constexpr Nanoseconds kAlone = 4000;
  if (done()) return true;
  if (bound <= 0) return false;
  const Nanoseconds start = monotonic_now();
  Nanoseconds spent = 0;
  do {
    for (int i = 0; i < kChecksPerClock; ++i) {
      if (done()) return true;
      cpu_relax();
      cpu_relax();
    }
    if (spent > kAlone) std::this_thread::yield();
    spent = monotonic_now() - start;
  } while (spent < bound);
  return done();
}

}  // namespace simpler
