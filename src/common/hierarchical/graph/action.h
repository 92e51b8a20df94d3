// What the graph asks of its caller, and what it tells, in the order in which it happened.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "hierarchical/graph/ids.h"

namespace simpler::graph {

enum class Outcome : std::uint8_t {
  kOk,
  kFailed,     // the worker said so
  kLost,       // its worker is gone, before or while it ran; counts as failed
  kPoisoned,   // did not run, since something upstream in its run did not succeed
  kCancelled,  // did not run, since its run was cancelled
};

enum class ActionKind : std::uint8_t {
  // task, member, worker, producers: put it into the worker's ring, now. The worker neither runs
  // nor
  // skips it before all producers have ended.
  kSend,
  kRecall,      // task, member, worker: keep it from starting if that is still possible
  kTaskEnded,   // task, outcome; the id may still be named as a dependency
  kPassed,      // task, lost after it was sent: what was sent ahead of its end may now go on
  kRunDone,     // run, result
  kScopeEmpty,  // scope: closed, and its tasks have ended; the id is used up
  kBufferIdle,  // buffer: released, and the tasks naming it have ended; the id is used up
};

// Work that a sent task comes after and that has not ended yet.
struct Producer {
  TaskId task;
  std::uint32_t member = 0;
  std::uint32_t worker = kNone;
  // Of the same run: when it does not succeed, the consumer is skipped. Otherwise order alone.
  bool must_succeed = false;
};

struct RunResult {
  RunId run;
  TaskId cause;  // the first task that failed or was lost, by now perhaps a stale id
  bool was_cancelled = false;
  std::uint64_t tasks = 0;
  std::uint64_t failed = 0;  // lost ones included
  std::uint64_t poisoned = 0;
  std::uint64_t cancelled = 0;
};

struct Action {
  ActionKind kind = ActionKind::kSend;
  Outcome outcome = Outcome::kOk;
  std::uint32_t member = 0;
  std::uint32_t slot = kNone;  // of what `kind` says the action is about
  std::uint32_t generation = 0;
  std::uint32_t worker = kNone;  // kNone for a task of the host
  std::uint32_t first = 0;       // of the producers, or the index of the result
  std::uint32_t count = 0;

  [[nodiscard]] TaskId task() const noexcept { return {slot, generation}; }
  [[nodiscard]] RunId run() const noexcept { return {slot, generation}; }
  [[nodiscard]] ScopeId scope() const noexcept { return {slot, generation}; }
  [[nodiscard]] BufferId buffer() const noexcept { return {slot, generation}; }
  // kTaskEnded, poisoned: the task that failed or was lost; of a cancellation there is none.
  [[nodiscard]] TaskId cause() const noexcept { return {first, count}; }
};

// Filled by the graph, drained by its caller; keeps its memory.
class ActionLog {
 public:
  template <typename Noun>
  Action& add(ActionKind kind, Id<Noun> id) {
    Action& action = actions_.emplace_back();
    action.kind = kind;
    action.slot = id.slot;
    action.generation = id.generation;
    return action;
  }
  void add_result(const RunResult& result) {
    add(ActionKind::kRunDone, result.run).first = static_cast<std::uint32_t>(results_.size());
    results_.push_back(result);
  }
  void add_producer(Action& send, const Producer& producer) {
    if (send.count == 0) send.first = static_cast<std::uint32_t>(producers_.size());
    producers_.push_back(producer);
    ++send.count;
  }

  [[nodiscard]] std::span<const Action> actions() const noexcept { return actions_; }
  [[nodiscard]] std::span<const Producer> producers(const Action& send) const noexcept {
    return std::span<const Producer>(producers_).subspan(send.first, send.count);
  }
  [[nodiscard]] const RunResult& result(const Action& done) const noexcept {
    return results_[done.first];
  }
  void clear() noexcept {
    actions_.clear();
    producers_.clear();
    results_.clear();
  }

 private:
  std::vector<Action> actions_;
  std::vector<Producer> producers_;
  std::vector<RunResult> results_;
};

}  // namespace simpler::graph
