// Runs, results, workers that come and go, and the end of it all.
#include "hierarchical/sched/task_engine.h"

#include <algorithm>
#include <utility>

#include "hierarchical/base/error.h"
#include "hierarchical/ipc/error_codec.h"
#include "hierarchical/os/thread.h"
#include "hierarchical/workers/call_error.h"

namespace simpler {

using graph::kNone;

namespace {

graph::Config graph_config(const TaskEngineConfig& config,
                           const std::vector<ChildProcess*>& children) {
  graph::Config made;
  made.chips = static_cast<std::uint32_t>(
      std::ranges::count_if(children, [](const ChildProcess* child) { return child->is_chip; }));
  made.sub_workers = static_cast<std::uint32_t>(children.size()) - made.chips;
  made.ring_depth = kTaskSlots;
  made.sub_depth = config.sub_depth;
  made.regions = config.regions;
  made.capacity = config.window;
  return made;
}

[[noreturn]] void refuse(const std::string& why) { throw Error(ErrorCode::kInvalidArgument, why); }

}  // namespace

TaskEngine::TaskEngine(const TaskEngineConfig& config, TreeHeader<>& tree,
                       std::vector<ChildProcess*> children, EngineListener* listener)
    : config_(config),
      tree_(tree),
      listener_(listener),
      places_(children.size()),
      spin_(config.spin_ns),
      graph_(graph_config(config, children)) {
  if (config.sub_depth > kTaskSlots)
    refuse("a ring holds " + std::to_string(kTaskSlots) + " tasks");
  for (std::size_t i = 0; i < children.size(); ++i) places_[i].child = children[i];
  tasks_.reserve(config.window);
  thread_ = start_quiet_thread("simpler-sched", [this] { run_scheduler(); });
}

EngineRun& TaskEngine::run_of(EngineRunId run) {
  EngineRun* found = runs_.find(run);
  if (found == nullptr) refuse("no such run, or its summary has been taken");
  return *found;
}

EngineTask* TaskEngine::find_task(graph::TaskId id) noexcept {
  if (id.slot >= tasks_.size() || tasks_[id.slot].id != id) return nullptr;
  return &tasks_[id.slot];
}

EngineRunId TaskEngine::open_run(std::int16_t priority, Deadline deadline) {
  const Lock lock(mutex_);
  check_open();
  const std::uint32_t slot = runs_.allocate();
  EngineRun& run = runs_[slot];
  run.in_graph = graph_.open_run(priority);
  run.deadline_ns = deadline.ns();
  if (run_by_graph_.size() <= run.in_graph.slot) run_by_graph_.resize(run.in_graph.slot + 1, kNone);
  run_by_graph_[run.in_graph.slot] = slot;
  if (!deadline.is_never()) {
    timed_runs_.push_back(runs_.id_of(slot));
    note_deadlines();
    call_attention();  // a driver asleep has to wake sooner
    call_scheduler();
  }
  return runs_.id_of(slot);
}

void TaskEngine::seal_run(EngineRunId run) {
  const Lock lock(mutex_);
  EngineRun& found = run_of(run);
  if (found.is_sealed) return;
  found.is_sealed = true;
  graph_.seal_run(found.in_graph);
  settle();
}

void TaskEngine::cancel_run(EngineRunId run) {
  const Lock lock(mutex_);
  const EngineRun& found = run_of(run);
  if (found.is_done) return;
  graph_.cancel_run(found.in_graph);
  settle();
}

// Also of one whose summary another thread has taken.
bool TaskEngine::is_done(EngineRunId run) noexcept {
  const EngineRun* found = runs_.find(run);
  return found == nullptr || found->is_done;
}

bool TaskEngine::poll_run(EngineRunId run) {
  const Lock lock(mutex_);
  pump();
  return is_done(run);
}

TaskWait TaskEngine::wait_run(EngineRunId run, Deadline deadline, Interrupt* interrupt) {
  Lock lock(mutex_);
  const auto done = [this, run] { return is_done(run); };
  return help(lock, Goal(done), {{}, run.slot, false}, deadline, interrupt);
}

bool TaskEngine::spin_run(EngineRunId run, Nanoseconds bound) {
  Lock lock(mutex_);
  const auto done = [this, run] { return is_done(run); };
  return spin(lock, Goal(done), bound);
}

RunSummary TaskEngine::take_run(EngineRunId run) {
  const Lock lock(mutex_);
  EngineRun& found = run_of(run);
  if (!found.is_done) refuse("the run is not done");
  RunSummary summary = std::move(found.summary);
  runs_.release(run.slot);
  return summary;
}

bool TaskEngine::watch_run(EngineRunId run) {
  const Lock lock(mutex_);
  EngineRun& found = run_of(run);
  if (!found.is_done && !found.is_watched) {
    found.is_watched = true;
    ++watched_runs_;
    recheck_marks();
    call_scheduler();
  }
  return found.is_done;
}

void TaskEngine::detach_run(EngineRunId run) {
  const Lock lock(mutex_);
  EngineRun* found = runs_.find(run);
  if (found == nullptr) return;
  if (found->is_done) {
    runs_.release(run.slot);
  } else {
    found->is_detached = true;
  }
}

void TaskEngine::note_deadlines() {
  next_deadline_ns_ = Deadline::kForever;
  for (const EngineRunId run : timed_runs_) {
    next_deadline_ns_ = std::min(next_deadline_ns_, runs_[run.slot].deadline_ns);
  }
}

graph::ScopeId TaskEngine::open_scope(EngineRunId run) {
  const Lock lock(mutex_);
  return graph_.open_scope(run_of(run).in_graph);
}

void TaskEngine::close_scope(graph::ScopeId scope) {
  const Lock lock(mutex_);
  graph_.close_scope(scope);
  act();
}

graph::BufferId TaskEngine::open_buffer() {
  const Lock lock(mutex_);
  return graph_.open_buffer();
}

void TaskEngine::release_buffer(graph::BufferId buffer) {
  const Lock lock(mutex_);
  graph_.release_buffer(buffer);
  ++busy_buffers_;
  is_idle_told_ = true;  // should it be idle now, this caller is who takes it
  act();
  if (!idle_buffers_.empty()) {
    wake_whom_it_concerns();
    return;
  }
  is_idle_told_ = false;
  call_scheduler();
}

std::size_t TaskEngine::busy_buffers() {
  const Lock lock(mutex_);
  pump();
  return busy_buffers_;
}

TaskWait TaskEngine::wait_idle_buffers(Deadline deadline, Interrupt* interrupt) {
  Lock lock(mutex_);
  const std::uint64_t before = idled_buffers_;
  const auto has_one = [&] { return idled_buffers_ != before || busy_buffers_ == 0; };
  return help(lock, Goal(has_one), deadline, interrupt);
}

std::vector<graph::BufferId> TaskEngine::take_idle_buffers() {
  const Lock lock(mutex_);
  is_idle_told_ = true;
  pump();
  is_idle_told_ = false;
  return std::exchange(idle_buffers_, {});
}

KeptTask& TaskEngine::kept_of(const SubmittedTask& task) {
  KeptTask* found = kept_.find(task.kept);
  if (found == nullptr) refuse("the task's result is not kept, or has been taken");
  return *found;
}

bool TaskEngine::has_ended(const SubmittedTask& task) {
  const EngineTask* found = find_task(task.id);
  return found == nullptr || found->has_ended;
}

bool TaskEngine::poll_task(const SubmittedTask& task) {
  const Lock lock(mutex_);
  if (has_ended(task)) return true;
  pump();
  return has_ended(task);
}

TaskWait TaskEngine::wait_task(const SubmittedTask& task, Deadline deadline, Interrupt* interrupt) {
  Lock lock(mutex_);
  const auto ended = [this, &task] { return has_ended(task); };
  return help(lock, Goal(ended), {task.id, kNone, false}, deadline, interrupt);
}

bool TaskEngine::spin_task(const SubmittedTask& task, Nanoseconds bound) {
  Lock lock(mutex_);
  const auto ended = [this, &task] { return has_ended(task); };
  return spin(lock, Goal(ended), bound);
}

TaskResult TaskEngine::take_result(const SubmittedTask& task) {
  const Lock lock(mutex_);
  KeptTask& found = kept_of(task);
  if (!found.has_ended) refuse("the task has not ended");
  TaskResult result = std::move(found.result);
  kept_.release(task.kept.slot);
  return result;
}

void TaskEngine::forget(const SubmittedTask& task) {
  const Lock lock(mutex_);
  if (kept_.find(task.kept) == nullptr) return;
  if (EngineTask* found = find_task(task.id); found != nullptr) found->kept = {};
  kept_.release(task.kept.slot);
}

TaskWait TaskEngine::wait_turn(const SubmittedTask& task, Deadline deadline, Interrupt* interrupt,
                               bool& is_its_turn) {
  Lock lock(mutex_);
  const auto is_sent_or_over = [this, &task] {
    const EngineTask* found = find_task(task.id);
    return found == nullptr || found->has_ended || found->is_sent;
  };
  // Whatever it comes after is awaited anyway.
  const TaskWait how = help(lock, Goal(is_sent_or_over), {{}, kNone, false}, deadline, interrupt);
  is_its_turn = how == TaskWait::kOk && !has_ended(task);
  return how;
}

bool TaskEngine::watch_turn(const SubmittedTask& task) {
  const Lock lock(mutex_);
  EngineTask* found = find_task(task.id);
  if (found == nullptr || found->has_ended || found->is_sent) return true;
  found->is_watched = true;  // as one that is not sent it keeps the scheduler at work
  recheck_marks();
  call_scheduler();
  return false;
}

void TaskEngine::end_host_task(const SubmittedTask& task, std::span<const std::byte> failure) {
  const Lock lock(mutex_);
  EngineTask* found = find_task(task.id);
  if (found == nullptr || found->has_ended) return;  // lost when the engine was closed
  if (!found->is_host || !found->is_sent) refuse("it is not this task's turn");
  if (!failure.empty()) {
    found->failure = std::make_shared<TaskFailure>();
    found->failure->failure.assign(failure.begin(), failure.end());
  }
  graph_.finished(task.id, 0, failure.empty() ? graph::Report::kOk : graph::Report::kFailed);
  settle();
  call_scheduler();
}

HostTask TaskEngine::submit_host(const graph::Spec& spec, Deadline deadline, Interrupt* interrupt) {
  const EngineRunId run = open_run();
  TaskDesc desc;
  desc.spec = spec;
  try {
    const HostTask made{submit(run, {}, desc, deadline, interrupt), run};
    seal_run(run);
    detach_run(run);
    return made;
  } catch (...) {
    seal_run(run);
    detach_run(run);
    throw;
  }
}

void TaskEngine::end_host(const HostTask& task) {
  const Lock lock(mutex_);
  const EngineTask* found = find_task(task.task.id);
  if (found == nullptr || found->has_ended) return;
  if (found->is_sent) {
    graph_.finished(task.task.id, 0, graph::Report::kOk);
  } else {
    graph_.cancel_run(run_of(task.run).in_graph);
  }
  settle();
  call_scheduler();
}

void TaskEngine::worker_lost(int worker, const std::string& cause) {
  const Lock lock(mutex_);
  Place& place = places_.at(static_cast<std::size_t>(worker));
  if (place.is_lost) return;
  pump();  // what had ended before counts
  place.is_lost = true;
  place.lost_cause = cause;
  last_lost_ = static_cast<std::uint32_t>(worker);
  graph_.worker_lost(last_lost_, take_back_all(place));
  settle();
  call_scheduler();
}

void TaskEngine::worker_back(int worker) {
  const Lock lock(mutex_);
  Place& place = places_.at(static_cast<std::size_t>(worker));
  if (!place.is_lost || is_closed_) return;
  place.is_lost = false;
  graph_.worker_back(static_cast<std::uint32_t>(worker));
  settle();
}

void TaskEngine::close() {
  {
    const Lock lock(mutex_);
    if (!is_closed_) {
      pump();
      is_closed_ = true;
      end_everything();
      for (Waiter* waiter : waiters_) waiter->wake.notify_one();
      scheduler_.wake.notify_one();
      call_attention();
    }
  }
  const std::lock_guard lock(join_mutex_);
  if (thread_.joinable()) thread_.join();
}

void TaskEngine::end_everything() {
  for (std::uint32_t slot = 0; slot < runs_.slots(); ++slot) {
    if (runs_.is_used(slot) && !runs_[slot].is_done) graph_.cancel_run(runs_[slot].in_graph);
  }
  act();
  for (std::uint32_t worker = 0; worker < places_.size(); ++worker) {
    Place& place = places_[worker];
    if (place.is_lost) continue;
    place.is_lost = true;
    place.lost_cause = "the worker is closing or closed";
    last_lost_ = worker;
    graph_.worker_lost(worker);
    act();
  }
  for (const EngineTask& task : tasks_) {
    if (task.is_host && !task.has_ended) graph_.finished(task.id, 0, graph::Report::kSkipped);
  }
  act();
  for (std::uint32_t slot = 0; slot < runs_.slots(); ++slot) {
    EngineRun& run = runs_[slot];
    if (!runs_.is_used(slot) || run.is_sealed) continue;
    run.is_sealed = true;
    graph_.seal_run(run.in_graph);
    act();
  }
}

TaskEngine::Counts TaskEngine::counts() {
  const Lock lock(mutex_);
  return {graph_.unfinished_tasks(), unsent_,
          graph_.task_records() + kept_.in_use() + runs_.in_use(), ended_, takeovers_};
}

}  // namespace simpler
