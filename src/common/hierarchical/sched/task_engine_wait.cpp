// Who drives: one waiter, else the engine's own thread while it is needed, else nobody.
#include <algorithm>
#include <chrono>

#include "hierarchical/ipc/spin.h"
#include "hierarchical/ipc/task_protocol.h"
#include "hierarchical/sched/task_engine.h"

namespace simpler {

namespace {

std::chrono::steady_clock::time_point time_of(Deadline deadline) {
  // Far enough, and no overflow inside the library.
  const Nanoseconds most = monotonic_now() + Nanoseconds{3'600'000'000'000};
  return std::chrono::steady_clock::time_point(
      std::chrono::nanoseconds(std::min(deadline.ns(), most)));
}

}  // namespace

TaskWait TaskEngine::help(Lock& lock, const Goal& goal, Wanted wanted, Deadline deadline,
                          Interrupt* interrupt) {
  if (goal.holds()) return TaskWait::kOk;
  flush();
  pump();
  if (goal.holds()) return TaskWait::kOk;
  if (deadline.passed()) return TaskWait::kTimedOut;
  Waiter me;
  me.goal = &goal;
  me.wanted = wanted;
  waiters_.push_back(&me);
  recheck_marks();
  const TaskWait how = help_until(lock, me, deadline, interrupt);
  std::erase(waiters_, &me);
  // Also when it was asked to take the seat, and its time was up first.
  if (driver_ == &me || driver_ == nullptr) leave_seat();
  return how;
}

bool TaskEngine::spin(Lock& lock, const Goal& goal, Nanoseconds bound) {
  if (goal.holds()) return true;
  pump();
  if (goal.holds()) return true;
  const std::uint64_t seat = spin_sit(tree_, kCallerSeats);
  if (seat == 0) return false;
  const Nanoseconds end = monotonic_now() + bound;
  bool holds = false;
  do {
    const std::uint32_t seen = attention_.load(std::memory_order_relaxed);
    lock.unlock();
    const bool is_caught = spin_until([&] { return is_anything_new(seen); }, end - monotonic_now());
    lock.lock();
    if (is_caught) pump();
    holds = goal.holds();
  } while (!holds && monotonic_now() < end);
  spin_leave(tree_, seat);
  return holds;
}

TaskWait TaskEngine::help_until(Lock& lock, Waiter& me, Deadline deadline, Interrupt* interrupt) {
  Deadline look = next_slice(Deadline::never(), interrupt);
  for (;;) {
    if (driver_ == nullptr || driver_ == &scheduler_) driver_ = &me;
    bool is_interrupted =
        driver_ == &me ? drive(lock, deadline, interrupt) : stand_by(lock, me, deadline, interrupt);
    if (!is_interrupted && look.passed()) {  // also while tasks end all the time
      lock.unlock();
      is_interrupted = interrupt->pending();
      lock.lock();
      look = next_slice(Deadline::never(), interrupt);
    }
    if (is_interrupted) return TaskWait::kInterrupted;  // first: the answer is given only once
    if (driver_ == &me) pump();
    if (me.goal->holds()) return TaskWait::kOk;
    if (deadline.passed()) {
      pump();
      return me.goal->holds() ? TaskWait::kOk : TaskWait::kTimedOut;
    }
  }
}

bool TaskEngine::is_anything_new(std::uint32_t attention_seen) const noexcept {
  if (attention_.load(std::memory_order_seq_cst) != attention_seen) return true;
  return std::ranges::any_of(
      places_, [](const Place& place) { return place.child->ring.ended_count() != 0; });
}

// Returns once a task may have ended, or it is time to look; true when interrupted.
bool TaskEngine::drive(Lock& lock, Deadline deadline, Interrupt* interrupt) {
  const std::uint32_t seen = attention_.load(std::memory_order_relaxed);
  const Deadline until = deadline.earlier(Deadline::at(next_deadline_ns_));
  lock.unlock();
  const auto anything = [this, seen] { return is_anything_new(seen); };
  bool is_interrupted = false;
  bool is_caught = anything();
  if (!is_caught && spin_.bound() > 0) {
    const std::uint64_t seat = spin_sit(tree_, kCallerSeats);
    if (seat != 0) {
      is_caught = spin_until(anything, std::min(spin_.bound(), until.remaining_ns()));
      spin_leave(tree_, seat);
    }
    if (is_caught) spin_.caught();
  }
  lock.lock();
  if (!is_caught && !anything()) is_interrupted = sleep_on_rings(lock, seen, until, interrupt);
  return is_interrupted;
}

// Somebody else drives. Returns when woken, or it is time to look; true when interrupted.
bool TaskEngine::stand_by(Lock& lock, Waiter& me, Deadline deadline, Interrupt* interrupt) {
  const std::cv_status how = me.wake.wait_until(lock, time_of(next_slice(deadline, interrupt)));
  if (how == std::cv_status::no_timeout || interrupt == nullptr) return false;
  lock.unlock();
  const bool is_interrupted = interrupt->pending();
  lock.lock();
  return is_interrupted;
}

void TaskEngine::call_attention() {
  attention_.fetch_add(1, std::memory_order_seq_cst);
  tasks_notify(tree_.tasks_ended);
}

void TaskEngine::wake_whom_it_concerns() {
  for (Waiter* waiter : waiters_) {
    if (!waiter->goal->holds()) continue;
    if (waiter == driver_) {
      call_attention();
    } else {
      waiter->wake.notify_one();
    }
  }
}

// REQUIRES: nobody else drives, and this thread is no longer among the waiters.
void TaskEngine::leave_seat() {
  driver_ = nullptr;
  for (Waiter* waiter : waiters_) {
    if (waiter->goal->holds()) continue;  // it is awake and about to leave
    waiter->wake.notify_one();
    return;
  }
  call_scheduler();
}

bool TaskEngine::needs_scheduler() const noexcept {
  return !is_closed_ && (unsent_ != 0 || graph_.sub_backlog() != 0 || watched_runs_ != 0 ||
                         busy_buffers_ != 0 || !timed_runs_.empty());
}

// When something is to be done, or told, once tasks end, and nobody waits for them.
void TaskEngine::call_scheduler() {
  if (driver_ != nullptr || is_scheduler_called_ || !needs_scheduler()) return;
  is_scheduler_called_ = true;
  scheduler_.wake.notify_one();
}

void TaskEngine::run_scheduler() {
  Lock lock(mutex_);
  for (;;) {
    scheduler_.wake.wait(lock, [this] { return is_closed_ || is_scheduler_called_; });
    if (is_closed_) return;
    is_scheduler_called_ = false;
    if (driver_ != nullptr) continue;
    driver_ = &scheduler_;
    ++takeovers_;
    while (driver_ == &scheduler_ && needs_scheduler()) {
      drive(lock, Deadline::never(), nullptr);
      pump();
    }
    if (driver_ == &scheduler_) leave_seat();
  }
}

}  // namespace simpler
