// The task graph over the children's rings: what a node's runs are driven by.
//
// Tasks go into the graph, and what it sends goes into the rings at once. Whoever waits drives: it
// takes the completions of all rings in batches, and sends what they release. One waiter drives at
// a time, the others sleep until their goal is reached or the driver leaves. While nobody waits,
// the engine's own thread drives, as long as there are tasks that have not been sent, runs with a
// deadline, or somebody to be told of an end; else it sleeps, and completions are taken by whoever
// comes next.
//
// Thread safety: all methods may be called from any thread.
// Ownership: borrows the children and their memory, which must outlive it. While it lives nobody
// else publishes to their rings.
// Fork: construct after the fork; it starts a thread.
// Failure: Error{kInvalidArgument} for a mistake of the caller, CallError for what else keeps a
// task from being taken (kBackPressure, kInterrupted, kClosed); nothing has happened then. What
// happens to a task is its outcome, never an exception.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "hierarchical/base/interrupt.h"
#include "hierarchical/graph/slab.h"
#include "hierarchical/graph/task_graph.h"
#include "hierarchical/sched/engine_records.h"
#include "hierarchical/workers/child_process.h"

namespace simpler {

struct TaskEngineConfig {
  std::uint32_t window = 8192;                   // unfinished tasks; submission waits beyond
  Nanoseconds patience_ns = Deadline::kForever;  // and fails when no task has ended for so long
  // Tasks sent to a sub worker and not ended. What one has not begun is taken back for another that
  // has nothing to do.
  std::uint32_t sub_depth = 32;
  std::uint32_t regions = 1;  // address spaces of graph::Access
  Nanoseconds spin_ns = 50'000;
};

// A task as its submitter knows it: a dependency of others, and its result if that is kept.
struct SubmittedTask {
  graph::TaskId id;
  KeptId kept;
};

// Work of the host itself, in the order of the bytes that it touches.
struct HostTask {
  SubmittedTask task;
  EngineRunId run;
};

// Called on any thread with the engine's lock held: must not call the engine.
class EngineListener {
 public:
  virtual ~EngineListener() = default;
  virtual void run_done(EngineRunId run) = 0;      // a watched one
  virtual void turn_came(graph::TaskId task) = 0;  // a watched one; or it never will
  // There is something for take_idle_buffers(); not told again before that has been called.
  virtual void buffers_idle() = 0;
};

class TaskEngine {
 public:
  // `children` are the chips, then the sub workers, in the order of their index. Without any the
  // engine only orders tasks of the host.
  TaskEngine(const TaskEngineConfig& config, TreeHeader<>& tree,
             std::vector<ChildProcess*> children, EngineListener* listener = nullptr);
  ~TaskEngine() { close(); }
  TaskEngine(const TaskEngine&) = delete;
  TaskEngine& operator=(const TaskEngine&) = delete;

  // --- runs ---

  // At its deadline what has not begun is cancelled.
  EngineRunId open_run(std::int16_t priority = 0, Deadline deadline = Deadline::never());
  void seal_run(EngineRunId run);    // no more tasks: it is done when they have ended
  void cancel_run(EngineRunId run);  // what has not begun never does; does not seal
  [[nodiscard]] bool poll_run(EngineRunId run);
  // Until it is done, which a run that is not sealed never is. kOk, kTimedOut or kInterrupted.
  TaskWait wait_run(EngineRunId run, Deadline deadline, Interrupt* interrupt);
  // As wait_run, spinning at most `bound`; false when it is not done by then.
  bool spin_run(EngineRunId run, Nanoseconds bound);
  // Uses the id up. REQUIRES: it is done.
  RunSummary take_run(EngineRunId run);
  // Has the listener told when it is done; true when it is already, and then nothing is told.
  bool watch_run(EngineRunId run);
  // Keeps a trace of the tasks submitted from now on; to be read when the run is done.
  std::shared_ptr<const RunTrace> trace_run(EngineRunId run);
  // Nobody will take the summary. The run itself goes on.
  void detach_run(EngineRunId run);

