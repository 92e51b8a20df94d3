#include "hierarchical/workers/worker_manager.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <system_error>

#include "hierarchical/base/error.h"
#include "hierarchical/ipc/control_protocol.h"

namespace simpler {

namespace {

// A killed process ends at once unless the kernel holds it (uninterruptible sleep); then its end is
// not waited for for ever.
constexpr Nanoseconds kReapPatience = 2'000'000'000;

// `since_ns` is the child's word: it may be any number.
std::string seconds_text(Nanoseconds since_ns) {
  const Nanoseconds now = monotonic_now();
  const Nanoseconds spent = since_ns > 0 && since_ns < now ? now - since_ns : 0;
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.3f s", static_cast<double>(spent) * 1e-9);
  return text.data();
}

// When this process may have no more threads. Nothing else touches the children then.
void end_without_supervisor(const std::vector<std::unique_ptr<ChildProcess>>& children,
                            SpareHandle& spare) noexcept {
  const Deadline deadline = Deadline::at(monotonic_now() + kReapPatience);
  const auto end = [deadline](int pidfd) {
    if (pidfd < 0) return;
    send_signal(pidfd, SIGKILL);
    if (wait_process_end(pidfd, deadline)) reap(pidfd);
  };
  for (const auto& child : children) {
    end(child->pidfd.get());
    child->state = ChildState::kClosed;
  }
  end(spare.pidfd());
}

}  // namespace

WorkerManager::WorkerManager(TreeOptions options, TreeListener& listener)
    : options_(std::move(options)),
      listener_(listener),
      memory_(static_cast<int>(options_.device_ids.size()) + options_.num_sub_workers,
              options_.max_payload, options_.heap_bytes, options_.name),
      supervisor_(*this, spare_) {
  const int chips = static_cast<int>(options_.device_ids.size());
  for (int i = 0; i < chips + options_.num_sub_workers; ++i) {
    const int device = i < chips ? options_.device_ids[static_cast<std::size_t>(i)] : -1;
    children_.push_back(
        std::make_unique<ChildProcess>(memory_, i, i < chips, device, options_.spin_ns));
    children_.back()->arena.when_empty([this] { supervisor_.poke_trim(); });
  }
  memory_.header().spin_limit =
      options_.spin_ns > 0 ? static_cast<std::uint32_t>(usable_cores()) : 0;
}

WorkerManager::~WorkerManager() {
  end_everything();
  // An abandoned broadcast may hold a block of another child's arena, which would go before it.
  for (const auto& child : children_) child->control.reclaim_abandoned([](std::uint64_t) {});
  for (const auto& child : children_)
    child->arena.when_empty(nullptr);  // the supervisor goes first
}

ChildProcess& WorkerManager::child(int worker) {
  if (worker < 0 || worker >= size()) {
    throw Error(ErrorCode::kInvalidArgument, "no worker " + std::to_string(worker) +
                                                 ": ids are 0 to " + std::to_string(size() - 1));
  }
  return *children_[static_cast<std::size_t>(worker)];
}

bool WorkerManager::wait_all_ended(Deadline deadline) {
  std::unique_lock lock(mutex_);
  const auto all_ended = [this] {
    return std::ranges::all_of(children_, [](const auto& child) {
      return child->pid < 0 || (child->is_settled && (child->state == ChildState::kDead ||
                                                      child->state == ChildState::kClosed));
    });
  };
  const auto until = std::chrono::steady_clock::time_point(std::chrono::nanoseconds(deadline.ns()));
  return ended_.wait_until(lock, until, all_ended);
}

void WorkerManager::signal_remaining(int signal) {
  const std::lock_guard lock(mutex_);
  for (const auto& child : children_) {
    const bool running =
        child->state == ChildState::kStarting || child->state == ChildState::kReady;
    if (running && child->pidfd.valid()) send_signal(child->pidfd.get(), signal);
  }
}

void WorkerManager::stop(Deadline deadline, Interrupt* interrupt) {
  const std::lock_guard stop_lock(stop_mutex_);
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) return;
  }
  {
    const std::lock_guard lock(mutex_);
    stopping_.store(true, std::memory_order_seq_cst);
    // A restart under way ends first: its child must not be born behind our back. It fails soon,
    // since the spare answers no more and the child that it waits for is killed.
    for (const auto& child : children_) {
      if (child->state == ChildState::kStarting) send_signal(child->pidfd.get(), SIGKILL);
    }
  }
  spare_.cancel();
  for (const auto& child : children_) {
    child->control.fail_all(true);
    child->ring.fail_all();
  }
  const std::lock_guard restart_lock(restart_mutex_);
  const Nanoseconds now = monotonic_now();
  const Nanoseconds budget =
      deadline.is_never() ? Deadline::kForever / 2 : std::max<Nanoseconds>(0, deadline.ns() - now);
  const Nanoseconds reserve = std::min<Nanoseconds>(budget / 5, 1'000'000'000);
  ControlRequest request;
  request.op = ControlOp::STOP;
  request.deadline = Deadline::at(now + budget - reserve);
  supervisor_.expect_ends();
  for (const auto& child : children_) {
    if (report(child->index).state != ChildState::kReady) continue;
    child->control.fill(kLifecycleSlot, request, nullptr);
    child->control.post(kLifecycleSlot, next_request_id());
  }
  bool ended = false;
  bool interrupted = false;
  while (!ended && !interrupted && !request.deadline.passed()) {
    ended = wait_all_ended(next_slice(request.deadline, interrupt));
    interrupted = !ended && interrupt != nullptr && interrupt->pending();
  }
  if (!ended && !interrupted) {
    signal_remaining(SIGTERM);
    wait_all_ended(Deadline::at(now + budget - reserve / 2));
  }
  end_everything();  // after a signal at once: who presses Ctrl-C does not want to wait
}

