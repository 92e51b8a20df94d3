// The task ring: the parent publishes entries in order, the child ends them in order.
#pragma once

#include <climits>

#include "hierarchical/ipc/bell.h"

namespace simpler {

template <template <typename> class Atom>
TaskSlot<Atom>& ring_slot(TaskRing<Atom>& ring, std::uint64_t seq) {
  return ring.slots[(seq - 1) % kTaskSlots];
}

// The parent, after filling ring_slot(seq). REQUIRES: seq == published + 1 and seq - retired <=
// kTaskSlots.
template <template <typename> class Atom>
void ring_publish(TaskRing<Atom>& ring, std::uint64_t seq) {
  ring.published.store(seq, std::memory_order_seq_cst);  // release: pairs with ring_available
}

// The child: the next entry to run, or 0. `completed` is the child's own count.
template <template <typename> class Atom>
std::uint64_t ring_available(const TaskRing<Atom>& ring, std::uint64_t completed) {
  const std::uint64_t published = ring.published.load(std::memory_order_acquire);
  return published > completed ? completed + 1 : 0;
}

template <template <typename> class Atom>
void ring_notify(TaskRing<Atom>& ring) {
  ring.event.fetch_add(1, std::memory_order_seq_cst);
  if (ring.waiters.load(std::memory_order_seq_cst) != 0) futex_wake(ring.event, INT_MAX);
}

// The child, after writing status and result of `seq`.
template <template <typename> class Atom>
void ring_complete(TaskRing<Atom>& ring, std::uint64_t seq) {
  ring.completed.store(seq, std::memory_order_seq_cst);  // release: publishes the result
  ring_notify(ring);
}

// The parent: read `event` first, then test the condition, then sleep on what was seen.
template <template <typename> class Atom>
FutexResult ring_sleep(TaskRing<Atom>& ring, std::uint32_t seen, Deadline deadline) {
  ring.waiters.fetch_add(1, std::memory_order_seq_cst);
  const FutexResult result = futex_wait(ring.event, seen, deadline);
  ring.waiters.fetch_sub(1, std::memory_order_relaxed);
  return result;
}

// The bit of entry `after` in the after_mask of entry `seq`; 0 when it is too far back: then it was
// retired before `seq` was filled, and the parent knows how it ended.
constexpr std::uint64_t after_bit(std::uint64_t seq, std::uint64_t after) noexcept {
  const std::uint64_t back = seq - after;
  return back - 1 < kTaskSlots ? std::uint64_t{1} << (back - 1) : 0;
}

// The child's own record of how its last entries ended: bit i is set when entry completed - i did
// not succeed. It is private: the parent may be filling the entries themselves again.
constexpr std::uint64_t ring_note_end(std::uint64_t failed, TaskStatus status) noexcept {
  return failed << 1 | (status == TaskStatus::kDone ? 0U : 1U);
}

inline constexpr std::uint64_t kTaskBegun = ~std::uint64_t{0};  // TaskSlot::recalled

// The child, before it begins `slot`.
template <template <typename> class Atom>
bool ring_must_skip(TaskSlot<Atom>& slot, std::uint64_t failed) {
  if ((slot.flags & kTaskSkip) != 0 || (slot.after_mask & failed) != 0) return true;
  if ((slot.flags & kTaskClaim) == 0)
    return slot.recalled.load(std::memory_order_relaxed) == slot.seq;
  std::uint64_t open = 0;
  return !slot.recalled.compare_exchange_strong(open, kTaskBegun, std::memory_order_relaxed);
}

// The parent: true when the child has not begun `slot` and never will. REQUIRES: kTaskClaim.
template <template <typename> class Atom>
bool ring_take_back(TaskSlot<Atom>& slot, std::uint64_t seq) {
  std::uint64_t open = 0;
  return slot.recalled.compare_exchange_strong(open, seq, std::memory_order_relaxed);
}

// Whoever sleeps on all rings at once.
template <template <typename> class Atom>
void tasks_notify(ReleaseEvent<Atom>& tasks_ended) {
  if (tasks_ended.waiters.load(std::memory_order_seq_cst) == 0) return;
  tasks_ended.count.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(tasks_ended.count, INT_MAX);
}

// The child, after ring_complete(ring, seq).
template <template <typename> class Atom>
void tasks_tell(ReleaseEvent<Atom>& tasks_ended, const TaskRing<Atom>& ring, std::uint64_t seq) {
  if (seq >= ring.wake_at.load(std::memory_order_seq_cst)) tasks_notify(tasks_ended);
}

// The parent: sleeps until a task ends that it has to hear of, unless `anything()` holds. The
// sleeper sets `wake_at` of each ring, announces itself, then reads the count, then looks; the
// child moves `completed`, then looks at `wake_at` and for sleepers, all seq_cst: one of the two
// sees the other.
template <template <typename> class Atom, typename Anything>
FutexResult tasks_sleep(ReleaseEvent<Atom>& tasks_ended, Anything anything, Deadline deadline) {
  tasks_ended.waiters.fetch_add(1, std::memory_order_seq_cst);
  const std::uint32_t seen = tasks_ended.count.load(std::memory_order_seq_cst);
  FutexResult result = FutexResult::kChanged;
  if (!anything()) result = futex_wait(tasks_ended.count, seen, deadline);
  tasks_ended.waiters.fetch_sub(1, std::memory_order_relaxed);
  return result;
}

}  // namespace simpler