  graph::ScopeId open_scope(EngineRunId run);
  void close_scope(graph::ScopeId scope);
  graph::BufferId open_buffer();
  void release_buffer(graph::BufferId buffer);
  [[nodiscard]] std::size_t busy_buffers();  // released ones that tasks still name
  // Until another one has become idle, or none is busy. kOk, kTimedOut or kInterrupted.
  TaskWait wait_idle_buffers(Deadline deadline, Interrupt* interrupt);
  // Buffers that were released and that no task names any more, since the last call.
  std::vector<graph::BufferId> take_idle_buffers();

  // --- tasks ---

  SubmittedTask submit(EngineRunId run, graph::ScopeId scope, const TaskDesc& desc,
                       Deadline deadline, Interrupt* interrupt);
  // Without waiting: false when there is no room, or the arguments have to be staged first.
  bool poll_submit(EngineRunId run, graph::ScopeId scope, const TaskDesc& desc,
                   SubmittedTask& made);
  // `count` tasks in one go: describe(i) gives each its TaskDesc, valid until the next call, and
  // submitted(i, SubmittedTask) is told of it; both are called under the engine's lock. Arguments
  // up to kTaskInlineBytes only. When it throws, those before are submitted.
  template <typename Describe, typename Submitted>
  void submit_each(EngineRunId run, graph::ScopeId scope, std::size_t count, Describe describe,
                   Submitted submitted, Deadline deadline, Interrupt* interrupt) {
    Lock lock(mutex_);
    const Finish finish{*this};
    Deadline look = Deadline::at(0);
    for (std::size_t i = 0; i < count; ++i) {
      const TaskDesc& desc = describe(i);
      check_small(desc);
      submitted(i, submit_locked(lock, run, scope, desc, {}, deadline, interrupt));
      if (i % kBatch == kBatch - 1) end_batch(lock, look, interrupt);
    }
  }
  // The same for tasks of which none is kept.
  template <typename Describe>
  void submit_many(EngineRunId run, graph::ScopeId scope, std::size_t count, Describe describe,
                   Deadline deadline, Interrupt* interrupt) {
    submit_each(
        run, scope, count, describe, [](std::size_t, const SubmittedTask&) {}, deadline, interrupt);
  }

  [[nodiscard]] bool poll_task(const SubmittedTask& task);
  TaskWait wait_task(const SubmittedTask& task, Deadline deadline, Interrupt* interrupt);
  // As wait_task, spinning at most `bound`; false when it has not ended by then.
  bool spin_task(const SubmittedTask& task, Nanoseconds bound);
  // Uses the result up. REQUIRES: it is kept and has ended.
  TaskResult take_result(const SubmittedTask& task);
  // Nobody will take the result.
  void forget(const SubmittedTask& task);

  // In a run of its own, which needs no other call. `spec.kind` is kHost.
  HostTask submit_host(const graph::Spec& spec, Deadline deadline, Interrupt* interrupt);
  // It has succeeded; or, before its turn, it never will be done.
  void end_host(const HostTask& task);
  // A task of the host: its turn comes when all that it comes after has ended. False when it ended
  // without its turn, since it was poisoned or cancelled.
  TaskWait wait_turn(const SubmittedTask& task, Deadline deadline, Interrupt* interrupt,
                     bool& is_its_turn);
  // Has the listener told when its turn has come; true when it has, or never will, and then nothing
  // is told.
  bool watch_turn(const SubmittedTask& task);
  // `failure` is encoded; empty: it succeeded.
  void end_host_task(const SubmittedTask& task, std::span<const std::byte> failure);

  // --- workers ---

  // Once its ring has been failed: what it owes fails with `cause`.
  void worker_lost(int worker, const std::string& cause);
  // It has started again, with an open ring.
  void worker_back(int worker);

  // Everything ends: what has not begun is cancelled, what has is lost. Waiters return. Idempotent.
  void close();

  struct Counts {
    std::size_t unfinished = 0;  // tasks
    std::size_t unsent = 0;
    std::size_t records = 0;  // of tasks, runs and results
    std::uint64_t ended = 0;
    std::uint64_t takeovers = 0;  // how often the engine's own thread began to drive
  };
  [[nodiscard]] Counts counts();

