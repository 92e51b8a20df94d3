#include "hierarchical/sched/async_calls.h"

#include <algorithm>
#include <cstring>

#include "hierarchical/ipc/control_protocol.h"
#include "hierarchical/workers/replies.h"

namespace simpler {

std::unique_ptr<AsyncCalls::Call> AsyncCalls::make_call(int worker, const ControlRequest& request,
                                                        std::span<const std::byte> meta) {
  auto call = std::make_unique<Call>();
  call->worker = worker;
  call->request = request;
  call->bytes.reserve(meta.size() + request.payload.size());
  call->bytes.insert(call->bytes.end(), meta.begin(), meta.end());
  call->bytes.insert(call->bytes.end(), request.payload.begin(), request.payload.end());
  const std::span<const std::byte> all(call->bytes);
  call->request.meta = all.first(meta.size());
  call->request.payload = all.subspan(meta.size());
  call->request.notify_async = true;
  return call;
}

void AsyncCalls::check_room(int worker) {
  if (finished_)
    throw CallError(CallError::Kind::kClosed, worker, "the worker is closing or closed");
  if (queues_[static_cast<std::size_t>(worker)].size() < kMaxQueued) return;
  throw CallError(CallError::Kind::kBackPressure, worker,
                  std::to_string(kMaxQueued) + " calls already wait for worker " +
                      std::to_string(worker) + ": wait for some of them before submitting more");
}

void AsyncCalls::enqueue(std::unique_ptr<Call> call) {
  auto& queue = queues_[static_cast<std::size_t>(call->worker)];
  call->token = next_token_++;
  if (queue.empty() && try_post(*call)) {
    posted_.emplace(call->token, std::move(call));
    return;
  }
  if (call->broadcast) queued_broadcasts_.fetch_add(1);
  manager_.child(call->worker).control.async_waiting().fetch_add(1, std::memory_order_seq_cst);
  queue.push_back(std::move(call));
}

std::uint64_t AsyncCalls::submit(int worker, const ControlRequest& request) {
  auto call = make_call(worker, request, request.meta);
  const Deadline deadline = request.deadline;
  std::uint64_t token = 0;
  bool wake = false;
  {
    const std::lock_guard lock(mutex_);
    check_room(worker);
    enqueue(std::move(call));
    token = next_token_ - 1;
    wake = deadline.ns() < sleeping_until_.ns();
  }
  // Also after queueing: a slot may have come free just before async_waiting was raised.
  if (wake || queued(worker) != 0) bell_ring(manager_.memory().header().async_bell, 1U);
  return token;
}

std::vector<std::uint64_t> AsyncCalls::submit_broadcast(
    const ControlRequest& request, std::span<const std::span<const std::byte>> metas,
    const std::shared_ptr<ReplySink>& sink) {
  std::vector<std::uint64_t> tokens;
  {
    const std::lock_guard order(order_mutex_);
    const std::lock_guard lock(mutex_);
    for (int worker = 0; worker < manager_.chips(); ++worker) check_room(worker);
    for (int worker = 0; worker < manager_.chips(); ++worker) {
      const auto meta =
          metas.empty() ? std::span<const std::byte>() : metas[static_cast<std::size_t>(worker)];
      auto call = make_call(worker, request, meta);
      call->broadcast = true;
      call->sink = sink;
      enqueue(std::move(call));
      tokens.push_back(next_token_ - 1);
    }
  }
  bell_ring(manager_.memory().header().async_bell, 1U);
  return tokens;
}

void AsyncCalls::left_queue(const Call& call) {
  manager_.child(call.worker).control.async_waiting().fetch_sub(1, std::memory_order_seq_cst);
  if (!call.broadcast) return;
  queued_broadcasts_.fetch_sub(1);
  release_notify(broadcasts_posted_);
}

bool AsyncCalls::cancel(std::uint64_t token) {
  const std::lock_guard lock(mutex_);
  const auto found = posted_.find(token);
  if (found != posted_.end()) {
    Call& call = *found->second;
    if (!manager_.child(call.worker).control.poll_withdraw(call.slot)) return false;
    posted_.erase(found);
    return true;
  }
  for (auto& queue : queues_) {
    const auto at =
        std::ranges::find_if(queue, [token](const auto& call) { return call->token == token; });
    if (at == queue.end()) continue;
    left_queue(**at);
    queue.erase(at);
    // Who queued behind it may fit where it did not.
    bell_ring(manager_.memory().header().async_bell, 1U);
    return true;
  }
  return false;
}

bool AsyncCalls::try_post(Call& call) {
  ControlParentEnd& control = manager_.child(call.worker).control;
  if (control.gone()) return false;  // wait_events ends it
  std::shared_ptr<StagedBlock> staged;
  RequestArena& arena = manager_.child(call.worker).arena;
  if (call.bytes.size() > kSlotInlineBytes) {
    if (arena.wait_stage(call.bytes.size(), Deadline::at(0), nullptr, staged) != ArenaWait::kOk)
      return false;
    std::memcpy(arena.at(staged->offset()), call.bytes.data(), call.bytes.size());
  }
  const int slot = control.poll_slot();
  if (slot < 0) return false;
  call.slot = slot;
  control.fill(slot, call.request, std::move(staged));
  control.post(slot, manager_.next_request_id());
  return true;
}

void AsyncCalls::post_queued() {
  for (auto& queue : queues_) {
    while (!queue.empty() && try_post(*queue.front())) {
      left_queue(*queue.front());
      const std::uint64_t token = queue.front()->token;
      posted_.emplace(token, std::move(queue.front()));
      queue.pop_front();
    }
  }
}

bool AsyncCalls::end_one(Call& call, AsyncEvent& event) {
  ChildProcess& child = manager_.child(call.worker);
  CallWait how = CallWait::kOk;
  if (child.control.reply_due(call.slot)) {
    if (!call.request.deadline.passed()) return false;
    how = child.control.leave(call.slot, false);
  } else {
    how = child.control.wait_reply(call.slot, Deadline::never(),
                                   nullptr);  // does not wait: nothing is due
  }
  event = {AsyncEvent::Kind::kReply, call.worker, call.token, {}, {}, nullptr};
  if (how != CallWait::kOk) {
    const bool started = how == CallWait::kTimedOutStarted;
    event.error =
        how == CallWait::kPeerGone
            ? std::make_unique<CallError>(manager_.gone_error(call.worker))
            : std::make_unique<CallError>(manager_.timed_out_error(child, call.request, started));
    return true;
  }
  try {
    event.bytes = take_reply_copy(child, call.slot);
  } catch (const CallError& error) {
    event.error = std::make_unique<CallError>(error);
  }
  return true;
}

void AsyncCalls::deliver(const Call& call, AsyncEvent event, std::vector<AsyncEvent>& out) {
  if (!call.sink) {
    out.push_back(std::move(event));
    return;
  }
  const bool over =
      !event.error || !event.error->started;  // else an event follows when the handler ends
  const std::lock_guard lock(call.sink->mutex);
  if (!call.sink->left) {
    call.sink->replies.push_back(std::move(event));
    call.sink->changed.notify_all();
    return;
  }
  manager_.child(call.worker)
      .control.counters()
      .late_replies.fetch_add(1, std::memory_order_relaxed);
  if (over && call.request.hold != 0) {
    out.push_back({AsyncEvent::Kind::kEnded, call.worker, call.request.hold, {}, {}, nullptr});
  }
}

void AsyncCalls::end_posted(std::vector<AsyncEvent>& out) {
  for (auto at = posted_.begin(); at != posted_.end();) {
    AsyncEvent event;
    if (end_one(*at->second, event)) {
      deliver(*at->second, std::move(event), out);
      at = posted_.erase(at);
    } else {
      ++at;
    }
  }
}

void AsyncCalls::expire_queue(int worker, std::vector<AsyncEvent>& out) {
  auto& queue = queues_[static_cast<std::size_t>(worker)];
  const bool gone = manager_.child(worker).control.gone();
  std::erase_if(queue, [&](const std::unique_ptr<Call>& call) {
    if (!gone && !call->request.deadline.passed()) return false;
    AsyncEvent event{AsyncEvent::Kind::kReply, worker, call->token, {}, {}, nullptr};
    event.error = gone ? std::make_unique<CallError>(manager_.gone_error(worker))
                       : std::make_unique<CallError>(manager_.timed_out_error(
                             manager_.child(worker), call->request, false));
    deliver(*call, std::move(event), out);
    left_queue(*call);
    return true;
  });
}

void AsyncCalls::reclaim(std::vector<AsyncEvent>& out) {
  for (int worker = 0; worker < manager_.size(); ++worker) {
    manager_.child(worker).control.reclaim_abandoned([&](std::uint64_t hold) {
      out.push_back({AsyncEvent::Kind::kEnded, worker, hold, {}, {}, nullptr});
    });
  }
}

Deadline AsyncCalls::next_deadline() {
  Deadline earliest = Deadline::never();
  for (const auto& [token, call] : posted_) earliest = earliest.earlier(call->request.deadline);
  for (const auto& queue : queues_) {
    for (const auto& call : queue) earliest = earliest.earlier(call->request.deadline);
  }
  return earliest;
}

std::vector<AsyncEvent> AsyncCalls::wait_events() {
  Bell<>& bell = manager_.memory().header().async_bell;
  for (;;) {
    bell_take(bell);
    std::vector<AsyncEvent> out;
    Deadline deadline = Deadline::never();
    {
      const std::lock_guard lock(mutex_);
      out = std::move(events_);
      events_.clear();
      log_bytes_ = 0;
      if (logs_lost_ != 0) {
        out.push_back({AsyncEvent::Kind::kLogsLost, -1, logs_lost_, {}, {}, nullptr});
        logs_lost_ = 0;
      }
      end_posted(out);
      reclaim(out);
      for (int worker = 0; worker < manager_.size(); ++worker) expire_queue(worker, out);
      post_queued();
      if (out.empty() && finished_) return out;
      deadline = next_deadline();
      sleeping_until_ = out.empty() ? deadline : Deadline::at(0);
    }
    if (!out.empty()) return out;
    bell_sleep(bell, deadline);
  }
}

void AsyncCalls::push(AsyncEvent event) {
  {
    const std::lock_guard lock(mutex_);
    if (event.kind == AsyncEvent::Kind::kLog) {
      if (log_bytes_ + event.bytes.size() > kMaxLogBytes) {
        ++logs_lost_;
        return;
      }
      log_bytes_ += event.bytes.size();
    }
    events_.push_back(std::move(event));
  }
  bell_ring(manager_.memory().header().async_bell, 1U);
}

void AsyncCalls::finish() {
  {
    const std::lock_guard lock(mutex_);
    finished_ = true;
  }
  bell_ring(manager_.memory().header().async_bell, 1U);
}

std::size_t AsyncCalls::queued(int worker) {
  const std::lock_guard lock(mutex_);
  return queues_[static_cast<std::size_t>(worker)].size();
}

}  // namespace simpler
