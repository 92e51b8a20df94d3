// Both ends of a task ring, and the parent's reaper, reduced to the protocol, for any Atom.
#pragma once

#include <array>
#include <cstdint>

#include "hierarchical/ipc/task_protocol.h"
#include "model/atom.h"

namespace simpler::model {

template <template <typename> class Atom>
struct RingWorld {
  TaskRing<Atom> ring;
  Bell<Atom> bell;
  ReleaseEvent<Atom> tasks_ended;
  Atom<std::uint32_t> dead{0};
  std::array<Guarded, kTaskSlots> arguments, results;

  static std::size_t place(std::uint64_t seq) { return (seq - 1) % kTaskSlots; }

  // All counters as after `seq` tasks that went well.
  void begin_at(std::uint64_t seq) {
    ring.published.store(seq);
    ring.completed.store(seq);
    ring.retired.store(seq);
  }

  // The parent. `value` is what the task returns; 0: it fails.
  void publish(std::uint64_t seq, std::uint64_t value, std::uint64_t after = 0, bool skip = false) {
    check(seq - ring.retired.load(std::memory_order_relaxed) <= kTaskSlots, "there is room");
    TaskSlot<Atom>& slot = ring_slot(ring, seq);
    arguments[place(seq)].write();
    slot.seq = seq;
    slot.after_mask = after == 0 ? 0 : after_bit(seq, after);
    slot.flags = skip ? kTaskSkip : 0;
    slot.args_bytes = value;
    ring_publish(ring, seq);
    bell_ring(bell, kRingBit);
  }

  // False when the child has died before it ended `seq`.
  bool wait_completed(std::uint64_t seq) {
    for (;;) {
      const std::uint32_t seen = ring.event.load(std::memory_order_seq_cst);
      const bool gone = dead.load(std::memory_order_seq_cst) != 0;
      if (ring.completed.load(std::memory_order_acquire) >= seq) return true;
      if (gone) return false;
      ring_sleep(ring, seen, Deadline::never());
    }
  }

  TaskStatus retire(std::uint64_t seq, std::uint64_t value) {
    const TaskSlot<Atom>& slot = ring_slot(ring, seq);
    results[place(seq)].read();
    const auto status = static_cast<TaskStatus>(slot.status);
    if (status == TaskStatus::kDone) check(slot.result_bytes == value, "the result is this task's");
    ring.retired.store(seq, std::memory_order_release);
    return status;
  }

  // As the engine waits: on one word for all rings.
  void sleep_on_all_rings(std::uint64_t seq) {
    const auto has_ended = [this, seq] {
      return ring.completed.load(std::memory_order_seq_cst) >= seq;
    };
    while (!has_ended()) tasks_sleep(tasks_ended, has_ended, Deadline::never());
  }
  // The same by one that need not hear of what ends before; it sleeps once, unless woken early.
  void sleep_until(std::uint64_t seq) {
    ring.wake_at.store(seq, std::memory_order_seq_cst);
    sleep_on_all_rings(seq);
  }

  // The child; `last` is the task after which it leaves.
  void serve(std::uint64_t completed, std::uint64_t last) {
    std::uint64_t failed = 0;
    while (completed < last) {
      const std::uint64_t seq = ring_available(ring, completed);
      if (seq == 0) {
        if (bell_take(bell) == 0) bell_sleep(bell, Deadline::never());
        continue;
      }
      TaskSlot<Atom>& slot = ring_slot(ring, seq);
      arguments[place(seq)].read();
      check(slot.seq == seq, "tasks run in the order published");
      TaskStatus status = slot.args_bytes != 0 ? TaskStatus::kDone : TaskStatus::kFailed;
      if (ring_must_skip(slot, failed)) status = TaskStatus::kSkipped;
      failed = ring_note_end(failed, status);
      results[place(seq)].write();
      slot.status = static_cast<std::uint32_t>(status);
      slot.result_bytes = slot.args_bytes;
      ring_complete(ring, seq);
      tasks_tell(tasks_ended, ring, seq);
      completed = seq;
    }
  }

  void reap() {
    dead.store(1, std::memory_order_seq_cst);
    ring_notify(ring);
  }
};

}  // namespace simpler::model
