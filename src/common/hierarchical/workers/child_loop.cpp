#include "hierarchical/workers/child_loop.h"

#include <bit>
#include <cstring>
#include <limits>
#include <system_error>

#include "hierarchical/ipc/control_protocol.h"
#include "hierarchical/ipc/task_protocol.h"
#include "hierarchical/os/thread.h"

namespace simpler {

namespace {

constexpr Nanoseconds kTrimAfter = 1'000'000'000;
constexpr Nanoseconds kNoDeadline = Deadline::kForever;  // for as long as the parent lives

constexpr std::uint32_t bit(int slot) noexcept { return 1U << static_cast<unsigned>(slot); }

enum class Fit : std::uint8_t { kNow, kLater, kNever };

// The oldest request among the slots in `pending` that fits now, or -1. Clears the bits of those
// that never will: a bell's bit may be older than what is in the slot now, and only the state says
// for whom it is posted.
template <typename FitOf>
int oldest(const ChildBlock<>& block, std::uint32_t& pending, FitOf fit_of) noexcept {
  int found = -1;
  std::uint64_t found_id = std::numeric_limits<std::uint64_t>::max();
  for (std::uint32_t left = pending; left != 0; left &= left - 1) {
    const int slot = std::countr_zero(left);
    const ControlSlot<>& shared = block.slots[slot];
    const Fit fit = fit_of(SlotState{shared.state.load(std::memory_order_acquire)});
    if (fit == Fit::kNever) pending &= ~bit(slot);  // withdrawn, or served by another thread
    if (fit != Fit::kNow) continue;
    const std::uint64_t id = shared.request_id.load(std::memory_order_relaxed);
    if (id < found_id) {
      found_id = id;
      found = slot;
    }
  }
  return found;
}

int oldest_for_main(const ChildBlock<>& block, std::uint32_t& pending) noexcept {
  return oldest(block, pending, [](SlotState state) {
    return state == SlotState::kPostedMain || state == SlotState::kPostedAny ? Fit::kNow
                                                                             : Fit::kNever;
  });
}

int oldest_for_service(const ChildBlock<>& block, std::uint32_t& pending,
                       bool may_be_handler) noexcept {
  return oldest(block, pending, [may_be_handler](SlotState state) {
    if (state == SlotState::kPostedService) return may_be_handler ? Fit::kNow : Fit::kLater;
    return state == SlotState::kPostedTransfer || state == SlotState::kPostedAny ? Fit::kNow
                                                                                 : Fit::kNever;
  });
}

}  // namespace

std::byte* ReplyWriter::reserve(ReplyStatus status, std::size_t nbytes) {
  status_ = status;
  nbytes_ = nbytes;
  offset_ = kInline;
  if (nbytes <= inline_.size()) return inline_.data();
  nbytes_ = 0;
  if (nbytes > arena_.capacity()) {
    status_ = ReplyStatus::kTooLarge;
    return nullptr;
  }
  const auto offset = arena_.wait_allocate(nbytes, owner_, Deadline::at(deadline_ns_));
  if (!offset) {
    status_ = ReplyStatus::kNoReplySpace;
    return nullptr;
  }
  nbytes_ = nbytes;
  offset_ = *offset;
  return arena_.at(*offset);
}

void ReplyWriter::write(ReplyStatus status, std::span<const std::byte> bytes) {
  std::byte* to = reserve(status, bytes.size());
  if (to != nullptr && !bytes.empty()) std::memmove(to, bytes.data(), bytes.size());
}

ChildLoop::ChildLoop(TreeHeader<>& tree, ChildBlock<>& block, const SharedRegion& payload,
                     PayloadSpace space, std::uint64_t seat, Nanoseconds spin_bound,
                     ChildHandler& handler)
    : tree_(tree),
      block_(block),
      payload_(payload),
      handler_(handler),
      arena_(payload, space, block),
      spin_(spin_bound),
      seat_wanted_(seat),
      completed_(block.ring.completed.load(std::memory_order_relaxed)) {}

void ChildLoop::run() {
  start_service_thread();
  while (!stopped_) {
    pending_ |=
        bell_take(block_.main_bell) & ~kRingBit;  // the ring's own counters say what is there
    if (pending_ != 0) {
      // It will be claimed, so its first line is fetched to be written; the second only to be read.
      const ControlSlot<>& first = block_.slots[std::countr_zero(pending_)];
      __builtin_prefetch(&first, 1);
      __builtin_prefetch(&first.arg, 0);
      serve_any();
    }
    const int slot = pending_ != 0 ? oldest_for_main(block_, pending_) : -1;
    const std::uint64_t seq = ring_available(block_.ring, completed_);
    if (slot >= 0 && (task_was_last_ || seq == 0)) {
      task_was_last_ = false;
      run_exclusive(slot);
    } else if (seq != 0) {
      task_was_last_ = true;
      run_task(seq);
    } else {
      wait_for_work();
    }
  }
  spin_leave(tree_, seat_);
}

void ChildLoop::fail_start(std::span<const std::byte> failure) {
  ControlSlot<>& slot = block_.slots[kLifecycleSlot];
  if (!slot_claim(slot, Lane::kMain)) return;
  ReplyWriter reply(arena_, {kLifecycleSlot, slot.request_id.load(std::memory_order_relaxed)},
                    slot.bytes, slot.deadline_ns);
  reply.write(ReplyStatus::kFailure, failure);
  publish(slot, reply);
}

void ChildLoop::publish(ControlSlot<>& slot, const ReplyWriter& reply) {
  slot.status = static_cast<std::uint32_t>(reply.status());
  slot.reply_id = reply.id();
  slot.reply_bytes = reply.nbytes();
  slot.reply_offset = reply.offset();
  const bool notify = (slot.flags & kNotifyAsync) != 0;
  const bool late = slot_finish(slot);
  if (late) release_notify(block_.slots_released);
  if (late || notify) bell_ring(tree_.async_bell, 1U);
}

void ChildLoop::wait_for_work() {
  const Nanoseconds bound = spin_.bound();
  if (bound > 0 && seat_ == 0) seat_ = spin_sit(tree_, seat_wanted_);
  const auto rung = [this] {
    return block_.main_bell.pending.load(std::memory_order_relaxed) != 0;
  };
  if (seat_ != 0 && spin_until(rung, bound)) {
    spin_.caught();
    return;
  }
  spin_leave(tree_, seat_);
  seat_ = 0;
  const Nanoseconds start = monotonic_now();
  const Deadline trim = arena_.wants_trim() ? Deadline::at(start + kTrimAfter) : Deadline::never();
  if (bell_sleep(block_.main_bell, trim) == FutexResult::kTimedOut) arena_.trim();
  spin_.slept(monotonic_now() - start);
}

void ChildLoop::serve_any() {
  for (std::uint32_t left = pending_; left != 0; left &= left - 1) {
    const int slot = std::countr_zero(left);
    if (block_.slots[slot].state.load(std::memory_order_acquire) != raw(SlotState::kPostedAny))
      continue;
    pending_ &= ~bit(slot);
    serve_control(slot, Lane::kAny);
  }
}

void ChildLoop::set_busy() {
  // From here on a poster of a kAny request rings the service bell too; what came before is
  // answered now.
  block_.main_busy.store(1, std::memory_order_seq_cst);
  pending_ |= bell_take(block_.main_bell) & ~kRingBit;
  serve_any();
}

void ChildLoop::run_exclusive(int slot) {
  pending_ &= ~bit(slot);
  set_busy();
  serve_control(slot, Lane::kMain);
  block_.main_busy.store(0, std::memory_order_seq_cst);
}

void ChildLoop::serve_control(int index, Lane lane) {
  ControlSlot<>& slot = block_.slots[index];
  if (!slot_claim(slot, lane)) return;  // withdrawn, or somebody else's
  ReplyWriter reply(arena_, {index, slot.request_id.load(std::memory_order_relaxed)}, slot.bytes,
                    slot.deadline_ns);
  const auto op = static_cast<ControlOp>(slot.op);
  if (op != ControlOp::PING) {  // which is answered from the slot's first line alone
    const std::byte* request =
        slot.request_offset == kInline ? slot.bytes : payload_.data() + slot.request_offset;
    const std::span<const std::byte> whole(request, slot.request_bytes);
    const std::size_t meta_bytes = std::min<std::size_t>(slot.meta_bytes, whole.size());
    if (op == ControlOp::ECHO) {
      reply.write(ReplyStatus::kOk, whole.subspan(meta_bytes));
    } else {
      slot.started_ns.store(monotonic_now(), std::memory_order_relaxed);
      handler_.control({op, slot.arg, whole.first(meta_bytes), whole.subspan(meta_bytes)}, reply);
    }
  }
  publish(slot, reply);
  handler_.replied();
  if (op == ControlOp::STOP && lane == Lane::kMain) stopped_ = true;
}

void ChildLoop::run_task(std::uint64_t seq) {
  TaskSlot<>& slot = ring_slot(block_.ring, seq);
  set_busy();
  slot.started_ns.store(monotonic_now(), std::memory_order_relaxed);
  block_.ring.begun.store(seq, std::memory_order_release);
  TaskStatus status = TaskStatus::kSkipped;
  ReplyWriter reply(arena_, {-1, seq}, slot.bytes, kNoDeadline);
  if (!ring_must_skip(slot, failed_)) {
    const std::byte* args =
        slot.args_offset == kInline ? slot.bytes : payload_.data() + slot.args_offset;
    handler_.task(slot.callable_id, {args, slot.args_bytes}, reply);
    status = reply.status() == ReplyStatus::kOk ? TaskStatus::kDone : TaskStatus::kFailed;
  }
  slot.result_bytes = reply.nbytes();
  slot.result_offset = reply.offset();
  slot.status = static_cast<std::uint32_t>(status);
  if ((slot.flags & kTaskTimed) != 0)
    slot.ended_ns.store(monotonic_now(), std::memory_order_relaxed);
  completed_ = seq;
  failed_ = ring_note_end(failed_, status);
  block_.main_busy.store(0, std::memory_order_seq_cst);
  ring_complete(block_.ring, seq);
  tasks_tell(tree_.tasks_ended, block_.ring, seq);
  handler_.replied();
}

void ChildLoop::start_service_thread() {
  service_threads_.fetch_add(1);
  service_idle_.fetch_add(1);
  // Ends with the process, by _exit.
  start_quiet_thread("simpler-serve", [this] { serve_concurrent(); }).detach();
}

// Without another thread requests wait until this one is back.
void ChildLoop::try_start_service_thread() noexcept {
  try {
    start_service_thread();
  } catch (const std::system_error&) {
    service_threads_.fetch_sub(1);
    service_idle_.fetch_sub(1);
  }
}

int ChildLoop::next_concurrent() {
  service_pending_ |= bell_take(block_.service_bell);
  if (service_pending_ == 0) return -1;
  const auto has_room = [this] { return handlers_.load() < kConcurrentHandlers; };
  bool may_be_handler = has_room();
  if (!may_be_handler) {
    is_handler_waiting_.store(true);  // before the second look: see end_handler()
    may_be_handler = has_room();
  }
  const int slot = oldest_for_service(block_, service_pending_, may_be_handler);
  if (slot >= 0) service_pending_ &= ~bit(slot);
  return slot;
}

void ChildLoop::end_handler() {
  handlers_.fetch_sub(1);
  // Wakes whoever waits for work; no request of this lane is ever in that slot.
  if (is_handler_waiting_.exchange(false)) bell_ring(block_.service_bell, bit(kLifecycleSlot));
}

void ChildLoop::serve_concurrent() {
  for (;;) {
    Lane lane = Lane::kTransfer;
    bool is_more_left = false;
    const int slot = take_concurrent(lane, is_more_left);
    if (slot < 0) {
      bell_sleep(block_.service_bell, Deadline::never());
      continue;
    }
    if (is_more_left) bell_ring(block_.service_bell, bit(kLifecycleSlot));  // for another thread
    serve_control(slot, lane);
    if (lane == Lane::kService) end_handler();
    // The main thread gives the pages back, and may be asleep without a time to wake up.
    if (arena_.wants_trim()) bell_ring(block_.main_bell, kRingBit);
    service_idle_.fetch_add(1);
  }
}

int ChildLoop::take_concurrent(Lane& lane, bool& is_more_left) {
  const std::lock_guard lock(service_mutex_);
  const int slot = next_concurrent();
  if (slot < 0) return slot;
  if (block_.slots[slot].state.load() == raw(SlotState::kPostedService)) {
    lane = Lane::kService;
    handlers_.fetch_add(1);
  }
  is_more_left = service_pending_ != 0;
  // Somebody must be there for the next request.
  if (service_idle_.fetch_sub(1) == 1 && service_threads_.load() < kControlSlots)
    try_start_service_thread();
  return slot;
}

}  // namespace simpler
