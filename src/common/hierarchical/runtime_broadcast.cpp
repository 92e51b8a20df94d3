// RunningTree's broadcasts: one request to every chip, started on all before any is waited for
// (CP-7).
#include <algorithm>
#include <chrono>
#include <cstring>

#include "hierarchical/ipc/bell.h"
#include "hierarchical/runtime.h"
#include "hierarchical/workers/replies.h"

namespace simpler {

struct RunningTree::Reserved {
  explicit Reserved(std::size_t chips) : slots(chips, -1), replies(chips) {}

  void fail(std::size_t i, CallError error) {
    slots[i] = -1;
    replies[i].kind = BroadcastReply::Kind::kError;
    replies[i].error = std::make_unique<CallError>(std::move(error));
  }

  std::vector<int> slots;  // -1: this chip's reply is in already
  std::vector<BroadcastReply> replies;
  bool interrupted = false;
};

namespace {

// Remembers that a signal was seen: a wait whose reply came meanwhile ends as if there was none.
class NotedInterrupt : public Interrupt {
 public:
  explicit NotedInterrupt(Interrupt* inner) noexcept : inner_(inner) {}
  bool pending() override { return seen_ = inner_->pending(); }
  [[nodiscard]] bool seen() const noexcept { return seen_; }
  // What a wait takes: nullptr where nobody looks for signals.
  [[nodiscard]] Interrupt* get() noexcept { return inner_ == nullptr ? nullptr : this; }

