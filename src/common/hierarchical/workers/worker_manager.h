// Brings the processes of a tree up, knows how each of them is, and takes them down again.
//
// Thread safety: start() once, then every method from any thread.
// Ownership: owns the shared memory, the children and the spare; the listener must outlive it.
// Fork: start() forks everything; only then do threads of ours begin.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "hierarchical/base/interrupt.h"
#include "hierarchical/workers/call_error.h"
#include "hierarchical/workers/child_process.h"
#include "hierarchical/workers/spare.h"
#include "hierarchical/workers/spawn.h"
#include "hierarchical/workers/supervisor.h"

namespace simpler {

struct TreeOptions {
  std::vector<int> device_ids;  // a chip child each
  int num_sub_workers = 0;
  std::size_t max_payload = std::size_t{64} << 20;
  std::size_t heap_bytes = std::size_t{1} << 30;
  Nanoseconds spin_ns = 50'000;
  std::uint32_t task_window = 8192;              // unfinished tasks; submission waits beyond
  Nanoseconds patience_ns = Deadline::kForever;  // how long it waits while none of them ends
  std::vector<int> keep_descriptors;
  std::string name = "simpler";
};

// What a child's entry function gets to work with.
struct ChildContext {
  ChildProcess& child;
  TreeMemory& memory;
  std::uint64_t generation;
  Nanoseconds spin_ns;
  int log_socket;
};

// Called on the supervisor's threads, without any lock of the manager.
class TreeListener {
 public:
  virtual ~TreeListener() = default;
  virtual void child_died(int worker, const std::string& how) = 0;
  virtual void child_logged(int worker, std::vector<std::byte> frame) = 0;
  // "extension 'save'", "task 17 (kernel 'gemm')": names for what describe_activity finds running.
  virtual std::string name_of_request(ControlOp op, std::uint32_t arg) = 0;
  virtual std::string name_of_task(std::uint32_t callable_id) = 0;
};

class WorkerManager : private SupervisorDelegate {
 public:
  using ChildEntry = std::function<int(const ChildContext&)>;

  WorkerManager(TreeOptions options, TreeListener& listener);
  ~WorkerManager() override;
  WorkerManager(const WorkerManager&) = delete;
  WorkerManager& operator=(const WorkerManager&) = delete;

  // Forks all children and the spare and waits until each has answered START. Returns the answers
  // in worker order; throws CallError after everything that was forked is gone (LC-1).
  std::vector<std::vector<std::byte>> start(
      ChildEntry entry, ForkHooks hooks, std::vector<const SharedRegion*> keep_regions,
      Deadline deadline, const std::function<std::unique_ptr<Interrupt>()>& make_interrupt);
  // LC-2: STOP, then SIGTERM, then SIGKILL. Idempotent; later callers wait for the first.
  void stop(Deadline deadline, Interrupt* interrupt = nullptr);
  void kill(int worker);
  // Returns the new START's answer. Throws Error{kInvalidArgument} for a live child, CallError
  // else.
  std::vector<std::byte> restart(int worker, Deadline deadline, Interrupt* interrupt);

  [[nodiscard]] int size() const noexcept { return static_cast<int>(children_.size()); }
  [[nodiscard]] int chips() const noexcept { return static_cast<int>(options_.device_ids.size()); }
  // Throws Error{kInvalidArgument} for an index out of range.
  ChildProcess& child(int worker);
  TreeMemory& memory() noexcept { return memory_; }
  const TreeOptions& options() const noexcept { return options_; }
  std::uint64_t next_request_id() noexcept {
    return next_id_.fetch_add(1, std::memory_order_relaxed);
  }
  [[nodiscard]] bool stopping() const noexcept { return stopping_.load(std::memory_order_seq_cst); }

  struct ChildReport {
    int worker;
    bool is_chip;
    int device_id;
    pid_t pid;
    ChildState state;
    std::uint64_t generation;
    std::string first_cause;
  };
  ChildReport report(int worker);
  ChildReport report_spare();
  // kDied with the first cause, or kClosed.
  CallError gone_error(int worker);
  // kTimedOut, saying what was waited for and what the child is doing instead.
  CallError timed_out_error(ChildProcess& child, const ControlRequest& request, bool started);
  // "running extension 'save' for 1.2 s", or "" when idle.
  std::string describe_activity(ChildProcess& child);

 private:
  void fork_child(ChildProcess& child);
  void fork_spare();
  ChildPlan plan_for(const std::string& process_name, std::vector<int> descriptors) const;
  void post_start(ChildProcess& child, Deadline deadline);
  std::vector<std::vector<std::byte>> wait_all_started(Deadline deadline, Interrupt* interrupt);
  void wait_spare_ready(Deadline deadline, Interrupt* interrupt);
  std::vector<std::byte> wait_start(ChildProcess& child, Deadline deadline, Interrupt* interrupt);
  void wait_all_released(ChildProcess& child, Deadline deadline, Interrupt* interrupt);
  void start_replacement(ChildProcess& child, Deadline deadline);
  void open_channel(ChildProcess& child);
  void end_everything() noexcept;
  bool wait_all_ended(Deadline deadline);
  void signal_remaining(int signal);

  void child_ended(int index, const ExitStatus& status) override;
  void child_reaped(int index) override;
  void child_logged(int index, std::vector<std::byte> frame) override;
  void spare_ended(const ExitStatus& status) override;
  void trim() override;

  const TreeOptions options_;
  TreeListener& listener_;
  TreeMemory memory_;
  std::vector<std::unique_ptr<ChildProcess>> children_;
  SpareHandle spare_;
  ChildEntry entry_;
  ForkHooks hooks_;
  std::vector<const SharedRegion*> regions_;
  Descriptor parent_pidfd_;
  std::optional<std::uint64_t> oom_kills_;
  std::atomic<std::uint64_t> next_id_{1};
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;  // the guarded fields of ChildProcess, spare_state_, stopped_
  std::condition_variable ended_;
  ChildState spare_state_ = ChildState::kStarting;
  std::string spare_cause_;
  bool stopped_ = false;
  std::mutex stop_mutex_;     // one stop() at a time
  std::mutex restart_mutex_;  // one restart() at a time
  Supervisor supervisor_;     // last: its thread ends before anything else here does
};

}  // namespace simpler
