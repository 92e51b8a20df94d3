// Explorer: who goes on, and the search over all such choices. Included by explorer.h.
#pragma once

#include <gtest/gtest.h>

#include <stdexcept>

#include "model/explorer.h"

namespace simpler::model {

inline int Scenario::add(std::string name, std::function<void()> body, bool daemon, bool mortal) {
  Explorer& e = explorer_;
  const int id = e.used_++;
  if (id >= kMaxThreads) throw std::length_error("a model has at most kMaxThreads threads");
  if (static_cast<std::size_t>(id) == e.threads_.size()) {
    e.threads_.push_back(std::make_unique<Explorer::Thread>(e, id));
  }
  Explorer::Thread& thread = e.at(id);
  thread.name = std::move(name);
  thread.body = std::move(body);
  thread.state = Explorer::State::kReady;
  thread.daemon = daemon;
  thread.mortal = mortal;
  thread.killed = false;
  thread.fresh = true;
  thread.waits_on = nullptr;
  thread.clock = {};
  thread.clock[static_cast<std::size_t>(id)] = 1;
  thread.buffer.clear();
  return id;
}

inline void check(bool holds, const char* what) {
  if (holds) return;
  if (active == nullptr) {
    ADD_FAILURE() << what;
    return;
  }
  active->fail(Failure::kCheck, what);
}

inline void Explorer::entry(void* thread) {
  auto& self = *static_cast<Thread*>(thread);
  for (;;) self.explorer.body_of(self);
}

inline void Explorer::body_of(Thread& thread) {
  if (!aborting_) {
    try {
      thread.body();
    } catch (const Killed&) {
      note("is killed");
    } catch (const Abort&) {
    }
  }
  thread.state = State::kEnded;
  for (int id = 0; id < used_; ++id) {
    if (at(id).state == State::kJoining && at(id).joins == thread.id) at(id).state = State::kReady;
  }
  const int next = aborting_ ? -1 : pick();
  running_ = next;
  thread.fiber.switch_to(next < 0 ? main_ : at(next).fiber);
}

inline void Explorer::enter(int id) {
  Fiber& from = running_ < 0 ? main_ : self().fiber;
  running_ = id;
  from.switch_to(id < 0 ? main_ : at(id).fiber);
}

inline void Explorer::point() {
  if (++steps_ > options_.max_steps) fail(Failure::kLivelock, "more steps than max_steps");
  if (std::exchange(self().fresh, false)) return;
  reschedule();
  self().fresh = false;
}

inline void Explorer::reschedule() {
  const int id = running_;
  const int next = pick();
  if (next != id) enter(next);
  if (aborting_) throw Abort{};
  if (at(id).killed) throw Killed{};
}

inline int Explorer::pick() {
  collect();
  if (candidates_.empty()) return end_of_run();
  return apply(candidates_[static_cast<std::size_t>(choose(static_cast<int>(candidates_.size())))]);
}

// The first candidate is the default: going on without a switch.
inline void Explorer::collect() {
  candidates_.clear();
  const bool can_go_on = running_ >= 0 && self().state == State::kReady;
  const int cost = can_go_on ? 1 : 0;
  if (can_go_on) candidates_.push_back({Kind::kRun, running_, 0});
  if (preemptions_left_ >= cost) {
    for (int id = 0; id < used_; ++id) {
      if (id != running_ && at(id).state == State::kReady)
        candidates_.push_back({Kind::kRun, id, cost});
    }
  }
  if (can_go_on && self().mortal && kills_left_ > 0)
    candidates_.push_back({Kind::kKill, running_, 0});
  const bool idle = candidates_.empty();
  for (int id = 0; id < used_; ++id) {
    if (at(id).state == State::kBlocked && preemptions_left_ >= cost)
      collect_sleeper(at(id), cost, idle);
  }
}

inline void Explorer::collect_sleeper(const Thread& thread, int cost, bool idle) {
  if (thread.has_deadline && (idle || timeouts_left_ > 0))
    candidates_.push_back({Kind::kTimeout, thread.id, cost});
  if (spurious_left_ > 0) candidates_.push_back({Kind::kSpurious, thread.id, cost});
  if (signals_left_ > 0) candidates_.push_back({Kind::kSignal, thread.id, cost});
}

inline int Explorer::apply(const Candidate& candidate) {
  Thread& thread = at(candidate.thread);
  preemptions_left_ -= candidate.cost;
  const auto awake = [&](FutexResult result, int& left) {
    thread.result = result;
    thread.state = State::kReady;
    left = left > 0 ? left - 1 : 0;
  };
  switch (candidate.kind) {
    case Kind::kRun:
      break;
    case Kind::kTimeout:
      awake(FutexResult::kTimedOut, timeouts_left_);
      break;
    case Kind::kSpurious:
      awake(FutexResult::kWoken, spurious_left_);
      break;
    case Kind::kSignal:
      awake(FutexResult::kInterrupted, signals_left_);
      break;
    case Kind::kKill:
      thread.killed = true;
      thread.state = State::kReady;
      --kills_left_;
      flush_all(thread);
      break;
  }
  thread.fresh = true;
  return candidate.thread;
}

inline int Explorer::end_of_run() {
  for (int id = 0; id < used_; ++id) flush_all(at(id));
  std::string asleep;
  for (int id = 0; id < used_; ++id) {
    const Thread& thread = at(id);
    if (thread.daemon || thread.state == State::kEnded) continue;
    asleep += "\n  " + thread.name;
    if (thread.state == State::kJoining) asleep += " waits for the end of " + at(thread.joins).name;
    if (thread.state == State::kBlocked) asleep += " sleeps on " + name_of(*thread.waits_on);
  }
  if (!asleep.empty()) record(Failure::kDeadlock, "nothing can happen any more:" + asleep);
  return -1;
}

inline int Explorer::choose(int count) {
  if (count == 1) return 0;
  if (depth_ < path_.size()) {
    const Step step = path_[depth_++];
    if (step.count != count) throw std::logic_error("the model is not deterministic");
    return step.chosen;
  }
  int chosen = 0;
  // A uniform choice would switch at almost every step, and real schedules have runs.
  if (at_random_ && random_() % 4 == 0)
    chosen = static_cast<int>(random_() % static_cast<unsigned>(count));
  path_.push_back({chosen, count});
  ++depth_;
  return chosen;
}

inline void Explorer::execute() {
  used_ = 0;
  steps_ = 0;
  depth_ = 0;
  running_ = -1;
  aborting_ = false;
  preemptions_left_ = bound_;
  timeouts_left_ = options_.timeouts;
  spurious_left_ = options_.spurious;
  signals_left_ = options_.signals;
  weak_left_ = options_.weak_fails;
  kills_left_ = 1;
  seen_cells_.clear();
  ++verdict_.executions;
  Scenario scenario(*this);
  setup_(scenario);
  const int first = pick();
  if (first >= 0) enter(first);
  const bool failed = aborting_;
  unwind();
  if (!failed && scenario.finally_) {
    try {
      scenario.finally_();
    } catch (const Abort&) {
    }
  }
  for (int id = 0; id < used_; ++id) at(id).body = nullptr;
}

// Threads that sleep, or have not begun, leave their bodies.
inline void Explorer::unwind() {
  aborting_ = true;
  for (int id = 0; id < used_; ++id) {
    if (at(id).state != State::kEnded) enter(id);
  }
  running_ = -1;
}

// The next path in depth-first order.
inline bool Explorer::next_path() {
  while (!path_.empty()) {
    if (++path_.back().chosen < path_.back().count) return true;
    path_.pop_back();
  }
  return false;
}

inline void Explorer::explore_depth_first() {
  for (bound_ = 0; bound_ <= options_.preemptions; ++bound_) {
    path_.clear();
    do {
      execute();
      if (!verdict_.good()) return;
    } while (next_path());
  }
}

inline void Explorer::explore_at_random() {
  at_random_ = true;
  bound_ = options_.max_steps;
  for (std::uint64_t i = 0; i < options_.random_runs && verdict_.good(); ++i) {
    path_.clear();
    execute();
  }
}

inline Verdict Explorer::run() {
  active = this;
  if (options_.random_runs == 0) {
    explore_depth_first();
  } else {
    explore_at_random();
  }
  if (!verdict_.good()) replay_for_report();
  active = nullptr;
  return verdict_;
}

inline void Explorer::replay_for_report() {
  const std::string reason = verdict_.report;
  const std::uint64_t executions = verdict_.executions;
  tracing_ = true;
  execute();
  verdict_.executions = executions;
  verdict_.report = reason + "\nin execution " + std::to_string(executions) + ", " +
                    std::to_string(bound_) + " preemptions allowed, seed " +
                    std::to_string(options_.seed) + ":";
  for (const std::string& line : trace_) verdict_.report += "\n  " + line;
}

inline void Explorer::record(Failure failure, const std::string& message) {
  aborting_ = true;
  if (!verdict_.good()) return;
  verdict_.failure = failure;
  verdict_.report = message;
}

inline void Explorer::fail(Failure failure, const std::string& message) {
  note("fails: " + message);
  record(failure, message);
  throw Abort{};
}

}  // namespace simpler::model
