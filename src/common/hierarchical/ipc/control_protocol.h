// The life of one control slot: who may move it where, and what each move publishes.
//
//   kIdle -> kPosted      parent   slot_post       publishes the request
//   kPosted -> kRunning   child    slot_claim      by compare-and-swap against withdrawal
//   kPosted -> kIdle      parent   slot_withdraw   the handler never runs (CP-8)
//   kRunning -> kReplied  child    slot_finish     publishes the reply
//   kRunning -> kAbandoned parent  slot_abandon    the caller left; the handler goes on
//   kAbandoned -> kLate   child    slot_finish     a late reply: counted and dropped (CP-1)
//   kPosted, kRunning -> kPeerGone   parent, slot_fail, once the child is reaped
//   kAbandoned -> kLate   parent   slot_fail       likewise
//   kReplied, kPeerGone -> kIdle     the caller    it has read the reply
//   kLate -> kIdle        parent   slot_reclaim    whoever wins the compare-and-swap
//
// kPosted stands for one state per lane. A bell's bit may be older than the request in the slot:
// withdrawn, and posted again for another lane. The swap of slot_claim therefore names the lane it
// is made for, so that an exclusive request is never claimed by a service thread (CP-10).
#pragma once

#include "hierarchical/ipc/bell.h"

namespace simpler {

constexpr std::uint32_t raw(SlotState state) noexcept { return static_cast<std::uint32_t>(state); }

constexpr SlotState posted_for(Lane lane) noexcept {
  switch (lane) {
    case Lane::kMain:
      return SlotState::kPostedMain;
    case Lane::kService:
      return SlotState::kPostedService;
    case Lane::kTransfer:
      return SlotState::kPostedTransfer;
    case Lane::kAny:
      break;
  }
  return SlotState::kPostedAny;
}

constexpr bool is_posted(std::uint32_t state) noexcept {
  return state >= raw(SlotState::kPostedMain) && state <= raw(SlotState::kPostedAny);
}

constexpr bool reply_is_due(std::uint32_t state) noexcept {
  return is_posted(state) || state == raw(SlotState::kRunning);
}

template <template <typename> class Atom>
void slot_post(ControlSlot<Atom>& slot) {
  // release: publishes the request to slot_claim's acquire. seq_cst because the poster looks next
  // whether the child has died meanwhile, and whoever saw it die looks next for posted slots.
  slot.state.store(raw(posted_for(slot.lane)), std::memory_order_seq_cst);
}

template <template <typename> class Atom>
bool slot_move(ControlSlot<Atom>& slot, SlotState from, SlotState to) {
  std::uint32_t expected = raw(from);
  return slot.state.compare_exchange_strong(expected, raw(to), std::memory_order_seq_cst);
}

// Claims a request for `lane`, which the claiming thread serves, or one for kAny.
template <template <typename> class Atom>
bool slot_claim(ControlSlot<Atom>& slot, Lane lane) {
  std::uint32_t expected = raw(posted_for(lane));
  if (slot.state.compare_exchange_strong(expected, raw(SlotState::kRunning),
                                         std::memory_order_seq_cst))
    return true;
  if (expected != raw(SlotState::kPostedAny)) return false;
  return slot_move(slot, SlotState::kPostedAny, SlotState::kRunning);
}

template <template <typename> class Atom>
bool slot_withdraw(ControlSlot<Atom>& slot) {
  return slot_move(slot, posted_for(slot.lane), SlotState::kIdle);
}

template <template <typename> class Atom>
bool slot_abandon(ControlSlot<Atom>& slot) {
  return slot_move(slot, SlotState::kRunning, SlotState::kAbandoned);
}

// Returns true when the caller had left (kAbandoned).
template <template <typename> class Atom>
bool slot_finish(ControlSlot<Atom>& slot) {
  // Publishes the reply; pairs with the acquire of whoever reads kReplied. seq_cst: see slot_sleep.
  if (!slot_move(slot, SlotState::kRunning, SlotState::kReplied)) {
    slot_move(slot, SlotState::kAbandoned, SlotState::kLate);
    return true;
  }
  if (slot.waiter.load(std::memory_order_seq_cst) != 0) futex_wake(slot.state, 1);
  return false;
}

// For who does not hold the slot and so may not read its lane. The caller wakes who sleeps on the
// slot.
template <template <typename> class Atom>
bool slot_refuse(ControlSlot<Atom>& slot) {
  return slot_move(slot, SlotState::kPostedMain, SlotState::kPeerGone) ||
         slot_move(slot, SlotState::kPostedService, SlotState::kPeerGone) ||
         slot_move(slot, SlotState::kPostedTransfer, SlotState::kPeerGone) ||
         slot_move(slot, SlotState::kPostedAny, SlotState::kPeerGone);
}

// For a child that is reaped: fails the slot if a reply was due. Returns true if it did.
template <template <typename> class Atom>
bool slot_fail(ControlSlot<Atom>& slot) {
  // Twice for kAbandoned: the caller may leave between the looks.
  const bool failed = slot_move(slot, SlotState::kAbandoned, SlotState::kLate) ||
                      slot_refuse(slot) ||
                      slot_move(slot, SlotState::kRunning, SlotState::kPeerGone) ||
                      slot_move(slot, SlotState::kAbandoned, SlotState::kLate);
  // Also when nothing was due: the child may have died after its reply and before it woke the
  // caller.
  if (slot.waiter.load(std::memory_order_seq_cst) != 0) futex_wake(slot.state, 1);
  return failed;
}

// True for exactly one caller after the handler of an abandoned request has ended.
template <template <typename> class Atom>
bool slot_reclaim(ControlSlot<Atom>& slot) {
  return slot.state.load(std::memory_order_seq_cst) == raw(SlotState::kLate) &&
         slot_move(slot, SlotState::kLate, SlotState::kIdle);
}

// Sleeps until no reply is due any more, the deadline, or a signal. The waiter flag is set before
// the state is read, the child writes the state before it reads the flag: one of the two sees the
// other.
template <template <typename> class Atom>
FutexResult slot_sleep(ControlSlot<Atom>& slot, Deadline deadline) {
  slot.waiter.store(1, std::memory_order_seq_cst);
  FutexResult result = FutexResult::kWoken;
  for (;;) {
    const std::uint32_t state = slot.state.load(std::memory_order_seq_cst);
    if (!reply_is_due(state)) break;
    result = futex_wait(slot.state, state, deadline);
    if (result == FutexResult::kTimedOut || result == FutexResult::kInterrupted) break;
  }
  slot.waiter.store(0, std::memory_order_relaxed);
  return result;
}

}  // namespace simpler
