// From a description to a task in the graph.
#include <algorithm>
#include <cstring>
#include <utility>

#include "hierarchical/base/error.h"
#include "hierarchical/sched/task_engine.h"
#include "hierarchical/workers/call_error.h"

namespace simpler {

using graph::kNone;

namespace {

// An arena's blocks come back without a word to whoever waits for its own tasks to end.
constexpr Nanoseconds kArenaLookNs = 1'000'000;

std::size_t members_of(const graph::Spec& spec) noexcept {
  if (spec.kind == graph::Kind::kSub) return spec.sub_members;
  return spec.kind == graph::Kind::kNextLevel ? spec.targets.size() : 1;
}

bool is_large(std::span<const std::byte> args) noexcept { return args.size() > kTaskInlineBytes; }

bool has_large_args(const TaskDesc& desc) noexcept {
  return is_large(desc.args) || std::ranges::any_of(desc.member_args, is_large);
}

}  // namespace

void TaskEngine::check_open() const {
  if (is_closed_) throw CallError(CallError::Kind::kClosed, -1, "the worker is closing or closed");
}

void TaskEngine::check_small(const TaskDesc& desc) {
  if (!has_large_args(desc)) return;
  throw Error(ErrorCode::kInvalidArgument, "tasks submitted together have at most " +
                                               std::to_string(kTaskInlineBytes) +
                                               " bytes of arguments each");
}

// One block a member, or a single one when all have the same arguments. All children map all
// arenas, so a sub worker's arguments need not lie in its own.
std::vector<StagedArgs> TaskEngine::stage(const TaskDesc& desc, Deadline deadline,
                                          Interrupt* interrupt) {
  std::vector<StagedArgs> staged(std::max<std::size_t>(1, desc.member_args.size()));
  for (std::size_t i = 0; i < staged.size(); ++i) {
    const auto args = desc.member_args.empty() ? desc.args : desc.member_args[i];
    if (is_large(args)) staged[i] = stage_one(desc, i, deadline, interrupt);
  }
  return staged;
}

StagedArgs TaskEngine::stage_one(const TaskDesc& desc, std::size_t member, Deadline deadline,
                                 Interrupt* interrupt) {
  const auto args = desc.member_args.empty() ? desc.args : desc.member_args[member];
  std::size_t place = places_.size() - 1;  // a sub worker, if there is one
  if (member < desc.spec.targets.size() && desc.spec.targets[member] < places_.size())
    place = desc.spec.targets[member];
  std::uint64_t ended_seen = 0;
  Nanoseconds patient_until = 0;
  for (;;) {
    RequestArena& arena = places_[place].child->arena;
    if (args.size() > arena.capacity()) {
      throw Error(ErrorCode::kInvalidArgument,
                  "the task's arguments take " + std::to_string(args.size()) +
                      " bytes; the limit is " + std::to_string(arena.capacity()));
    }
    StagedArgs made;
    if (arena.wait_stage(args.size(), Deadline::at(0), nullptr, made.block) == ArenaWait::kOk) {
      std::byte* to = arena.at(made.block->offset());
      std::memcpy(to, args.data(), args.size());
      made.bytes = {to, args.size()};
      return made;
    }
    Lock lock(mutex_);
    check_open();
    const std::uint64_t before = ended_;
    const auto has_any_ended = [&] { return ended_ != before || is_closed_; };
    const Deadline look = Deadline::at(monotonic_now() + kArenaLookNs).earlier(deadline);
    if (help(lock, Goal(has_any_ended), look, interrupt) == TaskWait::kInterrupted)
      throw CallError(CallError::Kind::kInterrupted, static_cast<int>(place), "interrupted");
    if (ended_ != ended_seen || patient_until == 0) {
      ended_seen = ended_;
      patient_until = config_.patience_ns == Deadline::kForever
                          ? Deadline::kForever
                          : monotonic_now() + config_.patience_ns;
    }
    if (deadline.passed() || Deadline::at(patient_until).passed()) {
      throw CallError(CallError::Kind::kBackPressure, static_cast<int>(place),
                      "the arena for large arguments of " + places_[place].child->describe() +
                          " stayed full (" + std::to_string(arena.capacity()) +
                          " bytes): enlarge max_control_payload");
    }
    // The child may be dead, and its arena closed; any other does as well.
    place = (place + 1) % places_.size();
  }
}

SubmittedTask TaskEngine::submit(EngineRunId run, graph::ScopeId scope, const TaskDesc& desc,
                                 Deadline deadline, Interrupt* interrupt) {
  std::vector<StagedArgs> staged;
  if (has_large_args(desc)) staged = stage(desc, deadline, interrupt);
  Lock lock(mutex_);
  const SubmittedTask made =
      submit_locked(lock, run, scope, desc, std::move(staged), deadline, interrupt);
  finish_submit();
  return made;
}

bool TaskEngine::poll_submit(EngineRunId run, graph::ScopeId scope, const TaskDesc& desc,
                             SubmittedTask& made) {
  if (has_large_args(desc)) return false;
  std::vector<StagedArgs> none;
  const Lock lock(mutex_);
  if (!submit_if_room(run, scope, desc, none, made)) return false;
  finish_submit();
  return true;
}

SubmittedTask TaskEngine::submit_locked(Lock& lock, EngineRunId run, graph::ScopeId scope,
                                        const TaskDesc& desc, std::vector<StagedArgs> staged,
                                        Deadline deadline, Interrupt* interrupt) {
  SubmittedTask made;
  while (!submit_if_room(run, scope, desc, staged, made)) {
    wait_room(lock, deadline, interrupt);
  }
  return made;
}

// Takes `staged` only if there is room.
bool TaskEngine::submit_if_room(EngineRunId run, graph::ScopeId scope, const TaskDesc& desc,
                                std::vector<StagedArgs>& staged, SubmittedTask& out) {
  if (!desc.member_args.empty() && desc.member_args.size() != members_of(desc.spec)) {
    throw Error(ErrorCode::kInvalidArgument, "a group has as many arguments as members");
  }
  check_open();
  if (next_deadline_ns_ != Deadline::kForever) cancel_late_runs();
  const graph::Submitted made = graph_.submit(run_of(run).in_graph, scope, desc.spec);
  if (made.is_full) return false;
  KeptId kept;
  if (desc.is_kept) kept = kept_.id_of(kept_.allocate());
  add_task(made.task, run, desc, kept);
  EngineTask& task = tasks_[made.task.slot];
  task.args.staged = std::move(staged);
  if (runs_[task.run].trace != nullptr) trace_submitted(task);
  fresh_ = made.task;
  fresh_desc_ = &desc;
  act();
  fresh_desc_ = nullptr;
  if (!task.is_sent && !task.has_ended) store_args(task, desc);
  out = {made.task, kept};
  return true;
}

void TaskEngine::add_task(graph::TaskId id, EngineRunId run, const TaskDesc& desc, KeptId kept) {
  if (tasks_.size() <= id.slot) tasks_.resize(id.slot + std::size_t{1});
  EngineTask& task = tasks_[id.slot];
  task.id = id;
  task.run = run.slot;
  task.callable_id = desc.callable_id;
  task.worker = kNone;
  task.is_sent = false;
  task.has_ended = false;
  task.is_group = members_of(desc.spec) > 1;
  task.is_host = desc.spec.kind == graph::Kind::kHost;
  task.is_watched = false;
  task.kept = kept;
  task.failure.reset();
  task.trace_index = kNone;
  ++unsent_;
  if (last_lost_ != kNone) note_whom_it_is_lost_with(desc.spec);
}

// Should it be lost at once, since it can never start.
void TaskEngine::note_whom_it_is_lost_with(const graph::Spec& spec) {
  for (const std::uint32_t target : spec.targets) {
    if (places_[target].is_lost) last_lost_ = target;
  }
  if (spec.kind != graph::Kind::kSub) return;
  for (std::uint32_t worker = 0; worker < places_.size(); ++worker) {
    if (places_[worker].is_lost && !places_[worker].child->is_chip) last_lost_ = worker;
  }
}

void TaskEngine::store_args(EngineTask& task, const TaskDesc& desc) {
  StoredArgs& args = task.args;
  args.bytes.clear();
  args.ends.clear();
  if (desc.member_args.empty()) {
    if (args.staged.empty()) args.bytes.assign(desc.args.begin(), desc.args.end());
    return;
  }
  for (const std::span<const std::byte> one : desc.member_args) {
    if (!is_large(one)) args.bytes.insert(args.bytes.end(), one.begin(), one.end());
    args.ends.push_back(args.bytes.size());
  }
}

// Waits for more than one place, so that a submitter and its tasks do not go in lock-step.
void TaskEngine::wait_room(Lock& lock, Deadline deadline, Interrupt* interrupt) {
  const std::size_t wanted =
      std::max<std::size_t>(1, std::min<std::size_t>(64, config_.window / 8));
  flush();
  const auto has_room = [&] {
    return is_closed_ || graph_.unfinished_tasks() + wanted <= config_.window;
  };
  for (;;) {
    const std::uint64_t before = ended_;
    const Deadline until =
        config_.patience_ns == Deadline::kForever
            ? deadline
            : deadline.earlier(Deadline::at(monotonic_now() + config_.patience_ns));
    switch (help(lock, Goal(has_room), until, interrupt)) {
      case TaskWait::kOk:
        return;
      case TaskWait::kInterrupted:
        throw CallError(CallError::Kind::kInterrupted, -1, "interrupted");
      default:
        break;
    }
    if (ended_ != before && !deadline.passed()) continue;
    throw CallError(CallError::Kind::kBackPressure, -1,
                    "the task table stayed full (" + std::to_string(config_.window) +
                        " unfinished tasks): enlarge max_pending_tasks");
  }
}

void TaskEngine::end_batch(Lock& lock, Deadline& look, Interrupt* interrupt) {
  flush();
  pump();
  lock.unlock();  // others' turn
  if (interrupt != nullptr && look.passed()) {
    if (interrupt->pending()) {
      lock.lock();
      throw CallError(CallError::Kind::kInterrupted, -1, "interrupted");
    }
    look = next_slice(Deadline::never(), interrupt);
  }
  lock.lock();
}

void TaskEngine::finish_submit() {
  flush();
  if (unsent_ != 0) recheck_marks();
  call_scheduler();
}

}  // namespace simpler