void WorkerManager::end_everything() noexcept {
  stopping_.store(true, std::memory_order_seq_cst);
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) return;
    stopped_ = true;
  }
  try {
    supervisor_.start();  // a start that failed half-way has none yet; it reaps what there is
  } catch (const std::system_error&) {
    return end_without_supervisor(children_, spare_);
  }
  signal_remaining(SIGKILL);
  if (spare_.pidfd() >= 0) send_signal(spare_.pidfd(), SIGCONT);  // a stopped one could not leave
  wait_all_ended(Deadline::at(monotonic_now() + kReapPatience));
  spare_.dismiss();
  if (spare_.pidfd() >= 0 &&
      !wait_process_end(spare_.pidfd(), Deadline::at(monotonic_now() + kReapPatience))) {
    send_signal(spare_.pidfd(), SIGKILL);
  }
  std::unique_lock lock(mutex_);
  ended_.wait_for(lock, std::chrono::nanoseconds(kReapPatience),
                  [this] { return spare_.pidfd() < 0 || spare_state_ == ChildState::kDead; });
  lock.unlock();
  supervisor_.stop();
}

void WorkerManager::kill(int worker) {
  ChildProcess& target = child(worker);
  std::unique_lock lock(mutex_);
  if (target.pidfd.valid()) send_signal(target.pidfd.get(), SIGKILL);
  ended_.wait(lock, [&] {
    return target.is_settled &&
           (target.state == ChildState::kDead || target.state == ChildState::kClosed);
  });
}

std::vector<std::byte> WorkerManager::restart(int worker, Deadline deadline, Interrupt* interrupt) {
  ChildProcess& target = child(worker);
  const std::lock_guard restart_lock(restart_mutex_);
  if (stopping()) throw gone_error(worker);
  if (report(worker).state != ChildState::kDead) {
    throw Error(ErrorCode::kInvalidArgument,
                target.describe() + " is alive: only a dead worker can be restarted");
  }
  {
    // The supervisor may still be going through the slots: it must not fail those of the successor.
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [&] { return target.is_settled; });
  }
  // Callers of the dead child are awake and about to let go of their slots.
  wait_all_released(target, deadline, interrupt);
  try {
    spare_.settle(deadline);
  } catch (const Error& error) {
    throw CallError(CallError::Kind::kStartup, worker, error.what());
  }
  target.control.reset();
  target.ring.reset();
  target.life.reset();
  // Every reply of the dead child has been read; the pages would stay until its successor fills
  // them.
  const PayloadSpace space = memory_.space(worker);
  memory_.payload().release_pages(space.reply_base, space.reply_bytes);
  target.generation.fetch_add(1);
  post_start(target, deadline);
  start_replacement(target, deadline);
  try {
    std::vector<std::byte> answer = wait_start(target, deadline, interrupt);
    open_channel(target);
    return answer;
  } catch (...) {
    kill(worker);
    target.control.cancel_lifecycle();
    throw;
  }
}

void WorkerManager::wait_all_released(ChildProcess& target, Deadline deadline,
                                      Interrupt* interrupt) {
  for (;;) {
    const std::uint32_t seen = release_seen(target.block.slots_released);
    if (target.control.all_released()) return;
    release_sleep(target.block.slots_released, seen, next_slice(deadline, interrupt));
    if (stopping()) throw gone_error(target.index);
    if (interrupt != nullptr && interrupt->pending()) {
      throw CallError(CallError::Kind::kInterrupted, target.index,
                      "interrupted while restarting " + target.describe());
    }
    if (deadline.passed()) {
      throw CallError(CallError::Kind::kTimedOut, target.index,
                      "calls of the dead " + target.describe() + " have not returned");
    }
  }
}

void WorkerManager::start_replacement(ChildProcess& target, Deadline deadline) {
  SpareHandle::Replacement replacement;
  Descriptor log_socket;
  try {
    auto [ours, theirs] = make_socket_pair();
    log_socket = std::move(ours);
    replacement = spare_.fork_child(target.index, target.generation.load(), theirs, deadline);
  } catch (const Error& error) {
    target.control.cancel_lifecycle();
    std::string text = error.what();
    if (error.code() == ErrorCode::kWorkerDied) {
      std::unique_lock lock(mutex_);  // the supervisor is about to say how, if it has not yet
      ended_.wait_for(lock, std::chrono::nanoseconds(kReapPatience),
                      [this] { return spare_state_ == ChildState::kDead; });
      if (!spare_cause_.empty()) text += " (" + spare_cause_ + ")";
    }
    throw CallError(CallError::Kind::kStartup, target.index, text);
  }
  const std::lock_guard lock(mutex_);
  target.pid = replacement.pid;
  target.pidfd = std::move(replacement.pidfd);
  target.state = ChildState::kStarting;
  supervisor_.watch(
      {target.index, target.pid, target.pidfd.get(), std::move(log_socket), true, &target.life});
  if (stopping()) send_signal(target.pidfd.get(), SIGKILL);  // else stop() does
}

