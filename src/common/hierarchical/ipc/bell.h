// Ringing and sleeping on a Bell without lost wake-ups.
//
// A ringer sets bits, then looks for sleepers; a sleeper announces itself, then looks for bits.
// Both orders are sequentially consistent, so one of the two sees the other.
#pragma once

#include <climits>

#include "hierarchical/ipc/layout.h"
#include "hierarchical/os/futex.h"

namespace simpler {

// REQUIRES: bits != 0. Wakes one sleeper; true when there was one.
template <template <typename> class Atom>
bool bell_ring(Bell<Atom>& bell, std::uint32_t bits) {
  bell.pending.fetch_or(bits, std::memory_order_seq_cst);
  if (bell.sleepers.load(std::memory_order_seq_cst) == 0) return false;
  futex_wake(bell.pending, 1);
  return true;
}

// All bits set since the last take; what was written before each ring is visible.
template <template <typename> class Atom>
std::uint32_t bell_take(Bell<Atom>& bell) {
  if (bell.pending.load(std::memory_order_relaxed) == 0) return 0;
  return bell.pending.exchange(0, std::memory_order_seq_cst);
}

// Sleeps while no bit is set. Returns at once when one is.
template <template <typename> class Atom>
FutexResult bell_sleep(Bell<Atom>& bell, Deadline deadline) {
  bell.sleepers.fetch_add(1, std::memory_order_seq_cst);
  FutexResult result = FutexResult::kChanged;
  if (bell.pending.load(std::memory_order_seq_cst) == 0)
    result = futex_wait(bell.pending, 0U, deadline);
  bell.sleepers.fetch_sub(1, std::memory_order_relaxed);
  return result;
}

// ReleaseEvent: read `release_seen` first, then test the condition, then sleep on what was seen.
template <template <typename> class Atom>
std::uint32_t release_seen(const ReleaseEvent<Atom>& event) {
  return event.count.load(std::memory_order_seq_cst);
}

template <template <typename> class Atom>
void release_notify(ReleaseEvent<Atom>& event) {
  event.count.fetch_add(1, std::memory_order_seq_cst);
  if (event.waiters.load(std::memory_order_seq_cst) != 0) futex_wake(event.count, INT_MAX);
}

template <template <typename> class Atom>
FutexResult release_sleep(ReleaseEvent<Atom>& event, std::uint32_t seen, Deadline deadline) {
  event.waiters.fetch_add(1, std::memory_order_seq_cst);
  const FutexResult result = futex_wait(event.count, seen, deadline);
  event.waiters.fetch_sub(1, std::memory_order_relaxed);
  return result;
}

}  // namespace simpler
