// WorkerManager's way up: forks, START, and whoever answers it first.
#include <utility>

#include "hierarchical/base/error.h"
#include "hierarchical/ipc/bell.h"
#include "hierarchical/os/messages.h"
#include "hierarchical/os/thread.h"
#include "hierarchical/workers/worker_manager.h"

namespace simpler {

namespace {

// The pidfd of a process just forked; nullopt when somebody else has reaped it already (SIGCHLD
// ignored). A process that cannot be watched must not stay.
std::optional<Descriptor> watch_or_end(pid_t pid) {
  try {
    return open_pidfd(pid);
  } catch (...) {
    end_unwatched_child(pid);
    throw;
  }
}

}  // namespace

ChildPlan WorkerManager::plan_for(const std::string& process_name,
                                  std::vector<int> descriptors) const {
  ChildPlan plan;
  plan.process_name = process_name;
  plan.regions = regions_;
  plan.descriptors = std::move(descriptors);
  plan.descriptors.insert(plan.descriptors.end(), options_.keep_descriptors.begin(),
                          options_.keep_descriptors.end());
  plan.descriptors.push_back(parent_pidfd_.get());
  plan.parent_pidfd = parent_pidfd_.get();
  return plan;
}

void WorkerManager::post_start(ChildProcess& child, Deadline deadline) {
  ControlRequest request;
  request.op = ControlOp::START;
  request.deadline = deadline;
  request.notify_async = true;
  child.control.fill(kLifecycleSlot, request, nullptr);
  child.control.post(kLifecycleSlot, next_request_id());
}

void WorkerManager::fork_child(ChildProcess& child) {
  auto [ours, theirs] = make_socket_pair();
  const int log_socket = theirs.get();
  ChildPlan plan = plan_for(
      (child.is_chip ? "simpler-chip" : "simpler-sub") + std::to_string(child.index), {log_socket});
  plan.life = &child.life;
  const pid_t pid = spawn_child(hooks_, plan, [&] {
    return entry_(
        ChildContext{child, memory_, child.generation.load(), options_.spin_ns, log_socket});
  });
  auto pidfd = watch_or_end(pid);
  const std::lock_guard lock(mutex_);
  child.pid = pid;
  if (!pidfd) {
    child.state = ChildState::kDead;
    throw CallError(CallError::Kind::kStartup, child.index, child.describe() + " ended at once");
  }
  child.pidfd = std::move(*pidfd);
  supervisor_.watch({child.index, pid, child.pidfd.get(), std::move(ours), false, &child.life});
}

void WorkerManager::fork_spare() {
  auto [request_ours, request_theirs] = make_socket_pair();
  auto [report_ours, report_theirs] = make_pipe();

  SpareDuties duties;
  duties.request_socket = request_theirs.get();
  duties.report_pipe = report_theirs.get();
  duties.parent_pidfd = parent_pidfd_.get();
  std::vector<int> descriptors{duties.request_socket, duties.report_pipe};
  for (const auto& child : children_) {
    duties.children.push_back(child->pidfd.get());
    descriptors.push_back(child->pidfd.get());
  }
  duties.fork_child = [this](int index, std::uint64_t generation, int log_socket) {
    ChildProcess& dead = *children_[static_cast<std::size_t>(index)];
    ChildPlan plan = plan_for(
        (dead.is_chip ? "simpler-chip" : "simpler-sub") + std::to_string(index), {log_socket});
    plan.life = &dead.life;
    return spawn_child(hooks_, plan, [&] {
      return entry_(ChildContext{dead, memory_, generation, options_.spin_ns, log_socket});
    });
  };
  ChildPlan plan = plan_for("simpler-spare", descriptors);
  plan.watch_parent = false;
  const pid_t pid = spawn_child(hooks_, plan, [&] { return run_spare(duties); });
  auto pidfd = watch_or_end(pid);
  if (!pidfd) throw CallError(CallError::Kind::kStartup, -1, "the spare process ended at once");
  spare_.set(pid, std::move(*pidfd), std::move(request_ours), std::move(report_ours));
}

std::vector<std::vector<std::byte>> WorkerManager::start(
    ChildEntry entry, ForkHooks hooks, std::vector<const SharedRegion*> keep_regions,
    Deadline deadline, const std::function<std::unique_ptr<Interrupt>()>& make_interrupt) {
  entry_ = std::move(entry);
  hooks_ = std::move(hooks);
  regions_ = std::move(keep_regions);
  regions_.insert(regions_.end(), {&memory_.control(), &memory_.payload(), memory_.heap().get()});
  try {
    auto self = open_pidfd(current_pid());
    if (!self) throw Error(ErrorCode::kSystem, "pidfd_open of this process");
    parent_pidfd_ = std::move(*self);
    oom_kills_ = cgroup_oom_kills();
    {
      // Python's at-fork hooks swallow what a signal handler raises in them: signals come after.
      const SignalsBlocked quiet;
      for (const auto& child : children_) {
        post_start(*child, deadline);
        fork_child(*child);
      }
      fork_spare();
      supervisor_.start();
    }
    const std::unique_ptr<Interrupt> interrupt = make_interrupt();
    auto answers = wait_all_started(deadline, interrupt.get());
    wait_spare_ready(deadline, interrupt.get());
    supervisor_.watch_ends();
    const std::lock_guard lock(mutex_);
    spare_state_ = ChildState::kReady;
    return answers;
  } catch (...) {
    end_everything();
    throw;
  }
}

// It holds what this process listens on until then.
void WorkerManager::wait_spare_ready(Deadline deadline, Interrupt* interrupt) {
  while (!spare_.wait_ready(next_slice(deadline, interrupt))) {
    if (interrupt != nullptr && interrupt->pending()) {
      throw CallError(CallError::Kind::kInterrupted, -1, "interrupted while the spare started");
    }
    if (deadline.passed()) {
      throw CallError(CallError::Kind::kTimedOut, -1, "the spare was not ready in time", true);
    }
  }
}

// Whoever answers first is heard first: an error of the last child must not wait for a slow first
// one.
std::vector<std::vector<std::byte>> WorkerManager::wait_all_started(Deadline deadline,
                                                                    Interrupt* interrupt) {
  std::vector<std::vector<std::byte>> answers(children_.size());
  std::vector<bool> answered(children_.size(), false);
  for (;;) {
    bell_take(memory_.header().async_bell);
    const bool last_look = deadline.passed() || (interrupt != nullptr && interrupt->pending());
    bool all = true;
    for (std::size_t i = 0; i < children_.size(); ++i) {
      if (answered[i]) continue;
      if (!last_look && children_[i]->control.reply_due(kLifecycleSlot)) {
        all = false;
        continue;
      }
      answers[i] = wait_start(*children_[i], deadline, interrupt);
      answered[i] = true;
    }
    if (all) return answers;
    bell_sleep(memory_.header().async_bell, next_slice(deadline, interrupt));
  }
}

std::vector<std::byte> WorkerManager::wait_start(ChildProcess& child, Deadline deadline,
                                                 Interrupt* interrupt) {
  switch (child.control.wait_reply(kLifecycleSlot, deadline, interrupt)) {
    case CallWait::kOk:
      break;
    case CallWait::kPeerGone:
      throw gone_error(child.index);
    case CallWait::kInterrupted:
    case CallWait::kInterruptedStarted:
      throw CallError(CallError::Kind::kInterrupted, child.index,
                      "interrupted while " + child.describe() + " started");
    case CallWait::kTimedOut:
    case CallWait::kTimedOutStarted:
      throw CallError(CallError::Kind::kTimedOut, child.index,
                      child.describe() + " was not ready in time", true);
  }
  const ReplyView reply = child.control.read_reply(kLifecycleSlot);
  std::vector<std::byte> bytes(reply.bytes.begin(), reply.bytes.end());
  const ReplyStatus status = reply.status;
  child.control.release(kLifecycleSlot);
  if (status != ReplyStatus::kOk) throw CallError(child.index, decode_failure(bytes));
  if (interrupt != nullptr && interrupt->pending()) {  // the answer came while a signal did
    throw CallError(CallError::Kind::kInterrupted, child.index,
                    "interrupted while " + child.describe() + " started");
  }
  const std::lock_guard lock(mutex_);
  if (child.state == ChildState::kStarting) child.state = ChildState::kReady;
  return bytes;
}

}  // namespace simpler