void WorkerManager::open_channel(ChildProcess& target) {
  {
    // Under the lock: whoever makes the child dead, or stops the tree, closes the channel after it.
    const std::lock_guard lock(mutex_);
    if (target.state == ChildState::kReady && !stopping()) {
      target.control.open();
      target.ring.open();
      supervisor_.watch_ends();
      return;
    }
  }
  throw gone_error(target.index);
}

WorkerManager::ChildReport WorkerManager::report(int worker) {
  ChildProcess& target = child(worker);
  const std::lock_guard lock(mutex_);
  const bool lives = target.state == ChildState::kStarting || target.state == ChildState::kReady;
  return {target.index,
          target.is_chip,
          target.device_id,
          target.pid,
          target.state,
          target.generation.load(),
          lives ? "" : target.first_cause};
}

WorkerManager::ChildReport WorkerManager::report_spare() {
  const std::lock_guard lock(mutex_);
  return {-1, false, -1, spare_.pid(), spare_state_, 0, spare_cause_};
}

CallError WorkerManager::gone_error(int worker) {
  const std::lock_guard lock(mutex_);
  const std::string& cause = child(worker).first_cause;
  if (!stopping() && !cause.empty()) return {CallError::Kind::kDied, worker, cause};
  return {CallError::Kind::kClosed, worker, "the worker is closing or closed"};
}

CallError WorkerManager::timed_out_error(ChildProcess& child, const ControlRequest& request,
                                         bool started) {
  const std::string what =
      listener_.name_of_request(request.op, request.arg) + " on " + child.describe();
  std::array<char, 64> limit{};
  std::snprintf(limit.data(), limit.size(), " when its limit of %g s passed", request.timeout_s);
  std::string text =
      what + (started ? " had begun but not ended" : " had not begun") + limit.data();
  const std::string activity = describe_activity(child);
  if (!activity.empty()) text += "; the child is " + activity;
  CallError error(CallError::Kind::kTimedOut, child.index, std::move(text), started);
  error.waited_for = what;
  error.timeout_s = request.timeout_s;
  return error;
}

std::string WorkerManager::describe_activity(ChildProcess& child) {
  std::string text;
  if (const auto task = child.ring.running()) {
    text = "running task " + std::to_string(task->seq) + " " +
           listener_.name_of_task(task->callable_id) + " for " + seconds_text(task->started_ns);
  }
  std::array<InFlight, kControlSlots> running;
  const int count = child.control.running(running);
  for (int i = 0; i < count; ++i) {
    const InFlight& call = running[static_cast<std::size_t>(i)];
    text += (text.empty() ? "running " : ", ") + listener_.name_of_request(call.op, call.arg) +
            " for " + seconds_text(call.started_ns);
  }
  return text;
}

void WorkerManager::child_ended(int index, const ExitStatus& status) {
  ChildProcess& child = *children_[static_cast<std::size_t>(index)];
  std::string cause = describe_exit(status);
  if (status.kind == ExitStatus::Kind::kSignalled && status.value == SIGKILL) {
    const auto kills = cgroup_oom_kills();
    const std::lock_guard lock(mutex_);
    if (kills && oom_kills_ && *kills > *oom_kills_)
      cause += "; the cgroup's out-of-memory count rose";
    oom_kills_ = kills;
  }
  const std::string activity = describe_activity(child);
  if (!activity.empty()) cause += ", " + activity;
  {
    const std::lock_guard lock(mutex_);
    child.first_cause = child.describe() + " died: " + cause;
    cause = child.first_cause;
    child.state = stopping() ? ChildState::kClosed : ChildState::kDead;
    child.is_settled = false;
  }
  spin_leave(memory_.header(), child.seat);
  child.control.fail_all(false);
  child.ring.fail_all();
  if (!stopping()) listener_.child_died(index, cause);
}

void WorkerManager::child_reaped(int index) {
  const std::lock_guard lock(mutex_);
  children_[static_cast<std::size_t>(index)]->is_settled = true;
  ended_.notify_all();
}

void WorkerManager::child_logged(int index, std::vector<std::byte> frame) {
  listener_.child_logged(index, std::move(frame));
}

void WorkerManager::spare_ended(const ExitStatus& status) {
  const std::lock_guard lock(mutex_);
  spare_state_ = ChildState::kDead;
  if (!stopping()) spare_cause_ = "the spare process died: " + describe_exit(status);
  ended_.notify_all();
}

void WorkerManager::trim() {
  for (const auto& child : children_) {
    if (child->arena.wants_trim()) child->arena.trim();
  }
}

}  // namespace simpler
