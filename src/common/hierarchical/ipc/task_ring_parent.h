// The parent's end of one child's task ring.
//
// Thread safety: all methods may be called from any thread of the parent.
// Ownership: borrows the mappings; they must outlive this object.
// Fork: construct before the fork; the child must not touch its copy.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "hierarchical/base/interrupt.h"
#include "hierarchical/ipc/layout.h"
#include "hierarchical/ipc/payload_space.h"
#include "hierarchical/ipc/request_arena.h"
#include "hierarchical/ipc/spin.h"
#include "hierarchical/ipc/task_protocol.h"

namespace simpler {

enum class TaskWait : std::uint8_t { kOk, kTimedOut, kInterrupted, kPeerGone };

struct TaskOutcome {
  TaskStatus status = TaskStatus::kNone;
  std::vector<std::byte> result;  // kDone: the result; kFailed: an encoded failure
};

// What the child has said of an entry that has ended. kNone: something that is out of bounds.
struct TaskView {
  TaskStatus status = TaskStatus::kNone;
  std::span<const std::byte> bytes;  // in shared memory, as TaskOutcome::result
  Nanoseconds started_ns = 0;        // both 0 unless the entry is_timed; untrusted like all of it
  Nanoseconds ended_ns = 0;
};

struct TaskEntry {
  std::uint32_t callable_id = 0;
  std::uint64_t after_mask = 0;
  std::span<const std::byte> args;                // copied, but for those above kTaskInlineBytes:
  std::shared_ptr<StagedBlock> staged = nullptr;  // they lie here already
  bool is_claimed = false;                        // take_back() may be tried
  bool is_timed = false;                          // TaskView says when it began and ended
};

struct RunningTask {
  std::uint64_t seq = 0;
  std::uint32_t callable_id = 0;
  Nanoseconds started_ns = 0;
};

class TaskRingParentEnd {
 public:
  TaskRingParentEnd(TreeHeader<>& tree, ChildBlock<>& block, const SharedRegion& payload,
                    PayloadSpace space, RequestArena& arena, Nanoseconds spin_bound);

  // Publishes one task, waiting for room. With kOk `seq` is its number, from 1 and never reused.
  // Throws Error{kInvalidArgument} when the arguments exceed the arena.
  TaskWait publish(std::uint32_t callable_id, std::span<const std::byte> args, std::uint64_t after,
                   Deadline deadline, Interrupt* interrupt, std::uint64_t& seq);
  // Waits until `seq` has ended and takes its outcome. Throws Error{kInvalidArgument} for a task
  // that was never published or whose outcome has been taken, Error{kProtocol} for a result out of
  // bounds.
  TaskWait wait(std::uint64_t seq, Deadline deadline, Interrupt* interrupt, TaskOutcome& out);
  // As wait, spinning at most `bound`; false when it has not ended by then.
  bool spin(std::uint64_t seq, Nanoseconds bound);

  // --- in batches, by one owner that uses neither publish() nor wait() ---
  // One thread at a time; a death may be told meanwhile.

  // Fills the next entry, which the child does not see before flush(); returns its number.
  // REQUIRES: room() > 0.
  std::uint64_t fill(TaskEntry entry);
  void flush();
  // Keeps an entry from starting, if it has not begun. REQUIRES: it has not been taken.
  void recall(std::uint64_t seq);
  // True when it has not begun and never will; it still ends as one that was skipped. `args` then
  // are its arguments, unless they are staged, until the entry is filled again. REQUIRES: as
  // recall(), and it is_claimed.
  bool take_back(std::uint64_t seq, std::span<const std::byte>& args);
  [[nodiscard]] std::uint64_t next_seq() const noexcept { return filled_ + 1; }
  [[nodiscard]] std::uint64_t room() const noexcept {
    return kTaskSlots - (filled_ - retired_.load(std::memory_order_relaxed));
  }
  // How many entries have ended and are not taken. From any thread.
  [[nodiscard]] std::uint64_t ended_count() const noexcept {
    const std::uint64_t retired = retired_.load(std::memory_order_relaxed);
    const std::uint64_t completed =
        std::min(block_.ring.completed.load(std::memory_order_seq_cst), published());
    return completed > retired ? completed - retired : 0;
  }
  // Whoever sleeps on all rings need not hear of ends before `seq`.
  void set_wake_at(std::uint64_t seq) noexcept {
    if (block_.ring.wake_at.load(std::memory_order_relaxed) != seq)
      block_.ring.wake_at.store(seq, std::memory_order_seq_cst);
  }
  // As ended_count() != 0, of those that the sleeper has to hear of.
  [[nodiscard]] bool has_news() const noexcept {
    return ended_count() != 0 && block_.ring.completed.load(std::memory_order_seq_cst) >=
                                     block_.ring.wake_at.load(std::memory_order_relaxed);
  }
  // Calls each(seq, const TaskView&) for every entry that has ended; returns how many.
  template <typename Each>
  std::size_t take_ended(Each each) {
    if (ended_count() == 0) return 0;
    const std::lock_guard lock(mutex_);
    return take_ended_locked(each);
  }

