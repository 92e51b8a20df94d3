#include "hierarchical/ipc/control_parent.h"

#include <bit>
#include <cstring>
#include <utility>

#include "hierarchical/base/error.h"
#include "hierarchical/ipc/control_protocol.h"

namespace simpler {

namespace {

constexpr std::uint32_t kCallSlots = (1U << kLifecycleSlot) - 1;  // all but the lifecycle slot
// A child woken again sooner than this is in use: each sleep of its caller would cost a wake-up
// more.
constexpr Nanoseconds kLongIdle = 500'000;

constexpr std::uint32_t bit(int slot) noexcept { return 1U << static_cast<unsigned>(slot); }

}  // namespace

ControlParentEnd::ControlParentEnd(TreeHeader<>& tree, ChildBlock<>& block,
                                   const SharedRegion& payload, PayloadSpace space,
                                   RequestArena& arena, Nanoseconds spin_bound)
    : tree_(tree),
      block_(block),
      payload_(payload),
      space_(space),
      arena_(arena),
      spin_(spin_bound),
      free_(kCallSlots) {}

int ControlParentEnd::poll_slot() {
  std::uint32_t free = free_.load(std::memory_order_relaxed);
  while (free != 0) {
    const int slot = std::countr_zero(free);
    // acquire: pairs with the release in release(), so that the record is ours.
    if (free_.compare_exchange_weak(free, free & ~bit(slot), std::memory_order_acquire,
                                    std::memory_order_relaxed)) {
      return slot;
    }
  }
  return -1;
}

CallWait ControlParentEnd::wait_slot(Deadline deadline, Interrupt* interrupt, int& slot) {
  for (;;) {
    const std::uint32_t seen = release_seen(block_.slots_released);
    if (gone()) return CallWait::kPeerGone;
    if ((slot = poll_slot()) >= 0) return CallWait::kOk;
    const FutexResult slept =
        release_sleep(block_.slots_released, seen, next_slice(deadline, interrupt));
    if (slept == FutexResult::kTimedOut || slept == FutexResult::kInterrupted) {
      if (interrupt != nullptr && interrupt->pending()) return CallWait::kInterrupted;
      if (deadline.passed()) {
        counters_.timeouts.fetch_add(1, std::memory_order_relaxed);
        return CallWait::kTimedOut;
      }
    }
  }
}

void ControlParentEnd::fill(int slot, const ControlRequest& request,
                            std::shared_ptr<StagedBlock> staged) {
  ControlSlot<>& shared = block_.slots[slot];
  Record& record = records_[static_cast<std::size_t>(slot)];
  record.hold = request.hold;
  record.sleep_at_once = false;
  record.op.store(request.op, std::memory_order_relaxed);
  record.lane.store(request.lane, std::memory_order_relaxed);
  record.arg.store(request.arg, std::memory_order_relaxed);
  shared.op = static_cast<std::uint16_t>(request.op);
  shared.lane = request.lane;
  shared.flags = request.notify_async ? kNotifyAsync : std::uint8_t{0};
  shared.arg = request.arg;
  shared.meta_bytes = static_cast<std::uint32_t>(request.meta.size());
  shared.request_bytes = request.nbytes();
  shared.deadline_ns = request.deadline.ns();
  if (staged) {
    shared.request_offset = staged->offset();
    record.staged = std::move(staged);
  } else {
    shared.request_offset = kInline;
    if (!request.meta.empty()) std::memcpy(shared.bytes, request.meta.data(), request.meta.size());
    if (!request.payload.empty()) {
      std::memcpy(shared.bytes + request.meta.size(), request.payload.data(),
                  request.payload.size());
    }
  }
  counters_.calls.fetch_add(1, std::memory_order_relaxed);
  // Until the child says when it began: what is there is another request's.
  shared.started_ns.store(0, std::memory_order_relaxed);
  counters_.request_bytes.fetch_add(request.payload.size(), std::memory_order_relaxed);
}

bool ControlParentEnd::post(int slot, std::uint64_t request_id) {
  ControlSlot<>& shared = block_.slots[slot];
  records_[static_cast<std::size_t>(slot)].request_id.store(request_id, std::memory_order_relaxed);
  shared.request_id.store(request_id, std::memory_order_relaxed);
  const Lane lane = shared.lane;
  slot_post(shared);
  const bool is_for_main = lane == Lane::kMain || lane == Lane::kAny;
  bool woke = bell_ring(is_for_main ? block_.main_bell : block_.service_bell, bit(slot));
  // The child sets main_busy, then looks once more for kAny slots: one of the two sees the other.
  if (lane == Lane::kAny && block_.main_busy.load(std::memory_order_seq_cst) != 0) {
    woke |= bell_ring(block_.service_bell, bit(slot));
  }
  // The child may live on while the tree closes: a slot that it has claimed is its own until it
  // ends.
  if (gone() && slot != kLifecycleSlot && !slot_refuse(shared)) abandon(slot);
  return woke;
}

void ControlParentEnd::post_alone(int slot, std::uint64_t request_id) {
  if (!post(slot, request_id)) return;
  const Nanoseconds now = monotonic_now();
  const Nanoseconds before = woke_at_.exchange(now, std::memory_order_relaxed);
  records_[static_cast<std::size_t>(slot)].sleep_at_once = now - before > kLongIdle;
}

bool ControlParentEnd::reply_due(int slot) const noexcept {
  return reply_is_due(block_.slots[slot].state.load(std::memory_order_acquire));
}

bool ControlParentEnd::spin_reply(int slot, Nanoseconds bound) {
  if (!reply_due(slot)) return true;
  if (records_[static_cast<std::size_t>(slot)].sleep_at_once) return false;
  const Nanoseconds limit = std::min(bound, spin_.bound());
  if (limit <= 0) return false;
  const std::uint64_t seat = spin_sit(tree_, kCallerSeats);
  if (seat == 0) return false;
  const bool done = spin_until([&] { return !reply_due(slot); }, limit);
  spin_leave(tree_, seat);
  return done;
}

CallWait ControlParentEnd::wait_reply(int slot, Deadline deadline, Interrupt* interrupt) {
  ControlSlot<>& shared = block_.slots[slot];
  const bool slept_at_once = records_[static_cast<std::size_t>(slot)].sleep_at_once;
  if (spin_reply(slot, spin_.bound())) {
    if (!slept_at_once) spin_.caught();
  } else {
    const Nanoseconds start = monotonic_now();
    while (reply_due(slot)) {
      slot_sleep(shared, next_slice(deadline, interrupt));
      if (!reply_due(slot)) break;
      if (interrupt != nullptr && interrupt->pending()) return leave(slot, true);
      if (deadline.passed()) return leave(slot, false);
    }
    if (!slept_at_once) spin_.slept(monotonic_now() - start);
  }
  if (shared.state.load(std::memory_order_acquire) == raw(SlotState::kReplied))
    return CallWait::kOk;
  return peer_gone(slot);
}

CallWait ControlParentEnd::peer_gone(int slot) {
  // Else fail_all has abandoned the slot in our name, and reclaim_abandoned frees it.
  if (slot_move(block_.slots[slot], SlotState::kPeerGone, SlotState::kIdle)) {
    release(slot);
  } else if (!gone()) {
    return CallWait::kOk;  // a state that only a broken child can make: read_reply says so
  }
  return CallWait::kPeerGone;
}

bool ControlParentEnd::abandon(int slot) {
  abandoned_.fetch_add(1, std::memory_order_seq_cst);
  if (!slot_abandon(block_.slots[slot])) {
    abandoned_.fetch_sub(1, std::memory_order_seq_cst);
    return false;
  }
  records_[static_cast<std::size_t>(slot)].abandoned.store(true, std::memory_order_seq_cst);
  // Who was rung by the end of the handler may have looked before the line above.
  if (block_.slots[slot].state.load(std::memory_order_seq_cst) == raw(SlotState::kLate)) {
    bell_ring(tree_.async_bell, 1U);
  }
  return true;
}

bool ControlParentEnd::poll_withdraw(int slot) {
  if (!slot_withdraw(block_.slots[slot])) return false;
  release(slot);
  return true;
}

CallWait ControlParentEnd::leave(int slot, bool interrupted) {
  ControlSlot<>& shared = block_.slots[slot];
  if (!interrupted) counters_.timeouts.fetch_add(1, std::memory_order_relaxed);
  if (slot_withdraw(shared)) {
    release(slot);
    return interrupted ? CallWait::kInterrupted : CallWait::kTimedOut;
  }
  if (abandon(slot))
    return interrupted ? CallWait::kInterruptedStarted : CallWait::kTimedOutStarted;
  if (shared.state.load(std::memory_order_acquire) == raw(SlotState::kReplied))
    return CallWait::kOk;
  return peer_gone(slot);
}

ReplyView ControlParentEnd::read_reply(int slot) {
  const ControlSlot<>& shared = block_.slots[slot];
  Record& record = records_[static_cast<std::size_t>(slot)];
  // Read once: the child may change its mind between a check and a use.
  const std::uint64_t nbytes = shared.reply_bytes;
  const std::uint64_t offset = shared.reply_offset;
  const std::uint32_t status = shared.status;
  if (shared.state.load(std::memory_order_acquire) != raw(SlotState::kReplied) ||
      shared.reply_id != record.request_id.load(std::memory_order_relaxed) ||
      status > static_cast<std::uint32_t>(ReplyStatus::kTooLarge)) {
    throw Error(ErrorCode::kProtocol,
                "the child's reply does not belong to the request it was read for");
  }
  if (offset == kInline) {
    if (nbytes > kSlotInlineBytes)
      throw Error(ErrorCode::kProtocol, "the child's inline reply is longer than its slot");
    counters_.reply_bytes.fetch_add(nbytes, std::memory_order_relaxed);
    return {static_cast<ReplyStatus>(status), {shared.bytes, nbytes}};
  }
  if (!space_.reply_contains(offset, nbytes)) {
    throw Error(ErrorCode::kProtocol, "the child's reply lies outside its arena");
  }
  record.large_reply = true;
  counters_.reply_bytes.fetch_add(nbytes, std::memory_order_relaxed);
  return {static_cast<ReplyStatus>(status), {payload_.data() + offset, nbytes}};
}

void ControlParentEnd::release(int slot) {
  Record& record = records_[static_cast<std::size_t>(slot)];
  record.staged.reset();
  const bool large = std::exchange(record.large_reply, false);
  block_.slots[slot].state.store(raw(SlotState::kIdle), std::memory_order_seq_cst);
  if (large) release_notify(block_.replies_released);
  if (slot == kLifecycleSlot) return;
  free_.fetch_or(bit(slot), std::memory_order_seq_cst);
  release_notify(block_.slots_released);
  if (async_waiting_.load(std::memory_order_seq_cst) > 0) bell_ring(tree_.async_bell, 1U);
}

void ControlParentEnd::reclaim_abandoned(const std::function<void(std::uint64_t hold)>& ended) {
  if (abandoned_.load(std::memory_order_seq_cst) == 0) return;
  for (int slot = 0; slot < kControlSlots; ++slot) {
    Record& record = records_[static_cast<std::size_t>(slot)];
    if (!record.abandoned.load(std::memory_order_seq_cst)) continue;
    if (!slot_reclaim(block_.slots[slot])) continue;
    record.abandoned.store(false, std::memory_order_relaxed);
    abandoned_.fetch_sub(1, std::memory_order_seq_cst);
    if (!gone()) counters_.late_replies.fetch_add(1, std::memory_order_relaxed);
    record.large_reply = true;  // the reply may lie in the arena: let the child look
    const std::uint64_t hold = record.hold;
    release(slot);
    if (hold != 0) ended(hold);
  }
}

void ControlParentEnd::fail_all(bool closing) {
  gone_.store(true, std::memory_order_seq_cst);
  for (int slot = 0; slot < kControlSlots; ++slot) {
    ControlSlot<>& shared = block_.slots[slot];
    if (!closing) {
      slot_fail(shared);
    } else if (slot != kLifecycleSlot) {
      if (!slot_refuse(shared)) abandon(slot);
      futex_wake(shared.state, 1);
    }
  }
  arena_.close();
  release_notify(block_.slots_released);
  bell_ring(tree_.async_bell, 1U);
}

bool ControlParentEnd::all_released() const noexcept {
  return free_.load(std::memory_order_seq_cst) == kCallSlots &&
         block_.slots[kLifecycleSlot].state.load(std::memory_order_seq_cst) ==
             raw(SlotState::kIdle);
}

void ControlParentEnd::reset() {
  block_.main_bell.pending.store(0);
  block_.main_bell.sleepers.store(0);
  block_.service_bell.pending.store(0);
  block_.service_bell.sleepers.store(0);
  block_.main_busy.store(0);
  block_.replies_released.waiters.store(0);
}

void ControlParentEnd::open() {
  arena_.reopen();
  gone_.store(false, std::memory_order_seq_cst);
}

void ControlParentEnd::cancel_lifecycle() {
  block_.slots[kLifecycleSlot].state.store(raw(SlotState::kIdle), std::memory_order_seq_cst);
}

int ControlParentEnd::running(std::array<InFlight, kControlSlots>& out) const {
  int count = 0;
  for (int slot = 0; slot < kControlSlots; ++slot) {
    const std::uint32_t state = block_.slots[slot].state.load(std::memory_order_acquire);
    if (state != raw(SlotState::kRunning) && state != raw(SlotState::kAbandoned)) continue;
    const Record& record = records_[static_cast<std::size_t>(slot)];
    out[static_cast<std::size_t>(count++)] = {
        record.op.load(std::memory_order_relaxed), record.arg.load(std::memory_order_relaxed),
        record.request_id.load(std::memory_order_relaxed),
        record.lane.load(std::memory_order_relaxed),
        block_.slots[slot].started_ns.load(std::memory_order_relaxed)};
  }
  return count;
}

}  // namespace simpler
