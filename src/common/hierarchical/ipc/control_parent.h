// The parent's end of one child's control slots.
//
// A call is begin -> post -> wait -> read_reply -> release. Between post and release the slot
// belongs to the caller; a caller that leaves early (time-out, signal) either withdraws the request
// or abandons the slot, which then comes back when the handler ends.
//
// Thread safety: all methods may be called from any thread of the parent, one thread per slot held.
// Ownership: borrows the mappings; they must outlive this object.
// Fork: construct before the fork; the child must not touch its copy.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "hierarchical/base/interrupt.h"
#include "hierarchical/ipc/control_op.h"
#include "hierarchical/ipc/layout.h"
#include "hierarchical/ipc/payload_space.h"
#include "hierarchical/ipc/request_arena.h"
#include "hierarchical/ipc/spin.h"

namespace simpler {

struct ControlRequest {
  ControlOp op = ControlOp::PING;
  Lane lane = Lane::kMain;
  std::uint32_t arg = 0;
  std::span<const std::byte> meta;
  std::span<const std::byte> payload;
  Deadline deadline = Deadline::never();
  double timeout_s = 0;  // what the deadline was made of, for messages
  std::uint64_t hold =
      0;  // reported by reclaim_abandoned when the caller has left; 0: nothing to report
  bool notify_async = false;  // ring the tree's bell when the reply is there

  [[nodiscard]] std::size_t nbytes() const noexcept { return meta.size() + payload.size(); }
};

enum class CallWait : std::uint8_t {
  kOk,
  kTimedOut,         // not begun: withdrawn, it never will
  kTimedOutStarted,  // abandoned
  kInterrupted,
  kInterruptedStarted,
  kPeerGone,  // dead or closing; the slot is released
};

struct ReplyView {
  ReplyStatus status = ReplyStatus::kOk;
  std::span<const std::byte> bytes;  // valid until release()
};

struct ControlCounters {
  std::atomic<std::uint64_t> calls{0}, timeouts{0}, late_replies{0}, request_bytes{0},
      reply_bytes{0};
};

// A request in flight as the parent sees it, for status() and for what a dead child was doing.
struct InFlight {
  ControlOp op;
  std::uint32_t arg;
  std::uint64_t request_id;
  Lane lane;
  Nanoseconds started_ns;
};

class ControlParentEnd {
 public:
  ControlParentEnd(TreeHeader<>& tree, ChildBlock<>& block, const SharedRegion& payload,
                   PayloadSpace space, RequestArena& arena, Nanoseconds spin_bound);

  // A free slot, or -1. Never blocks.
  int poll_slot();
  // Waits for one; kPeerGone when the child is gone.
  CallWait wait_slot(Deadline deadline, Interrupt* interrupt, int& slot);
  // Fills a slot held by the caller. With `staged` the request already lies in a block; else it
  // must fit inline.
  void fill(int slot, const ControlRequest& request, std::shared_ptr<StagedBlock> staged);
  // The request becomes the child's. Ids must grow in the order of posts to one child. True when
  // the child was asleep.
  bool post(int slot, std::uint64_t request_id);
  // As post, for a caller that waits for this reply alone: it does not spin while a child that has
  // slept for long wakes up, which needs a core and may be given the caller's.
  void post_alone(int slot, std::uint64_t request_id);
  // Spins at most `bound` for the reply, without leaving the seat limit; for callers that hold a
  // lock.
  bool spin_reply(int slot, Nanoseconds bound);
  [[nodiscard]] bool reply_due(int slot) const noexcept;
  // Until the reply (kOk), or the caller has left and must not touch the slot again (all others).
  CallWait wait_reply(int slot, Deadline deadline, Interrupt* interrupt);
  // Takes back a request that the child has not begun; false when it has, and then nothing changes.
  bool poll_withdraw(int slot);
  // Withdraws or abandons at once; kOk when the reply has come after all.
  CallWait leave(int slot, bool interrupted);
  // Throws Error{kProtocol} when what the child wrote is out of bounds. REQUIRES: kOk.
  ReplyView read_reply(int slot);
  void release(int slot);

  // Frees abandoned slots whose handler has ended, reporting their holds. Any thread, any time.
  void reclaim_abandoned(const std::function<void(std::uint64_t hold)>& ended);

  // The child is reaped (`closing` false) or the tree is closing: every reply due fails now and
  // later. When closing, claimed slots are abandoned and their waiters woken; START and STOP go on.
  void fail_all(bool closing);
  // For a new incarnation: everything idle, but calls still fail until open(). REQUIRES: gone(),
  // all_released().
  void reset();
  void open();
  // Takes back a START that will not be answered. REQUIRES: the child it was for is dead or was
  // never born.
  void cancel_lifecycle();
  [[nodiscard]] bool gone() const noexcept { return gone_.load(std::memory_order_seq_cst); }
  [[nodiscard]] bool all_released() const noexcept;

  // Requests the child has begun.
  [[nodiscard]] int running(std::array<InFlight, kControlSlots>& out) const;

  ControlCounters& counters() noexcept { return counters_; }
  // While positive, each released slot rings the tree's bell: somebody queues for one.
  std::atomic<int>& async_waiting() noexcept { return async_waiting_; }

 private:
  CallWait peer_gone(int slot);
  bool abandon(int slot);

  struct Record {  // the parent's own copy: the shared fields are the child's to scribble on
    // Atomic, since running() reads them of slots that others hold.
    std::atomic<std::uint64_t> request_id{0};
    std::atomic<ControlOp> op{ControlOp::PING};
    std::atomic<Lane> lane{Lane::kMain};
    std::atomic<std::uint32_t> arg{0};
    std::uint64_t hold = 0;
    std::shared_ptr<StagedBlock> staged;
    bool large_reply = false;
    bool sleep_at_once = false;
    std::atomic<bool> abandoned{false};  // nobody but reclaim_abandoned has the slot
  };

  TreeHeader<>& tree_;
  ChildBlock<>& block_;
  const SharedRegion& payload_;
  const PayloadSpace space_;
  RequestArena& arena_;
  AdaptiveSpin spin_;
  std::atomic<std::uint32_t> free_;
  std::atomic<int> abandoned_{0};  // at least the slots in kAbandoned or kLate
  std::atomic<bool> gone_{false};
  std::atomic<int> async_waiting_{0};
  std::atomic<Nanoseconds> woke_at_{0};  // when a lone call last woke the child
  std::array<Record, kControlSlots> records_;
  ControlCounters counters_;
};

}  // namespace simpler