 private:
  using Lock = std::unique_lock<std::mutex>;
  static constexpr std::size_t kBatch = 32;

  // Borrows a test of the engine's state.
  class Goal {
   public:
    template <typename Test>
    explicit Goal(const Test& test) noexcept
        : test_(&test), call_([](const void* it) { return (*static_cast<const Test*>(it))(); }) {}
    [[nodiscard]] bool holds() const { return call_(test_); }

   private:
    const void* test_;
    bool (*call_)(const void*);
  };
  struct Finish {  // also when a later submission throws
    TaskEngine& engine;
    ~Finish() { engine.finish_submit(); }
  };
  // What a goal looks at, so that its waiter can sleep through ends that cannot bring it about.
  struct Wanted {
    graph::TaskId task = {};
    std::uint32_t run = graph::kNone;  // slot of an EngineRun
    bool is_any_end = true;
  };
  struct Waiter {
    const Goal* goal = nullptr;
    Wanted wanted = {};
    std::condition_variable wake;
  };
  struct SentEntry {
    graph::TaskId task;
    std::uint32_t member = 0;
    bool is_taken_back = false;
  };
  struct Place {
    ChildProcess* child = nullptr;
    std::array<SentEntry, kTaskSlots> sent;  // by ring place
    std::string lost_cause;
    bool is_lost = false;
    bool is_dirty = false;  // filled entries are not flushed
  };

  // Submission; mutex_ held but in stage().
  void check_open() const;
  static void check_small(const TaskDesc& desc);
  std::vector<StagedArgs> stage(const TaskDesc& desc, Deadline deadline, Interrupt* interrupt);
  StagedArgs stage_one(const TaskDesc& desc, std::size_t member, Deadline deadline,
                       Interrupt* interrupt);
  SubmittedTask submit_locked(Lock& lock, EngineRunId run, graph::ScopeId scope,
                              const TaskDesc& desc, std::vector<StagedArgs> staged,
                              Deadline deadline, Interrupt* interrupt);
  bool submit_if_room(EngineRunId run, graph::ScopeId scope, const TaskDesc& desc,
                      std::vector<StagedArgs>& staged, SubmittedTask& out);
  void wait_room(Lock& lock, Deadline deadline, Interrupt* interrupt);
  void add_task(graph::TaskId id, EngineRunId run, const TaskDesc& desc, KeptId kept);
  void note_whom_it_is_lost_with(const graph::Spec& spec);
  void store_args(EngineTask& task, const TaskDesc& desc);
  void end_batch(Lock& lock, Deadline& look, Interrupt* interrupt);
  void finish_submit();

  // Progress; mutex_ held.
  bool pump();
  void cancel_late_runs();
  void note_idle(graph::BufferId buffer);
  void end_entry(std::uint32_t worker, std::uint64_t seq, const TaskView& view);
  void keep_end(EngineTask& task, std::uint32_t member, std::uint32_t worker, const TaskView& view);
  void settle();
  void act();  // on what the graph has said
  void send(const graph::Action& action);
  [[nodiscard]] TaskEntry entry_for(const graph::Action& action) const;
  [[nodiscard]] std::uint64_t mask_for(const graph::Action& action, std::uint64_t seq) const;
  void recall(const graph::Action& action);
  void share_sub_tasks();
  bool take_back_one();
  bool take_back(Place& place, std::uint64_t seq);
  bool hold_back(Place& place, std::uint64_t seq);
  std::vector<graph::TaskId> take_back_all(Place& place);
  void end_task(const graph::Action& action);
  void tell_turn(EngineTask& task);
  void note_failure(EngineTask& task, graph::Outcome outcome);
  [[nodiscard]] std::shared_ptr<const TaskFailure> failure_behind(const EngineTask& task,
                                                                  const graph::Action& end) const;
  void end_run(const graph::Action& action);
  void flush();