 private:
  Interrupt* const inner_;
  bool seen_ = false;
};

ControlRequest with_meta(const ControlRequest& request,
                         std::span<const std::span<const std::byte>> metas, std::size_t i) {
  ControlRequest own = request;
  if (!metas.empty()) own.meta = metas[i];
  return own;
}

}  // namespace

// Slots are taken in worker order by every broadcast, so that two of them cannot wait for each
// other.
void RunningTree::reserve(Reserved& reserved, const ControlRequest& request,
                          std::span<const std::span<const std::byte>> metas, Interrupt* interrupt) {
  std::shared_ptr<StagedBlock> shared;  // without metas the request is staged once for all
  for (std::size_t i = 0; i < reserved.slots.size() && !reserved.interrupted; ++i) {
    ChildProcess& child = manager_.child(static_cast<int>(i));
    const ControlRequest own = with_meta(request, metas, i);
    try {
      if (child.control.gone()) throw manager_.gone_error(child.index);
      std::shared_ptr<StagedBlock> staged = shared;
      if (!staged && own.nbytes() > kSlotInlineBytes) staged = wait_stage(child, own, interrupt);
      if (metas.empty()) shared = staged;
      int slot = -1;
      switch (child.control.wait_slot(request.deadline, interrupt, slot)) {
        case CallWait::kOk:
          break;
        case CallWait::kTimedOut:
          throw manager_.timed_out_error(child, own, false);
        case CallWait::kInterrupted:
          throw CallError(CallError::Kind::kInterrupted, child.index, "interrupted");
        default:
          throw manager_.gone_error(child.index);
      }
      child.control.fill(slot, own, std::move(staged));
      reserved.slots[i] = slot;
    } catch (const CallError& error) {
      reserved.interrupted = error.kind == CallError::Kind::kInterrupted;
      reserved.fail(i, error);
    }
  }
}

bool RunningTree::post_in_order(Reserved& reserved, Deadline deadline, Interrupt* interrupt) {
  for (;;) {
    const std::uint32_t seen = release_seen(async_.broadcasts_posted());
    {
      const std::lock_guard order(async_.order_mutex());
      // A queued broadcast came first; while it waits for slots this one waits with it.
      if (!async_.broadcast_queued()) {
        for (std::size_t i = 0; i < reserved.slots.size(); ++i) {
          if (reserved.slots[i] < 0) continue;
          manager_.child(static_cast<int>(i))
              .control.post(reserved.slots[i], manager_.next_request_id());
        }
        return true;
      }
    }
    release_sleep(async_.broadcasts_posted(), seen, next_slice(deadline, interrupt));
    reserved.interrupted = interrupt != nullptr && interrupt->pending();
    if (reserved.interrupted || deadline.passed()) return false;
  }
}

void RunningTree::end_one(Reserved& reserved, std::size_t i, const ControlRequest& request,
                          Interrupt* interrupt) {
  ChildProcess& child = manager_.child(static_cast<int>(i));
  const int slot = reserved.slots[i];
  try {
    if (reserved.interrupted && child.control.reply_due(slot)) {
      const CallWait how = child.control.leave(slot, true);
      if (how == CallWait::kPeerGone) throw manager_.gone_error(child.index);
      if (how != CallWait::kOk) {
        throw CallError(CallError::Kind::kInterrupted, child.index, "interrupted",
                        how == CallWait::kInterruptedStarted);
      }
    } else {
      wait_reply(child, slot, request, interrupt);
    }
    reserved.replies[i].bytes = take_reply_copy(child, slot);
    reserved.replies[i].kind = BroadcastReply::Kind::kReply;
  } catch (const CallError& error) {
    reserved.interrupted = reserved.interrupted || error.kind == CallError::Kind::kInterrupted;
    reserved.fail(i, error);
  }
}

void RunningTree::report_over(int worker, std::uint64_t hold) {
  if (hold != 0) async_.push({AsyncEvent::Kind::kEnded, worker, hold, {}, {}, nullptr});
}

std::vector<BroadcastReply> RunningTree::broadcast(
    const ControlRequest& request, std::span<const std::span<const std::byte>> metas,
    bool fail_fast, Interrupt* signals) {
  check_size(request);
  if (fail_fast) return broadcast_fail_fast(request, metas, signals);
  NotedInterrupt noted(signals);
  Interrupt* const interrupt = noted.get();
  Reserved reserved(static_cast<std::size_t>(manager_.chips()));
  reserve(reserved, request, metas, interrupt);
  const bool posted = !reserved.interrupted && post_in_order(reserved, request.deadline, interrupt);
  for (std::size_t i = 0; i < reserved.slots.size(); ++i) {
    if (reserved.slots[i] < 0) continue;
    if (posted) {
      end_one(reserved, i, with_meta(request, metas, i), interrupt);
      reserved.interrupted = reserved.interrupted || noted.seen();
    } else {
      ChildProcess& child = manager_.child(static_cast<int>(i));
      child.control.release(reserved.slots[i]);
      reserved.fail(i, manager_.timed_out_error(child, request, false));
    }
  }
  if (reserved.interrupted) {
    for (std::size_t i = 0; i < reserved.replies.size(); ++i) {
      const CallError* error = reserved.replies[i].error.get();
      if (error == nullptr || !error->started) report_over(static_cast<int>(i), request.hold);
    }
    throw CallError(CallError::Kind::kInterrupted, -1, "interrupted");
  }
  return std::move(reserved.replies);
}

std::vector<BroadcastReply> RunningTree::broadcast_fail_fast(
    const ControlRequest& request, std::span<const std::span<const std::byte>> metas,
    Interrupt* interrupt) {
  const auto sink = std::make_shared<ReplySink>();
  const auto chips = static_cast<std::size_t>(manager_.chips());
  async_.submit_broadcast(request, metas, sink);
  const auto failed = [&] {
    return std::ranges::any_of(sink->replies,
                               [](const AsyncEvent& event) { return event.error != nullptr; });
  };
  std::unique_lock lock(sink->mutex);
  bool interrupted = false;
  while (!interrupted && sink->replies.size() < chips && !failed()) {
    if (interrupt == nullptr) {
      sink->changed.wait(lock);
    } else {
      sink->changed.wait_for(lock, std::chrono::nanoseconds(kSignalCheckNs));
      lock.unlock();
      interrupted = interrupt->pending();
      lock.lock();
    }
  }
  sink->left = true;
  std::vector<BroadcastReply> replies(chips);
  for (AsyncEvent& event : sink->replies) {
    BroadcastReply& reply = replies[static_cast<std::size_t>(event.worker)];
    reply.kind = event.error ? BroadcastReply::Kind::kError : BroadcastReply::Kind::kReply;
    reply.bytes = std::move(event.bytes);
    reply.error = std::move(event.error);
  }
  lock.unlock();  // who delivers replies holds the queue's lock, which report_over takes
  if (!interrupted) return replies;
  for (std::size_t i = 0; i < chips; ++i) {
    const BroadcastReply& reply = replies[i];
    const bool over = reply.kind == BroadcastReply::Kind::kReply ||
                      (reply.kind == BroadcastReply::Kind::kError && !reply.error->started);
    if (over) report_over(static_cast<int>(i), request.hold);
  }
  throw CallError(CallError::Kind::kInterrupted, -1, "interrupted");
}

}  // namespace simpler
