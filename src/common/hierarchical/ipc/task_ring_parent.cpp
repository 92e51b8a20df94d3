#include "hierarchical/ipc/task_ring_parent.h"

#include <cstring>
#include <string>

#include "hierarchical/base/error.h"
#include "hierarchical/ipc/task_protocol.h"

namespace simpler {

TaskRingParentEnd::TaskRingParentEnd(TreeHeader<>& tree, ChildBlock<>& block,
                                     const SharedRegion& payload, PayloadSpace space,
                                     RequestArena& arena, Nanoseconds spin_bound)
    : tree_(tree),
      block_(block),
      payload_(payload),
      space_(space),
      arena_(arena),
      spin_(spin_bound) {}

bool TaskRingParentEnd::has_room() const {
  return published_.load(std::memory_order_relaxed) - retired_.load(std::memory_order_relaxed) <
         kTaskSlots;
}

bool TaskRingParentEnd::has_failed(std::uint64_t after) const {
  const auto found = finished_.find(after);
  return found != finished_.end() && found->second.status != TaskStatus::kDone;
}

TaskWait TaskRingParentEnd::publish(std::uint32_t callable_id, std::span<const std::byte> args,
                                    std::uint64_t after, Deadline deadline, Interrupt* interrupt,
                                    std::uint64_t& seq) {
  std::shared_ptr<StagedBlock> staged;
  if (args.size() > kTaskInlineBytes) {
    if (args.size() > arena_.capacity()) {
      throw Error(ErrorCode::kInvalidArgument,
                  "the task's arguments take " + std::to_string(args.size()) +
                      " bytes; the limit is " + std::to_string(arena_.capacity()));
    }
    switch (arena_.wait_stage(args.size(), deadline, interrupt, staged)) {
      case ArenaWait::kOk:
        break;
      case ArenaWait::kTimedOut:
        return TaskWait::kTimedOut;
      case ArenaWait::kInterrupted:
        return TaskWait::kInterrupted;
      case ArenaWait::kClosed:
        return TaskWait::kPeerGone;
    }
    std::memcpy(arena_.at(staged->offset()), args.data(), args.size());
  }
  for (;;) {
    const std::uint32_t seen = block_.ring.event.load(std::memory_order_seq_cst);
    {
      const std::lock_guard lock(mutex_);
      if (gone_.load(std::memory_order_relaxed)) return TaskWait::kPeerGone;
      if (!has_room()) collect();
      if (has_room()) {
        seq = published_.load(std::memory_order_relaxed) + 1;
        TaskSlot<>& slot = ring_slot(block_.ring, seq);
        slot.seq = seq;
        slot.after_mask = after == 0 ? 0 : after_bit(seq, after);
        slot.callable_id = callable_id;
        slot.flags = has_failed(after) ? kTaskSkip : 0;
        slot.args_bytes = args.size();
        slot.args_offset = staged ? staged->offset() : kInline;
        if (!staged && !args.empty()) std::memcpy(slot.bytes, args.data(), args.size());
        outstanding_[(seq - 1) % kTaskSlots] = {callable_id, std::move(staged)};
        published_.store(seq, std::memory_order_relaxed);
        filled_ = seq;
        ring_publish(block_.ring, seq);
        break;
      }
    }
    const FutexResult slept = ring_sleep(block_.ring, seen, next_slice(deadline, interrupt));
    if (slept == FutexResult::kTimedOut || slept == FutexResult::kInterrupted) {
      if (interrupt != nullptr && interrupt->pending()) return TaskWait::kInterrupted;
      if (deadline.passed()) return TaskWait::kTimedOut;
    }
  }
  bell_ring(block_.main_bell, kRingBit);
  return TaskWait::kOk;
}

TaskView TaskRingParentEnd::view_of(std::uint64_t seq) const {
  const TaskSlot<>& slot = ring_slot(block_.ring, seq);
  const std::uint32_t status = slot.status;  // once each: the child may change its mind
  const std::uint64_t nbytes = slot.result_bytes;
  const std::uint64_t offset = slot.result_offset;
  const std::byte* from = slot.bytes;
  const bool inline_ok = offset == kInline && nbytes <= kTaskInlineBytes;
  if (status == 0 || status > static_cast<std::uint32_t>(TaskStatus::kSkipped) ||
      (!inline_ok && !space_.reply_contains(offset, nbytes))) {
    return {};  // whoever asks for this task is told
  }
  if (offset != kInline) from = payload_.data() + offset;
  TaskView view{static_cast<TaskStatus>(status), {from, nbytes}};
  if (outstanding_[(seq - 1) % kTaskSlots].is_timed) {
    view.started_ns = slot.started_ns.load(std::memory_order_relaxed);
    view.ended_ns = slot.ended_ns.load(std::memory_order_relaxed);
  }
  return view;
}

void TaskRingParentEnd::retire(bool has_read_large) {
  block_.ring.retired.store(retired_.load(std::memory_order_relaxed), std::memory_order_release);
  if (has_read_large) release_notify(block_.replies_released);
  if (block_.ring.waiters.load(std::memory_order_seq_cst) != 0)
    ring_notify(block_.ring);  // room for publishers
}

void TaskRingParentEnd::collect() {
  take_ended_locked([this](std::uint64_t seq, const TaskView& view) {
    finished_.emplace(seq, TaskOutcome{view.status, std::vector<std::byte>(view.bytes.begin(),
                                                                           view.bytes.end())});
  });
}

std::uint64_t TaskRingParentEnd::fill(TaskEntry entry) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t seq = filled_ + 1;
  TaskSlot<>& slot = ring_slot(block_.ring, seq);
  slot.seq = seq;
  slot.after_mask = entry.after_mask;
  slot.callable_id = entry.callable_id;
  slot.flags = (entry.is_claimed ? kTaskClaim : 0) | (entry.is_timed ? kTaskTimed : 0);
  slot.recalled.store(0, std::memory_order_relaxed);
  slot.args_bytes = entry.args.size();
  slot.args_offset = entry.staged ? entry.staged->offset() : kInline;
  if (!entry.staged && !entry.args.empty()) {
    std::memcpy(slot.bytes, entry.args.data(), entry.args.size());
  }
  const std::size_t inline_bytes = entry.staged ? 0 : entry.args.size();
  outstanding_[(seq - 1) % kTaskSlots] = {entry.callable_id, std::move(entry.staged), inline_bytes,
                                          entry.is_timed};
  filled_ = seq;
  return seq;
}