  // The child is reaped or the tree closes: waiters return kPeerGone, now and later.
  void fail_all();
  // A new incarnation starts behind the last number given out; tasks are refused until open().
  // REQUIRES: fail_all() was called.
  void reset();
  void open() noexcept { gone_.store(false, std::memory_order_release); }

  // A guess without a lock: publish() would not have to wait.
  [[nodiscard]] bool has_room_now() const noexcept {
    return published() - block_.ring.completed.load(std::memory_order_acquire) < kTaskSlots;
  }
  [[nodiscard]] std::optional<RunningTask> running() const;
  [[nodiscard]] std::uint64_t published() const noexcept {
    return published_.load(std::memory_order_relaxed);
  }

 private:
  [[nodiscard]] bool ended(std::uint64_t seq) const noexcept {
    return block_.ring.completed.load(std::memory_order_acquire) >= seq ||
           gone_.load(std::memory_order_acquire);
  }
  [[nodiscard]] bool has_room() const;                       // REQUIRES: mutex_ held
  void collect();                                            // REQUIRES: mutex_ held
  void retire(bool has_read_large);                          // REQUIRES: mutex_ held
  [[nodiscard]] TaskView view_of(std::uint64_t seq) const;   // bounds-checked; mutex_ held
  [[nodiscard]] bool has_failed(std::uint64_t after) const;  // REQUIRES: mutex_ held

  // REQUIRES: mutex_ held. What `each` throws leaves its entry to be taken again.
  template <typename Each>
  std::size_t take_ended_locked(Each each) {
    // What the child claims beyond the published entries is not believed.
    const std::uint64_t completed =
        std::min(block_.ring.completed.load(std::memory_order_acquire), published());
    std::uint64_t retired = retired_.load(std::memory_order_relaxed);
    if (retired >= completed) return 0;
    const auto count = static_cast<std::size_t>(completed - retired);
    bool has_read_large = false;
    while (retired < completed) {
      const TaskSlot<>& slot = ring_slot(block_.ring, ++retired);
      has_read_large = has_read_large || slot.result_offset != kInline;
      each(retired, view_of(retired));
      retired_.store(retired, std::memory_order_relaxed);
      outstanding_[(retired - 1) % kTaskSlots].staged.reset();
    }
    retire(has_read_large);
    return count;
  }

  TreeHeader<>& tree_;
  ChildBlock<>& block_;
  const SharedRegion& payload_;
  const PayloadSpace space_;
  RequestArena& arena_;
  AdaptiveSpin spin_;
  mutable std::mutex mutex_;
  std::atomic<std::uint64_t> published_{0};  // written under mutex_
  std::atomic<std::uint64_t> retired_{0};    // written under mutex_
  std::uint64_t filled_ = 0;                 // entries 1..filled_; the publisher's
  struct Outstanding {
    std::uint32_t callable_id = 0;
    std::shared_ptr<StagedBlock> staged;
    std::size_t inline_bytes = 0;
    bool is_timed = false;
  };
  std::array<Outstanding, kTaskSlots> outstanding_;  // guarded by mutex_
  std::unordered_map<std::uint64_t, TaskOutcome>
      finished_;                   // ended, not yet taken; guarded by mutex_
  std::uint64_t lost_before_ = 0;  // tasks up to here died with their child
  std::atomic<bool> gone_{false};
};

}  // namespace simpler
