// The parent's end of one child's task ring.
//
// Thread safety: all methods may be called from any thread of the parent.
// Ownership: borrows the mappings; they must outlive this object.
// Fork: construct before the fork; the child must not touch its copy.
#pragma once

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

namespace simpler {

enum class TaskWait : std::uint8_t { kOk, kTimedOut, kInterrupted, kPeerGone };

struct TaskOutcome {
  TaskStatus status = TaskStatus::kNone;
  std::vector<std::byte> result;  // kDone: the result; kFailed: an encoded failure
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
  TaskOutcome read_outcome(const TaskSlot<>& slot) const;    // bounds-checked
  [[nodiscard]] bool has_failed(std::uint64_t after) const;  // REQUIRES: mutex_ held

  TreeHeader<>& tree_;
  ChildBlock<>& block_;
  const SharedRegion& payload_;
  const PayloadSpace space_;
  RequestArena& arena_;
  AdaptiveSpin spin_;
  mutable std::mutex mutex_;
  std::atomic<std::uint64_t> published_{0};  // written under mutex_
  std::uint64_t retired_ = 0;                // guarded by mutex_
  struct Outstanding {
    std::uint32_t callable_id = 0;
    std::shared_ptr<StagedBlock> staged;
  };
  std::array<Outstanding, kTaskSlots> outstanding_;  // guarded by mutex_
  std::unordered_map<std::uint64_t, TaskOutcome>
      finished_;                   // ended, not yet taken; guarded by mutex_
  std::uint64_t lost_before_ = 0;  // tasks up to here died with their child
  std::atomic<bool> gone_{false};
};

}  // namespace simpler
