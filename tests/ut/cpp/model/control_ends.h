// A caller, a child and a reaper over control slots, as the parent's and the child's end play them,
// for any Atom.
//
// The ends are reduced to what the protocol is about. `Moves` replaces single moves by broken ones,
// so that a test can show that it would notice.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "hierarchical/ipc/control_protocol.h"
#include "model/atom.h"

namespace simpler::model {

enum class Outcome : std::uint8_t { kReplied, kWithdrawn, kAbandoned, kPeerGone };

struct SoundMoves {
  static constexpr bool kLooksForDeathAfterPost = true;
  template <typename Slot>
  static void post(Slot& slot) {
    slot_post(slot);
  }
  template <typename Slot>
  static bool claim(Slot& slot, Lane lane) {
    return slot_claim(slot, lane);
  }
  template <typename Slot>
  static bool finish(Slot& slot) {
    return slot_finish(slot);
  }
  template <typename Slot>
  static bool withdraw(Slot& slot) {
    return slot_withdraw(slot);
  }
  template <typename Slot>
  static void fail(Slot& slot) {
    slot_fail(slot);
  }
  template <typename Slot>
  static FutexResult sleep(Slot& slot, Deadline deadline) {
    return slot_sleep(slot, deadline);
  }
};

inline constexpr std::size_t kMaxCalls = 4096;

template <template <typename> class Atom, typename Moves = SoundMoves>
struct ControlWorld {
  static constexpr std::size_t kSlots = 2;
  std::size_t used = 1;
  std::array<ControlSlot<Atom>, kSlots> slots;
  Bell<Atom> main_bell, service_bell;
  ReleaseEvent<Atom> released;
  Atom<std::uint32_t> dead{0};
  std::array<Guarded, kSlots> requests{Guarded("request 0"), Guarded("request 1")};
  std::array<Guarded, kSlots> replies{Guarded("reply 0"), Guarded("reply 1")};
  // Observations: no part of the protocol, so no step of the model.
  std::array<std::atomic<std::uint32_t>, kMaxCalls> runs{};
  std::atomic<std::uint32_t> late{0};

  void fill(std::size_t index, std::uint64_t id, Lane lane) {
    ControlSlot<Atom>& slot = slots[index];
    check(slot.state.load(std::memory_order_acquire) == raw(SlotState::kIdle),
          "CP-1: the slot is free before it is filled");
    requests[index].write();
    slot.request_id.store(id, std::memory_order_relaxed);
    slot.lane = lane;
    slot.bytes[0] = static_cast<std::byte>(id);
  }

  void post(std::size_t index) {
    ControlSlot<Atom>& slot = slots[index];
    const Lane lane = slot.lane;
    Moves::post(slot);
    const std::uint32_t bit = 1U << index;
    if (lane != Lane::kService) bell_ring(main_bell, bit);
    if (lane != Lane::kMain) bell_ring(service_bell, bit);
    if (Moves::kLooksForDeathAfterPost && dead.load(std::memory_order_seq_cst) != 0)
      slot_fail(slot);
  }

  Outcome call(std::size_t index, std::uint64_t id, Deadline deadline, Lane lane = Lane::kMain) {
    fill(index, id, lane);
    post(index);
    return await(index, id, deadline);
  }

  Outcome await(std::size_t index, std::uint64_t id, Deadline deadline) {
    ControlSlot<Atom>& slot = slots[index];
    for (;;) {
      const std::uint32_t state = slot.state.load(std::memory_order_acquire);
      if (state == raw(SlotState::kReplied)) return read_reply(index, id);
      if (state == raw(SlotState::kPeerGone)) {
        check(dead.load(std::memory_order_seq_cst) != 0, "CP-3: only a death fails a call");
        slot.state.store(raw(SlotState::kIdle), std::memory_order_release);
        return Outcome::kPeerGone;
      }
      check(reply_is_due(state), "the slot is the caller's until it leaves");
      const FutexResult slept = Moves::sleep(slot, deadline);
      if (deadline.is_never() ||
          (slept != FutexResult::kTimedOut && slept != FutexResult::kInterrupted))
        continue;
      if (Moves::withdraw(slot)) return Outcome::kWithdrawn;
      if (slot_abandon(slot)) return Outcome::kAbandoned;
    }
  }

  Outcome read_reply(std::size_t index, std::uint64_t id) {
    ControlSlot<Atom>& slot = slots[index];
    replies[index].read();
    check(slot.reply_id == id, "CP-1: the reply answers the call that reads it");
    check(slot.bytes[0] == static_cast<std::byte>(id + 1), "the reply's bytes are whole");
    slot.state.store(raw(SlotState::kIdle), std::memory_order_release);
    return Outcome::kReplied;
  }

  // After kAbandoned: waits for the end of the handler, or of the child.
  void reclaim(std::size_t index) {
    for (;;) {
      const std::uint32_t seen = release_seen(released);
      if (slot_reclaim(slots[index])) {
        late.fetch_add(1, std::memory_order_relaxed);
        return;
      }
      release_sleep(released, seen, Deadline::never());
    }
  }

  // The child's answer to one bit of a bell: true when there was a request.
  bool serve(std::size_t index, Lane mine) {
    ControlSlot<Atom>& slot = slots[index];
    if (!Moves::claim(slot, mine)) return false;
    requests[index].read();
    const std::uint64_t id = slot.request_id.load(std::memory_order_relaxed);
    check(slot.lane == mine || slot.lane == Lane::kAny, "CP-10: a request runs in its own lane");
    check(slot.bytes[0] == static_cast<std::byte>(id), "the request's bytes are whole");
    runs[id].fetch_add(1, std::memory_order_relaxed);
    replies[index].write();
    slot.reply_id = id;
    slot.bytes[0] = static_cast<std::byte>(id + 1);
    if (Moves::finish(slot)) release_notify(released);
    return true;
  }

  // A thread of the child, until `stop` is among the bits.
  void serve_all(Lane mine, std::uint32_t stop = 0) {
    Bell<Atom>& bell = mine == Lane::kMain ? main_bell : service_bell;
    for (;;) {
      const std::uint32_t bits = bell_take(bell);
      if (bits == 0) bell_sleep(bell, Deadline::never());
      for (std::size_t index = 0; index < used; ++index) {
        if ((bits & (1U << index)) != 0) serve(index, mine);
      }
      if ((bits & stop) != 0) return;
    }
  }

  // The parent, once the child is reaped.
  void reap() {
    dead.store(1, std::memory_order_seq_cst);
    for (std::size_t index = 0; index < used; ++index) Moves::fail(slots[index]);
    release_notify(released);
  }

  void check_ran_once_iff(std::uint64_t id, Outcome outcome) {
    const std::uint32_t ran = runs[id].load(std::memory_order_relaxed);
    if (outcome == Outcome::kWithdrawn) check(ran == 0, "CP-8: a withdrawn request never runs");
    if (outcome == Outcome::kReplied) check(ran == 1, "an answered request has run once");
    check(ran <= 1, "no request runs twice");
  }

  void check_all_idle() {
    for (ControlSlot<Atom>& slot : slots) {
      check(slot.state.load(std::memory_order_acquire) == raw(SlotState::kIdle),
            "every path ends with an idle slot");
    }
  }
};

}  // namespace simpler::model
