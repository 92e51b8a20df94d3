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

// The child: must `slot` be skipped because the task it follows did not succeed? Only the child
// writes a status, so within kTaskSlots of each other the entry still holds that of slot.after,
// even when the parent is filling it again: its `seq` must not be read. A task further back was
// retired before `slot` was filled, and then the parent has set kTaskSkip itself.
template <template <typename> class Atom>
bool ring_must_skip(TaskRing<Atom>& ring, const TaskSlot<Atom>& slot) {
  if ((slot.flags & kTaskSkip) != 0) return true;
  if (slot.after == 0 || slot.seq - slot.after >= kTaskSlots) return false;
  return ring_slot(ring, slot.after).status != static_cast<std::uint32_t>(TaskStatus::kDone);
}

}  // namespace simpler