void TaskRingParentEnd::flush() {
  if (filled_ == published_.load(std::memory_order_relaxed)) return;
  published_.store(filled_, std::memory_order_relaxed);
  ring_publish(block_.ring, filled_);
  bell_ring(block_.main_bell, kRingBit);
}

void TaskRingParentEnd::recall(std::uint64_t seq) {
  TaskSlot<>& slot = ring_slot(block_.ring, seq);
  std::uint64_t open = 0;  // not one that has been claimed
  slot.recalled.compare_exchange_strong(open, seq, std::memory_order_relaxed);
}

bool TaskRingParentEnd::take_back(std::uint64_t seq, std::span<const std::byte>& args) {
  TaskSlot<>& slot = ring_slot(block_.ring, seq);
  if (!ring_take_back(slot, seq)) return false;
  args = {slot.bytes, outstanding_[(seq - 1) % kTaskSlots].inline_bytes};
  return true;
}

bool TaskRingParentEnd::spin(std::uint64_t seq, Nanoseconds bound) {
  if (ended(seq)) return true;
  const Nanoseconds limit = std::min(bound, spin_.bound());
  if (limit <= 0) return false;
  const std::uint64_t seat = spin_sit(tree_, kCallerSeats);
  if (seat == 0) return false;
  const bool done = spin_until([&] { return ended(seq); }, limit);
  spin_leave(tree_, seat);
  return done;
}

TaskWait TaskRingParentEnd::wait(std::uint64_t seq, Deadline deadline, Interrupt* interrupt,
                                 TaskOutcome& out) {
  if (seq == 0 || seq > published()) throw Error(ErrorCode::kInvalidArgument, "no such task");
  bool slept_once = false;
  Nanoseconds slept_since = 0;
  if (!ended(seq) && !deadline.passed()) {
    slept_once = spin(seq, spin_.bound());
    if (!slept_once) slept_since = monotonic_now();
  }
  for (;;) {
    const std::uint32_t seen = block_.ring.event.load(std::memory_order_seq_cst);
    if (ended(seq)) {
      const std::lock_guard lock(mutex_);
      if (seq > lost_before_) collect();
      const auto found = finished_.find(seq);
      if (found != finished_.end()) {
        out = std::move(found->second);
        finished_.erase(found);
        if (out.status == TaskStatus::kNone) {
          throw Error(ErrorCode::kProtocol, "the child's task result is out of bounds");
        }
        if (slept_since != 0) {
          spin_.slept(monotonic_now() - slept_since);
        } else {
          spin_.caught();
        }
        return TaskWait::kOk;
      }
      if (seq <= lost_before_ || gone_.load(std::memory_order_relaxed)) return TaskWait::kPeerGone;
      throw Error(ErrorCode::kInvalidArgument, "the task's outcome has been taken already");
    }
    if (!slept_once && deadline.passed()) return TaskWait::kTimedOut;
    slept_once = true;
    {
      // Results of earlier tasks may fill the arena that the child needs to end this one.
      const std::lock_guard lock(mutex_);
      if (!gone_.load(std::memory_order_relaxed)) collect();
    }
    ring_sleep(block_.ring, seen, next_slice(deadline, interrupt));
    if (ended(seq)) continue;
    if (interrupt != nullptr && interrupt->pending()) return TaskWait::kInterrupted;
    if (deadline.passed()) return TaskWait::kTimedOut;
  }
}

void TaskRingParentEnd::fail_all() {
  {
    const std::lock_guard lock(mutex_);
    gone_.store(true, std::memory_order_release);
  }
  ring_notify(block_.ring);
}

void TaskRingParentEnd::reset() {
  const std::lock_guard lock(mutex_);
  collect();  // what the dead child had finished can still be asked for
  const std::uint64_t last = published_.load(std::memory_order_relaxed);
  lost_before_ = last;
  filled_ = last;
  retired_.store(last, std::memory_order_relaxed);
  for (Outstanding& entry : outstanding_) entry.staged.reset();
  block_.ring.retired.store(last, std::memory_order_relaxed);
  block_.ring.completed.store(last, std::memory_order_relaxed);
  block_.ring.begun.store(last, std::memory_order_relaxed);
}

std::optional<RunningTask> TaskRingParentEnd::running() const {
  const std::uint64_t completed = block_.ring.completed.load(std::memory_order_acquire);
  const std::uint64_t begun = block_.ring.begun.load(std::memory_order_acquire);
  if (begun != completed + 1 || begun == 0 || begun > published()) return std::nullopt;
  const std::lock_guard lock(mutex_);
  const auto index = static_cast<std::size_t>((begun - 1) % kTaskSlots);
  return RunningTask{begun, outstanding_[index].callable_id,
                     ring_slot(block_.ring, begun).started_ns.load(std::memory_order_relaxed)};
}

}  // namespace simpler
