// What the trace of a run is told. Runs without one pay a comparison at each step.
#include <algorithm>

#include "hierarchical/sched/task_engine.h"

namespace simpler {

using graph::kNone;

std::shared_ptr<const RunTrace> TaskEngine::trace_run(EngineRunId run) {
  const Lock lock(mutex_);
  EngineRun& found = run_of(run);
  if (found.trace == nullptr) {
    found.trace = std::make_shared<RunTrace>();
    found.trace->opened_ns = monotonic_now();
  }
  return found.trace;
}

TaskTrace& TaskEngine::trace_of(const EngineTask& task) {
  return runs_[task.run].trace->tasks[task.trace_index];
}

// Before anything has followed from its submission.
void TaskEngine::trace_submitted(EngineTask& task) {
  RunTrace& trace = *runs_[task.run].trace;
  task.trace_index = static_cast<std::uint32_t>(trace.tasks.size());
  TaskTrace& made = trace.tasks.emplace_back();
  made.callable_id = task.callable_id;
  made.submitted_ns = monotonic_now();
  graph_.each_producer(task.id, [&](graph::TaskId producer) {
    const EngineTask* earlier = find_task(producer);
    if (earlier != nullptr && earlier->run == task.run && earlier->trace_index != kNone)
      made.producers.push_back(earlier->trace_index);
  });
}

void TaskEngine::trace_sent(const EngineTask& task, std::uint32_t member, std::uint32_t worker) {
  TaskTrace& trace = trace_of(task);
  if (trace.members.size() <= member) trace.members.resize(member + std::size_t{1});
  trace.members[member] = {worker, monotonic_now(), 0, 0};
}

// What the child says lies between what this process knows.
void TaskEngine::trace_entry(const EngineTask& task, std::uint32_t member, const TaskView& view) {
  TaskTrace& trace = trace_of(task);
  if (member >= trace.members.size() || view.status == TaskStatus::kSkipped) return;
  TaskTrace::Member& place = trace.members[member];
  const Nanoseconds now = monotonic_now();
  place.started_ns = std::clamp(view.started_ns, place.sent_ns, now);
  place.ended_ns = std::clamp(view.ended_ns, place.started_ns, now);
}

void TaskEngine::trace_ended(const EngineTask& task, graph::Outcome outcome) {
  TaskTrace& trace = trace_of(task);
  trace.outcome = outcome;
  trace.ended_ns = monotonic_now();
}

}  // namespace simpler
