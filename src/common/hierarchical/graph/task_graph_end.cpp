// Ends and what follows from them. Nothing here recurses: tasks whose outcome is decided wait in
// `ended_` for their consequences, so chains of any length need no stack.
#include <algorithm>

#include "hierarchical/graph/task_graph.h"

namespace simpler::graph {

bool TaskGraph::finished(TaskId task, std::uint32_t member, Report report) {
  const Task* found = tasks_.find(task);
  if (found == nullptr || found->state != TaskState::kSent) return false;
  const Outcome outcome = report == Report::kFailed ? Outcome::kFailed : Outcome::kOk;
  if (!end_member(task.slot, member, outcome, report == Report::kSkipped)) return false;
  finish_all();
  return true;
}

void TaskGraph::worker_lost(std::uint32_t worker, std::span<const TaskId> not_begun) {
  Place& place = places_.at(worker);
  if (place.is_lost) return;
  for (const TaskId task : not_begun) {
    if (!can_take_back(task)) continue;
    tasks_[task.slot].worker = kNone;
    make_ready(task.slot);
  }
  if (worker >= config_.chips && place.outstanding > 1) sub_backlog_ -= place.outstanding - 1;
  place = {0, true};
  if (worker >= config_.chips) --subs_left_;
  chosen_.clear();
  for (std::uint32_t slot = 0; slot < tasks_.slots(); ++slot) {
    const Task& task = tasks_[slot];
    if (!tasks_.is_used(slot) || task.state == TaskState::kEnded) continue;
    bool is_hit = false;
    if (task.state == TaskState::kSent) {
      for_each_unfinished(task, [&](std::uint32_t, std::uint32_t on) { is_hit |= on == worker; });
    } else {
      is_hit = !can_ever_start(task);
    }
    if (is_hit) chosen_.push_back(slot);
  }
  std::sort(chosen_.begin(), chosen_.end(), [&](std::uint32_t a, std::uint32_t b) {
    return submission_of(tasks_[a].key) < submission_of(tasks_[b].key);
  });
  for (const std::uint32_t slot : chosen_) lose(slot, worker);
  finish_all();
}

void TaskGraph::lose(std::uint32_t slot, std::uint32_t worker) {
  Task& task = tasks_[slot];
  if (task.state != TaskState::kSent) {
    settle(slot, Outcome::kLost);
    return;
  }
  task.has_lost_member = true;
  std::uint32_t member = 0;
  for_each_unfinished(task, [&](std::uint32_t index, std::uint32_t on) {
    if (on == worker) member = index;
  });
  end_member(slot, member, Outcome::kLost, false);
  if (task.state == TaskState::kEnded && config_.send_ahead) block_followers(slot);
}

// A lost task that nobody has passed lets only those go on that have been sent.
void TaskGraph::block_followers(std::uint32_t slot) {
  if (tasks_[slot].was_passed) return;
  for (std::uint32_t edge = tasks_[slot].first_out; edge != kNone; edge = edges_[edge].next_out) {
    const std::uint32_t follower = edges_[edge].consumer;
    if (follower == kNone || edges_[edge].blocks) continue;
    Task& later = tasks_[follower];
    if (later.state != TaskState::kWaiting && later.state != TaskState::kReady) continue;
    edges_[edge].blocks = true;
    ++later.blockers;
    if (later.state == TaskState::kReady) {
      later.state = TaskState::kWaiting;
      forget_queued(follower);
    }
  }
}

void TaskGraph::worker_back(std::uint32_t worker) {
  Place& place = places_.at(worker);
  if (!place.is_lost) return;
  place.is_lost = false;
  if (worker >= config_.chips) ++subs_left_;
  touch_queue(std::min(worker, config_.chips));
  finish_all();
}

bool TaskGraph::end_member(std::uint32_t slot, std::uint32_t member, Outcome outcome,
                           bool was_skipped) {
  Task& task = tasks_[slot];
  if (task.group != kNone) return end_member_of_group(slot, member, outcome, was_skipped);
  if (member != 0) return false;
  leave_place(task, task.worker, outcome);
  settle(slot, was_skipped ? outcome_of_skip(task) : outcome);
  return true;
}

bool TaskGraph::end_member_of_group(std::uint32_t slot, std::uint32_t member, Outcome outcome,
                                    bool was_skipped) {
  Task& task = tasks_[slot];
  Group& group = groups_[task.group];
  if (member >= group.members.size() || group.members[member].has_ended) return false;
  group.members[member].has_ended = true;
  group.was_skipped |= was_skipped;
  if (outcome != Outcome::kOk && group.failure == Outcome::kOk) group.failure = outcome;
  if (outcome != Outcome::kOk || was_skipped) doom(slot);
  leave_place(task, group.members[member].worker, outcome);
  if (--group.unfinished != 0) return true;
  const bool only_skipped = group.was_skipped && group.failure == Outcome::kOk;
  settle(slot, only_skipped ? outcome_of_skip(task) : group.failure);
  return true;
}

// A member has ended on `worker`, which is kNone for the host.
void TaskGraph::leave_place(Task& task, std::uint32_t worker, Outcome outcome) {
  // Whoever tells of an end has come past everything the task follows.
  if (outcome != Outcome::kLost) task.was_passed = true;
  if (worker == kNone || places_[worker].is_lost) return;
  vacate_place(worker);
}

Outcome TaskGraph::outcome_of_skip(const Task& task) noexcept {
  return task.is_recalled && !task.is_poisoned ? Outcome::kCancelled : Outcome::kPoisoned;
}

// Decides and tells the outcome. The consequences follow in finish_all().
void TaskGraph::settle(std::uint32_t slot, Outcome outcome) {
  Task& task = tasks_[slot];
  const bool was_queued = task.state == TaskState::kReady;
  task.state = TaskState::kEnded;
  task.outcome = outcome;
  if (was_queued) forget_queued(slot);
  const TaskId id = tasks_.id_of(slot);
  Action& end = log_.add(ActionKind::kTaskEnded, id);
  end.outcome = outcome;
  if (outcome == Outcome::kPoisoned) {
    end.first = task.cause.slot;
    end.count = task.cause.generation;
  }
  leave_scope_and_buffers(task);
  count(runs_[task.run].result, id, outcome);
  --runs_[task.run].unended;
  note_done(task.run);
  if (outcome != Outcome::kOk) task.is_doomed = true;
  follow_up(slot);
}

// A member of a group did not succeed, so the group will not: its consumers need not wait for the
// other members to learn it.
void TaskGraph::doom(std::uint32_t slot) {
  tasks_[slot].is_doomed = true;
  follow_up(slot);
}

void TaskGraph::follow_up(std::uint32_t slot) {
  if (tasks_[slot].is_settling) return;
  tasks_[slot].is_settling = true;
  ended_.push_back(slot);
}

void TaskGraph::count(RunResult& result, TaskId task, Outcome outcome) {
  switch (outcome) {
    case Outcome::kOk:
      break;
    case Outcome::kFailed:
    case Outcome::kLost:
      if (result.failed++ == 0) result.cause = task;
      break;
    case Outcome::kPoisoned:
      ++result.poisoned;
      break;
    case Outcome::kCancelled:
      ++result.cancelled;
      break;
  }
}

void TaskGraph::leave_scope_and_buffers(Task& task) {
  if (task.scope != kNone) {
    --scopes_[task.scope].unended;
    close_if_empty(task.scope);
  }
  while (task.first_hold != kNone) {
    const std::uint32_t index = task.first_hold;
    const Hold hold = holds_[index];
    holds_.release(index);
    task.first_hold = hold.next;
    --buffers_[hold.buffer].holders;
    close_if_idle(hold.buffer);
  }
}

void TaskGraph::finish_all() {
  while (!ended_.empty() || !touched_queues_.empty()) {
    for (std::size_t i = 0; i < ended_.size(); ++i) finish_ended(ended_[i]);
    ended_.clear();
    pump();
  }
  for (const std::uint32_t run : done_runs_) finish_run(run);
  done_runs_.clear();
}

void TaskGraph::finish_ended(std::uint32_t slot) {
  Task& task = tasks_[slot];
  task.is_settling = false;
  if (task.is_doomed && !task.has_poisoned) {
    task.has_poisoned = true;
    poison_consumers(slot);
  }
  if (task.state != TaskState::kEnded) return;
  if (task.was_passed) detach_from_producers(task);
  if (task.first_in == kNone) release(slot);
}

void TaskGraph::poison_consumers(std::uint32_t slot) {
  const std::uint32_t run = tasks_[slot].run;
  for (std::uint32_t edge = tasks_[slot].first_out; edge != kNone; edge = edges_[edge].next_out) {
    const std::uint32_t consumer = edges_[edge].consumer;
    if (consumer == kNone) continue;
    Task& later = tasks_[consumer];
    if (later.run != run || later.state == TaskState::kEnded) continue;
    poison(later, slot);
    if (later.state != TaskState::kSent) settle(consumer, Outcome::kPoisoned);
  }
}

// Of several causes the first that is known stays.
void TaskGraph::poison(Task& task, std::uint32_t by) {
  if (task.is_poisoned) return;
  task.is_poisoned = true;
  const Task& source = tasks_[by];
  if (source.is_poisoned) {
    task.cause = source.cause;
  } else if (has_failed(source)) {
    task.cause = tasks_.id_of(by);
  }
}

// Itself, or a member of it so far; not one that only did not run.
bool TaskGraph::has_failed(const Task& task) const noexcept {
  const bool is_group = task.group != kNone;
  const Outcome outcome = is_group ? groups_[task.group].failure : task.outcome;
  return outcome == Outcome::kFailed || outcome == Outcome::kLost || task.outcome == Outcome::kLost;
}

void TaskGraph::detach_from_producers(Task& task) {
  for (std::uint32_t edge = task.first_in; edge != kNone; edge = edges_[edge].next_in) {
    edges_[edge].consumer = kNone;
  }
  task.first_in = kNone;
}

void TaskGraph::unlink_in(std::uint32_t edge) {
  const Edge& gone = edges_[edge];
  if (gone.next_in != kNone) edges_[gone.next_in].previous_in = gone.previous_in;
  if (gone.previous_in != kNone) {
    edges_[gone.previous_in].next_in = gone.next_in;
  } else {
    tasks_[gone.consumer].first_in = gone.next_in;
  }
}

// Nothing has to wait for the task any more.
void TaskGraph::release(std::uint32_t slot) {
  Task& task = tasks_[slot];
  task.is_released = true;
  --unreleased_;
  if (task.has_lost_member && config_.send_ahead) {
    log_.add(ActionKind::kPassed, tasks_.id_of(slot));
  }
  std::uint32_t edge = task.first_out;
  task.first_out = kNone;
  while (edge != kNone) {
    const Edge gone = edges_[edge];
    if (gone.consumer != kNone) {
      unlink_in(edge);
      Task& later = tasks_[gone.consumer];
      if (later.state == TaskState::kEnded) {
        if (later.first_in == kNone) follow_up(gone.consumer);
      } else if (gone.blocks && --later.blockers == 0) {
        make_ready(gone.consumer);
      }
    }
    edges_.release(edge);
    edge = gone.next_out;
  }
  const bool is_kept =
      task.outcome != Outcome::kOk && task.run != kNone && !runs_[task.run].result.was_cancelled;
  if (!is_kept) free_task(slot);
}

void TaskGraph::free_task(std::uint32_t slot) {
  ranges_.forget(slot);
  unlink_from_run(slot);
  if (tasks_[slot].group != kNone) groups_.release(tasks_[slot].group);
  tasks_.release(slot);
}

void TaskGraph::unlink_from_run(std::uint32_t slot) {
  Task& task = tasks_[slot];
  if (task.run == kNone) return;
  Run& run = runs_[task.run];
  (task.previous_of_run == kNone ? run.first_task : tasks_[task.previous_of_run].next_of_run) =
      task.next_of_run;
  (task.next_of_run == kNone ? run.last_task : tasks_[task.next_of_run].previous_of_run) =
      task.previous_of_run;
  task.run = kNone;
}

void TaskGraph::note_done(std::uint32_t run) {
  if (runs_[run].is_sealed && runs_[run].unended == 0) done_runs_.push_back(run);
}

// What is left of the run did not succeed; of that, what later tasks still wait for stays.
void TaskGraph::finish_run(std::uint32_t run) {
  std::uint32_t slot = runs_[run].first_task;
  while (slot != kNone) {
    const std::uint32_t next = tasks_[slot].next_of_run;
    if (tasks_[slot].is_released) {
      free_task(slot);
    } else {
      unlink_from_run(slot);
    }
    slot = next;
  }
  log_.add_result(runs_[run].result);
  runs_.release(run);
}

}  // namespace simpler::graph