  // Of tasks with a trace_index, but for the first; mutex_ held.
  void trace_submitted(EngineTask& task);
  void trace_sent(const EngineTask& task, std::uint32_t member, std::uint32_t worker);
  void trace_entry(const EngineTask& task, std::uint32_t member, const TaskView& view);
  void trace_ended(const EngineTask& task, graph::Outcome outcome);
  TaskTrace& trace_of(const EngineTask& task);

  // Waiting; mutex_ held.
  bool spin(Lock& lock, const Goal& goal, Nanoseconds bound);
  TaskWait help(Lock& lock, const Goal& goal, Wanted wanted, Deadline deadline,
                Interrupt* interrupt);
  TaskWait help(Lock& lock, const Goal& goal, Deadline deadline, Interrupt* interrupt) {
    return help(lock, goal, Wanted{}, deadline, interrupt);
  }
  TaskWait help_until(Lock& lock, Waiter& me, Deadline deadline, Interrupt* interrupt);
  bool drive(Lock& lock, Deadline deadline, Interrupt* interrupt);
  bool stand_by(Lock& lock, Waiter& me, Deadline deadline, Interrupt* interrupt);
  [[nodiscard]] bool is_anything_new(std::uint32_t attention_seen) const noexcept;
  bool sleep_on_rings(Lock& lock, std::uint32_t attention_seen, Deadline until,
                      Interrupt* interrupt);
  void set_marks();
  [[nodiscard]] std::uint64_t mark_of(std::uint32_t worker);
  [[nodiscard]] bool must_hear_of(const SentEntry& entry);
  void recheck_marks();
  void wake_whom_it_concerns();
  void call_attention();
  void leave_seat();
  [[nodiscard]] bool needs_scheduler() const noexcept;
  void call_scheduler();
  void run_scheduler();

  EngineRun& run_of(EngineRunId run);
  [[nodiscard]] bool is_done(EngineRunId run) noexcept;
  KeptTask& kept_of(const SubmittedTask& task);
  [[nodiscard]] EngineTask* find_task(graph::TaskId id) noexcept;
  [[nodiscard]] bool has_ended(const SubmittedTask& task);
  void note_deadlines();
  void end_everything();

  const TaskEngineConfig config_;
  TreeHeader<>& tree_;
  EngineListener* const listener_;
  std::vector<Place> places_;  // by worker; the vector itself never changes
  AdaptiveSpin spin_;
  std::mutex mutex_;  // guards all below but attention_
  graph::TaskGraph graph_;
  std::vector<EngineTask> tasks_;  // by slot in the graph
  graph::Table<KeptTask> kept_;
  graph::Table<EngineRun> runs_;
  std::vector<std::uint32_t> run_by_graph_;  // slot of the EngineRun by slot in the graph
  std::vector<EngineRunId> timed_runs_;      // with a deadline, not done
  Nanoseconds next_deadline_ns_ = Deadline::kForever;
  std::vector<graph::BufferId> idle_buffers_;
  std::size_t busy_buffers_ = 0;  // released, not idle
  std::uint64_t idled_buffers_ = 0;
  std::size_t watched_runs_ = 0;          // not done
  bool is_idle_told_ = false;             // somebody knows of idle_buffers_
  const TaskDesc* fresh_desc_ = nullptr;  // of the task being submitted: its arguments
  graph::TaskId fresh_;
  std::uint32_t last_lost_ = graph::kNone;  // whom lost tasks were lost with
  std::size_t unsent_ = 0;
  std::uint64_t ended_ = 0;
  std::uint64_t takeovers_ = 0;
  bool is_closed_ = false;

  std::vector<Waiter*> waiters_;
  Waiter scheduler_;
  Waiter* driver_ = nullptr;  // nullptr, a waiter, or &scheduler_
  bool is_scheduler_called_ = false;
  std::vector<std::uint32_t> runs_ahead_;    // scratch of mark_of()
  bool are_marks_set_ = false;               // the driver sleeps, through ends that change nothing
  std::atomic<std::uint32_t> attention_{0};  // changes when the driver must look at its goal
  std::mutex join_mutex_;
  std::thread thread_;  // guarded by join_mutex_; last: it uses all of the above
};

}  // namespace simpler
