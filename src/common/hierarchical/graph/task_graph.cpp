// Construction, runs, scopes, buffers and submission.
#include "hierarchical/graph/task_graph.h"

#include <algorithm>
#include <string>

#include "hierarchical/base/error.h"

namespace simpler::graph {

namespace {

[[noreturn]] void refuse(const std::string& why) { throw Error(ErrorCode::kInvalidArgument, why); }

}  // namespace

TaskGraph::TaskGraph(const Config& config)
    : config_(config),
      ranges_(config.regions),
      places_(std::size_t{config.chips} + config.sub_workers),
      queues_(config.chips + std::size_t{1}),
      is_touched_(queues_.size()),
      subs_left_(config.sub_workers) {
  if (config.ring_depth == 0 || config.sub_depth == 0) refuse("a ring holds at least one task");
  if (config.capacity == 0) refuse("the graph holds at least one task");
}

RunId TaskGraph::open_run(std::int16_t priority) {
  const std::uint32_t slot = runs_.allocate();
  runs_[slot].priority = priority;
  runs_[slot].result.run = runs_.id_of(slot);
  return runs_.id_of(slot);
}

void TaskGraph::seal_run(RunId run) {
  Run* found = runs_.find(run);
  if (found == nullptr) refuse("the run is done");
  found->is_sealed = true;
  note_done(run.slot);
  finish_all();
}

void TaskGraph::cancel_run(RunId run) {
  Run* found = runs_.find(run);
  if (found == nullptr || found->result.was_cancelled) return;
  found->result.was_cancelled = true;
  for (std::uint32_t slot = found->first_task; slot != kNone; slot = tasks_[slot].next_of_run) {
    Task& task = tasks_[slot];
    if (task.state == TaskState::kEnded) continue;
    if (task.state != TaskState::kSent) {
      settle(slot, Outcome::kCancelled);
      continue;
    }
    task.is_recalled = true;
    for_each_unfinished(task, [&](std::uint32_t member, std::uint32_t worker) {
      Action& recall = log_.add(ActionKind::kRecall, tasks_.id_of(slot));
      recall.member = member;
      recall.worker = worker;
    });
  }
  finish_all();
}

ScopeId TaskGraph::open_scope(RunId run) {
  if (runs_.find(run) == nullptr) refuse("the run is done");
  return scopes_.id_of(scopes_.allocate());
}

void TaskGraph::close_scope(ScopeId scope) {
  Scope* found = scopes_.find(scope);
  if (found == nullptr || found->is_closed) refuse("the scope is closed");
  found->is_closed = true;
  close_if_empty(scope.slot);
}

void TaskGraph::close_if_empty(std::uint32_t scope) {
  if (!scopes_[scope].is_closed || scopes_[scope].unended != 0) return;
  log_.add(ActionKind::kScopeEmpty, scopes_.id_of(scope));
  scopes_.release(scope);
}

BufferId TaskGraph::open_buffer() { return buffers_.id_of(buffers_.allocate()); }

void TaskGraph::release_buffer(BufferId buffer) {
  Buffer* found = buffers_.find(buffer);
  if (found == nullptr || found->is_released) refuse("the buffer is released");
  found->is_released = true;
  close_if_idle(buffer.slot);
}

void TaskGraph::close_if_idle(std::uint32_t buffer) {
  if (!buffers_[buffer].is_released || buffers_[buffer].holders != 0) return;
  log_.add(ActionKind::kBufferIdle, buffers_.id_of(buffer));
  buffers_.release(buffer);
}

Submitted TaskGraph::submit(RunId run, ScopeId scope, const Spec& spec) {
  check(run, scope, spec);
  if (unreleased_ >= config_.capacity) return {true, {}};
  const std::uint32_t slot = new_task(run.slot, scope.slot, spec);
  const TaskId id = tasks_.id_of(slot);
  if (runs_[run.slot].result.was_cancelled) {
    settle(slot, Outcome::kCancelled);
  } else {
    order(slot, spec);
    const Task& task = tasks_[slot];
    if (task.is_poisoned) {
      settle(slot, Outcome::kPoisoned);
    } else if (!can_ever_start(task)) {
      settle(slot, Outcome::kLost);
    } else if (task.blockers == 0) {
      if (send_at_once(slot)) return {false, id};
      make_ready(slot);
    } else {
      return {false, id};
    }
  }
  finish_all();
  return {false, id};
}

void TaskGraph::check(RunId run, ScopeId scope, const Spec& spec) {
  const Run* found = runs_.find(run);
  if (found == nullptr || found->is_sealed) refuse("the run takes no more tasks");
  if (scope != ScopeId{}) {
    const Scope* open = scopes_.find(scope);
    if (open == nullptr || open->is_closed) refuse("the scope is closed");
  }
  check_targets(spec);
  for (const Access& access : spec.accesses) {
    if (access.region >= config_.regions) {
      refuse("there is no region " + std::to_string(access.region));
    }
    if (access.begin > access.end) refuse("a range ends before it begins");
  }
  for (const BufferId buffer : spec.buffers) {
    const Buffer* named = buffers_.find(buffer);
    if (named == nullptr || named->is_released) refuse("a buffer is released");
  }
}

void TaskGraph::check_targets(const Spec& spec) const {
  if (spec.kind == Kind::kSub) {
    if (spec.sub_members == 0 || spec.sub_members > config_.sub_workers) {
      refuse("a group of " + std::to_string(spec.sub_members) + " needs as many sub workers");
    }
  } else if (spec.kind == Kind::kNextLevel) {
    if (spec.targets.empty()) refuse("a task for chips names one");
    for (std::size_t i = 0; i < spec.targets.size(); ++i) {
      const std::uint32_t chip = spec.targets[i];
      if (chip >= config_.chips) refuse("there is no chip " + std::to_string(chip));
      const auto before = spec.targets.first(i);
      if (std::find(before.begin(), before.end(), chip) != before.end()) {
        refuse("a group has chip " + std::to_string(chip) + " twice");
      }
    }
  }
  if (spec.kind != Kind::kNextLevel && !spec.targets.empty()) refuse("only chips are chosen");
}

std::uint32_t TaskGraph::new_task(std::uint32_t run, std::uint32_t scope, const Spec& spec) {
  const std::uint32_t slot = tasks_.allocate();
  Task& task = tasks_[slot];
  Run& owner = runs_[run];
  task.kind = spec.kind;
  task.key = ready_key(spec.priority.value_or(owner.priority), ++submissions_);
  task.run = run;
  task.scope = scope;
  ++owner.unended;
  ++owner.result.tasks;
  ++unreleased_;
  if (scope != kNone) ++scopes_[scope].unended;
  link_to_run(slot);
  set_targets(slot, spec);
  if (!spec.buffers.empty()) hold(slot, spec.buffers);
  return slot;
}

void TaskGraph::set_targets(std::uint32_t slot, const Spec& spec) {
  const std::size_t members = spec.kind == Kind::kSub ? spec.sub_members : spec.targets.size();
  if (members == 1 && spec.kind == Kind::kNextLevel) tasks_[slot].worker = spec.targets[0];
  if (members <= 1) return;
  const std::uint32_t index = groups_.allocate();
  tasks_[slot].group = index;
  Group& group = groups_[index];
  group.members.assign(members, {});
  group.unfinished = static_cast<std::uint32_t>(members);
  group.was_skipped = false;
  group.failure = Outcome::kOk;
  for (std::size_t i = 0; i < spec.targets.size(); ++i) group.members[i].worker = spec.targets[i];
}

void TaskGraph::hold(std::uint32_t slot, std::span<const BufferId> buffers) {
  for (const BufferId buffer : buffers) {
    const std::uint32_t index = holds_.allocate();
    holds_[index] = {buffer.slot, tasks_[slot].first_hold};
    tasks_[slot].first_hold = index;
    ++buffers_[buffer.slot].holders;
  }
}

void TaskGraph::link_to_run(std::uint32_t slot) {
  Run& run = runs_[tasks_[slot].run];
  tasks_[slot].previous_of_run = run.last_task;
  if (run.last_task != kNone) {
    tasks_[run.last_task].next_of_run = slot;
  } else {
    run.first_task = slot;
  }
  run.last_task = slot;
}

void TaskGraph::order(std::uint32_t slot, const Spec& spec) {
  found_.clear();
  for (const Access& access : spec.accesses) ranges_.touch(slot, access, found_);
  for (const TaskId dep : spec.deps) {
    if (tasks_.find(dep) != nullptr) found_.push_back(dep.slot);
  }
  for (const std::uint32_t producer : found_) order_after(slot, producer);
}

void TaskGraph::order_after(std::uint32_t consumer, std::uint32_t producer) {
  Task& earlier = tasks_[producer];
  Task& later = tasks_[consumer];
  if (producer == consumer || earlier.last_consumer == later.key) return;
  earlier.last_consumer = later.key;
  if (earlier.is_doomed && earlier.run == later.run) poison(later, producer);
  if (!earlier.is_released) add_edge(producer, consumer);
}

void TaskGraph::add_edge(std::uint32_t producer, std::uint32_t consumer) {
  const std::uint32_t index = edges_.allocate();
  Task& earlier = tasks_[producer];
  Task& later = tasks_[consumer];
  const bool blocks = !is_sent_enough(earlier, later);
  edges_[index] = {producer, consumer, earlier.first_out, later.first_in, kNone, blocks};
  if (later.first_in != kNone) edges_[later.first_in].previous_in = index;
  earlier.first_out = index;
  later.first_in = index;
  if (blocks) ++later.blockers;
}

}  // namespace simpler::graph
