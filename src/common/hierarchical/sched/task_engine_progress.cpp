// What has ended goes into the graph, what the graph says goes into the rings.
#include <algorithm>
#include <bit>
#include <utility>

#include "hierarchical/ipc/error_codec.h"
#include "hierarchical/sched/task_engine.h"

namespace simpler {

using graph::kNone;
using graph::Outcome;

namespace {

graph::Report report_of(TaskStatus status) noexcept {
  switch (status) {
    case TaskStatus::kDone:
      return graph::Report::kOk;
    case TaskStatus::kSkipped:
      return graph::Report::kSkipped;
    default:
      return graph::Report::kFailed;
  }
}

}  // namespace

// True when a task has ended.
bool TaskEngine::pump() {
  if (next_deadline_ns_ != Deadline::kForever) cancel_late_runs();
  std::size_t taken = 0;
  for (std::uint32_t worker = 0; worker < places_.size(); ++worker) {
    taken += places_[worker].child->ring.take_ended(
        [&](std::uint64_t seq, const TaskView& view) { end_entry(worker, seq, view); });
  }
  if (taken == 0) return false;
  settle();
  return true;
}

// After every event but a submission, whose tasks go out in batches.
void TaskEngine::settle() {
  act();
  if (graph_.sub_backlog() != 0) share_sub_tasks();
  flush();
  wake_whom_it_concerns();
}

void TaskEngine::cancel_late_runs() {
  if (monotonic_now() < next_deadline_ns_) return;
  for (std::size_t i = 0; i < timed_runs_.size();) {
    EngineRun& run = runs_[timed_runs_[i].slot];
    if (!Deadline::at(run.deadline_ns).passed()) {
      ++i;
      continue;
    }
    run.summary.was_timed_out = true;
    timed_runs_.erase(timed_runs_.begin() + static_cast<std::ptrdiff_t>(i));
    graph_.cancel_run(run.in_graph);
  }
  note_deadlines();
  settle();
}

void TaskEngine::end_entry(std::uint32_t worker, std::uint64_t seq, const TaskView& view) {
  const SentEntry& sent = places_[worker].sent[(seq - 1) % kTaskSlots];
  if (sent.is_taken_back) {
    graph_.passed_over(worker);
    return;
  }
  EngineTask& task = tasks_[sent.task.slot];
  if (task.id != sent.task || task.has_ended) return;
  keep_end(task, sent.member, worker, view);
  if (task.trace_index != kNone) trace_entry(task, sent.member, view);
  graph_.finished(sent.task, sent.member, report_of(view.status));
}

// What the graph does not remember of it.
void TaskEngine::keep_end(EngineTask& task, std::uint32_t member, std::uint32_t worker,
                          const TaskView& view) {
  if (view.status == TaskStatus::kDone) {
    KeptTask* kept = kept_.find(task.kept);
    if (kept == nullptr) return;
    TaskResult& result = kept->result;
    if (!task.is_group) {
      result.worker = worker;
      result.bytes.assign(view.bytes.begin(), view.bytes.end());
      return;
    }
    if (result.members.size() <= member) result.members.resize(member + std::size_t{1});
    result.members[member].assign(view.bytes.begin(), view.bytes.end());
    return;
  }
  if (view.status == TaskStatus::kSkipped || task.failure != nullptr) return;
  task.worker = worker;
  task.failure = std::make_shared<TaskFailure>();
  if (view.status == TaskStatus::kFailed) {
    task.failure->failure.assign(view.bytes.begin(), view.bytes.end());
  } else {
    task.failure->failure =
        encode_failure({"ProtocolError", "the child's task result is out of bounds", "", false});
  }
}

void TaskEngine::act() {
  for (const graph::Action& action : graph_.log().actions()) {
    switch (action.kind) {
      case graph::ActionKind::kSend:
        send(action);
        break;
      case graph::ActionKind::kRecall:
        recall(action);
        break;
      case graph::ActionKind::kTaskEnded:
        end_task(action);
        break;
      case graph::ActionKind::kRunDone:
        end_run(action);
        break;
      case graph::ActionKind::kBufferIdle:
        note_idle(action.buffer());
        break;
      case graph::ActionKind::kScopeEmpty:
      case graph::ActionKind::kPassed:
        break;
    }
  }
  graph_.clear();
}

void TaskEngine::send(const graph::Action& action) {
  EngineTask& task = tasks_[action.slot];
  if (!task.is_sent) {
    task.is_sent = true;
    --unsent_;
  }
  if (action.worker == kNone) {  // wait_turn() sees it
    tell_turn(task);
    return;
  }
  Place& place = places_[action.worker];
  TaskRingParentEnd& ring = place.child->ring;
  TaskEntry entry = entry_for(action);
  entry.is_claimed = !place.child->is_chip;
  entry.is_timed = task.trace_index != kNone;
  if (entry.is_timed) trace_sent(task, action.member, action.worker);
  if (action.count != 0) entry.after_mask = mask_for(action, ring.next_seq());
  task.seq = ring.fill(std::move(entry));
  task.worker = action.worker;
  place.sent[(task.seq - 1) % kTaskSlots] = {action.task(), action.member, false};
  place.is_dirty = true;
}

TaskEntry TaskEngine::entry_for(const graph::Action& action) const {
  const EngineTask& task = tasks_[action.slot];
  const StoredArgs& stored = task.args;
  TaskEntry entry;
  entry.callable_id = task.callable_id;
  if (!stored.staged.empty()) {
    const std::size_t index = stored.staged.size() == 1 ? 0 : action.member;
    if (stored.staged[index].block != nullptr) {
      entry.args = stored.staged[index].bytes;
      entry.staged = stored.staged[index].block;
      return entry;
    }
  }
  if (fresh_desc_ != nullptr && action.task() == fresh_) {
    entry.args = fresh_desc_->member_args.empty() ? fresh_desc_->args
                                                  : fresh_desc_->member_args[action.member];
    return entry;
  }
  entry.args = stored.bytes;
  if (!stored.ends.empty()) {
    const std::size_t from = action.member == 0 ? 0 : stored.ends[action.member - 1];
    entry.args = entry.args.subspan(from, stored.ends[action.member] - from);
  }
  return entry;
}

// Producers elsewhere have ended, or the graph would not have sent it; those here are ahead in the
// ring, and not further back than it is deep.
std::uint64_t TaskEngine::mask_for(const graph::Action& action, std::uint64_t seq) const {
  std::uint64_t mask = 0;
  for (const graph::Producer& producer : graph_.log().producers(action)) {
    if (producer.must_succeed && producer.worker == action.worker)
      mask |= after_bit(seq, tasks_[producer.task.slot].seq);
  }
  return mask;
}

void TaskEngine::recall(const graph::Action& action) {
  if (action.worker == kNone) return;
  const Place& place = places_[action.worker];
  TaskRingParentEnd& ring = place.child->ring;
  const std::uint64_t next = ring.next_seq();
  for (std::uint64_t seq = next - (kTaskSlots - ring.room()); seq < next; ++seq) {
    const SentEntry& sent = place.sent[(seq - 1) % kTaskSlots];
    if (sent.task == action.task() && sent.member == action.member && !sent.is_taken_back)
      ring.recall(seq);
  }
}

// A sub worker without work gets what another has not begun.
void TaskEngine::share_sub_tasks() {
  while (graph_.sub_backlog() != 0 && take_back_one()) {
  }
}

// From whoever has the most; false when nobody idles, or nothing can be taken.
bool TaskEngine::take_back_one() {
  Place* fullest = nullptr;
  std::uint32_t most = 1;
  bool is_one_idle = false;
  for (std::uint32_t worker = 0; worker < places_.size(); ++worker) {
    Place& place = places_[worker];
    if (place.child->is_chip || place.is_lost) continue;
    const std::uint32_t load = graph_.outstanding(worker);
    is_one_idle = is_one_idle || load == 0;
    if (load <= most) continue;
    most = load;
    fullest = &place;
  }
  if (!is_one_idle || fullest == nullptr) return false;
  TaskRingParentEnd& ring = fullest->child->ring;
  const std::uint64_t next = ring.next_seq();
  for (std::uint64_t seq = next - 1; seq > next - (kTaskSlots - ring.room()); --seq) {
    if (take_back(*fullest, seq)) return true;
  }
  return false;
}

// Of a sub worker that is gone: others do what it had not begun.
std::vector<graph::TaskId> TaskEngine::take_back_all(Place& place) {
  std::vector<graph::TaskId> tasks;
  if (place.child->is_chip) return tasks;
  TaskRingParentEnd& ring = place.child->ring;
  const std::uint64_t next = ring.next_seq();
  for (std::uint64_t seq = next - (kTaskSlots - ring.room()); seq < next; ++seq) {
    if (hold_back(place, seq)) tasks.push_back(place.sent[(seq - 1) % kTaskSlots].task);
  }
  return tasks;
}

bool TaskEngine::take_back(Place& place, std::uint64_t seq) {
  if (!hold_back(place, seq)) return false;
  graph_.take_back(place.sent[(seq - 1) % kTaskSlots].task);
  act();
  return true;
}

// The task is as one that was never sent, but that the graph does not know it.
bool TaskEngine::hold_back(Place& place, std::uint64_t seq) {
  SentEntry& sent = place.sent[(seq - 1) % kTaskSlots];
  EngineTask& task = tasks_[sent.task.slot];
  if (sent.is_taken_back || !graph_.can_take_back(sent.task)) return false;
  std::span<const std::byte> args;
  if (!place.child->ring.take_back(seq, args)) return false;
  sent.is_taken_back = true;
  task.is_sent = false;
  ++unsent_;
  if (task.args.staged.empty()) {
    task.args.bytes.assign(args.begin(), args.end());
    task.args.ends.clear();
  }
  return true;
}

void TaskEngine::end_task(const graph::Action& action) {
  EngineTask& task = tasks_[action.slot];
  if (!task.is_sent) --unsent_;
  task.has_ended = true;
  tell_turn(task);
  if (task.trace_index != kNone) trace_ended(task, action.outcome);
  if (!task.args.staged.empty()) task.args.staged.clear();
  ++ended_;
  if (action.outcome == Outcome::kLost) task.worker = last_lost_;
  if (action.outcome == Outcome::kFailed || action.outcome == Outcome::kLost)
    note_failure(task, action.outcome);
  KeptTask* kept = kept_.find(task.kept);
  if (kept == nullptr) return;
  kept->has_ended = true;
  kept->result.outcome = action.outcome;
  if (action.outcome == Outcome::kOk) return;
  kept->result.worker = task.worker;
  kept->result.bytes.clear();
  kept->result.members.clear();
  kept->result.failure = failure_behind(task, action);
  kept->result.was_closed = is_closed_;
}

void TaskEngine::tell_turn(EngineTask& task) {
  if (!task.is_watched) return;
  task.is_watched = false;
  if (listener_ != nullptr) listener_->turn_came(task.id);
}

void TaskEngine::note_failure(EngineTask& task, Outcome outcome) {
  if (task.failure == nullptr) task.failure = std::make_shared<TaskFailure>();
  TaskFailure& failure = *task.failure;
  failure.task = task.id;
  failure.callable_id = task.callable_id;
  failure.worker = task.worker;
  failure.outcome = outcome;
  if (outcome == Outcome::kLost) {
    failure.failure.clear();
    failure.lost = places_[task.worker].lost_cause;
  }
  RunSummary& summary = runs_[task.run].summary;
  if (summary.failure == nullptr) summary.failure = task.failure;
}

// A task that did not succeed keeps its slot until its run is done.
std::shared_ptr<const TaskFailure> TaskEngine::failure_behind(const EngineTask& task,
                                                              const graph::Action& end) const {
  if (end.outcome != Outcome::kPoisoned) return task.failure;
  const graph::TaskId cause = end.cause();
  if (cause.slot >= tasks_.size() || tasks_[cause.slot].id != cause) return nullptr;
  return tasks_[cause.slot].failure;
}

void TaskEngine::note_idle(graph::BufferId buffer) {
  --busy_buffers_;
  ++idled_buffers_;
  idle_buffers_.push_back(buffer);
  if (is_idle_told_ || listener_ == nullptr) return;
  is_idle_told_ = true;
  listener_->buffers_idle();
}

void TaskEngine::end_run(const graph::Action& action) {
  const std::uint32_t slot = run_by_graph_[action.slot];
  EngineRun& run = runs_[slot];
  run.is_done = true;
  run.summary.counts = graph_.log().result(action);
  run.summary.was_closed = is_closed_;
  if (run.deadline_ns != Deadline::kForever) {
    std::erase(timed_runs_, runs_.id_of(slot));
    note_deadlines();
  }
  if (run.is_watched) {
    --watched_runs_;
    if (listener_ != nullptr) listener_->run_done(runs_.id_of(slot));
  }
  if (run.is_detached) runs_.release(slot);
}

void TaskEngine::flush() {
  for (Place& place : places_) {
    if (!place.is_dirty) continue;
    place.is_dirty = false;
    place.child->ring.flush();
  }
}

}  // namespace simpler
