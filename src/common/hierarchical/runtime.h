// A Worker's tree from the parent's side: TreeBuilder before the fork, RunningTree after it.
//
// Code that could start a thread of ours needs a RunningTree, and only TreeBuilder::start makes
// one: the fork rule as types.
//
// Thread safety: TreeBuilder one thread; RunningTree any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hierarchical/base/interrupt.h"
#include "hierarchical/ipc/control_parent.h"
#include "hierarchical/sched/async_calls.h"
#include "hierarchical/sched/task_engine.h"
#include "hierarchical/workers/call_error.h"
#include "hierarchical/workers/worker_manager.h"

namespace simpler {

// Names for what runs, given by the language binding and shown in errors and status.
class ActivityNames {
 public:
  void name_extension(std::uint32_t id, std::string name);
  void name_callable(std::uint32_t id, std::string name);
  void name_provider(std::uint32_t id, std::string name);
  std::string request(ControlOp op, std::uint32_t arg);
  std::string task(std::uint32_t callable_id);

 private:
  std::mutex mutex_;
  std::unordered_map<std::uint32_t, std::string> extensions_;  // guarded by mutex_
  std::unordered_map<std::uint32_t, std::string> callables_;   // guarded by mutex_
  std::unordered_map<std::uint32_t, std::string> providers_;   // guarded by mutex_
};

struct BroadcastReply {
  enum class Kind : std::uint8_t { kPending, kReply, kError };
  Kind kind = Kind::kPending;
  std::vector<std::byte> bytes;
  std::unique_ptr<CallError> error;
};

class RunningTree : private TreeListener, private EngineListener {
 public:
  explicit RunningTree(TreeOptions options);
  ~RunningTree() override;

  using ChildEntry = WorkerManager::ChildEntry;

  // --- one call, in steps, so that the caller can take the reply without another copy ---

  // Posts when nothing has to be waited for; -1 otherwise, and then wait_post does it.
  int poll_post(ChildProcess& child, const ControlRequest& request);
  // Throws CallError; Error{kInvalidArgument} for a request over the limit.
  int wait_post(ChildProcess& child, const ControlRequest& request, Interrupt* interrupt);
  // Returns with the reply in the slot, else throws CallError and the slot is no longer the
  // caller's.
  void wait_reply(ChildProcess& child, int slot, const ControlRequest& request,
                  Interrupt* interrupt);
  // Then take_reply(child, slot) of workers/replies.h, and child.control.release(slot).

  // --- all chips at once (CP-7) ---

  // `metas` is empty or one per chip. Throws CallError{kInterrupted} only; then one kEnded event
  // per chip reports the request's hold.
  std::vector<BroadcastReply> broadcast(const ControlRequest& request,
                                        std::span<const std::span<const std::byte>> metas,
                                        bool fail_fast, Interrupt* interrupt);

  AsyncCalls& async() noexcept { return async_; }
  TaskEngine& engine() noexcept { return *engine_; }
  ActivityNames& names() noexcept { return names_; }
  WorkerManager& manager() noexcept { return manager_; }

  // Reports a request's hold as ended: for a caller that cannot say itself how far the request got.
  void report_over(int worker, std::uint64_t hold);

  // Everything ends (LC-2); wakes whoever waits for events.
  void close(Deadline deadline, Interrupt* interrupt = nullptr);

 private:
  friend class TreeBuilder;

  void child_died(int worker, const std::string& how) override;
  void child_logged(int worker, std::vector<std::byte> frame) override;
  std::string name_of_request(ControlOp op, std::uint32_t arg) override {
    return names_.request(op, arg);
  }
  std::string name_of_task(std::uint32_t callable_id) override { return names_.task(callable_id); }
  void run_done(EngineRunId run) override;
  void turn_came(graph::TaskId task) override;
  void buffers_idle() override;
  void start_engine();

  void check_size(const ControlRequest& request) const;
  std::shared_ptr<StagedBlock> wait_stage(ChildProcess& child, const ControlRequest& request,
                                          Interrupt* interrupt);
  struct Reserved;  // the slots of one broadcast
  void reserve(Reserved& reserved, const ControlRequest& request,
               std::span<const std::span<const std::byte>> metas, Interrupt* interrupt);
  bool post_in_order(Reserved& reserved, Deadline deadline, Interrupt* interrupt);
  void end_one(Reserved& reserved, std::size_t i, const ControlRequest& request,
               Interrupt* interrupt);
  std::vector<BroadcastReply> broadcast_fail_fast(const ControlRequest& request,
                                                  std::span<const std::span<const std::byte>> metas,
                                                  Interrupt* interrupt);

  ActivityNames names_;
  // Made once everything is forked, and then there for good. Before the manager: the manager's
  // threads tell it of deaths, and end first.
  std::unique_ptr<TaskEngine> engine_;
  std::atomic<bool> has_engine_{false};
  WorkerManager manager_;
  AsyncCalls async_;
};

// Maps memory; starts nothing.
class TreeBuilder {
 public:
  explicit TreeBuilder(TreeOptions options)
      : tree_(std::make_unique<RunningTree>(std::move(options))) {}

  [[nodiscard]] const std::shared_ptr<SharedRegion>& heap() const noexcept {
    return tree_->manager().memory().heap();
  }
  ActivityNames& names() noexcept { return tree_->names(); }

  struct Started {
    std::unique_ptr<RunningTree> tree;
    std::vector<std::vector<std::byte>> answers;  // to START, in worker order
  };
  // Forks. Throws CallError or Error after everything forked is gone.
  Started start(RunningTree::ChildEntry entry, ForkHooks hooks,
                std::vector<const SharedRegion*> keep_regions, Deadline deadline,
                const std::function<std::unique_ptr<Interrupt>()>& make_interrupt) &&;

 private:
  std::unique_ptr<RunningTree> tree_;
};

}  // namespace simpler
