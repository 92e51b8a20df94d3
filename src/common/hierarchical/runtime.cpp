#include "hierarchical/runtime.h"

#include <algorithm>
#include <cstring>

#include "hierarchical/base/error.h"
#include "hierarchical/ipc/bell.h"
#include "hierarchical/workers/replies.h"

namespace simpler {

void ActivityNames::name_extension(std::uint32_t id, std::string name) {
  const std::lock_guard lock(mutex_);
  extensions_[id] = std::move(name);
}

void ActivityNames::name_callable(std::uint32_t id, std::string name) {
  const std::lock_guard lock(mutex_);
  callables_[id] = std::move(name);
}

void ActivityNames::name_provider(std::uint32_t id, std::string name) {
  const std::lock_guard lock(mutex_);
  providers_[id] = std::move(name);
}

std::string ActivityNames::request(ControlOp op, std::uint32_t arg) {
  const bool is_transfer = op == ControlOp::TRANSFER;
  if (op != ControlOp::EXTENSION && !is_transfer)
    return std::string(control_op_name(static_cast<std::uint16_t>(op)));
  const std::lock_guard lock(mutex_);
  const auto& names = is_transfer ? providers_ : extensions_;
  const auto found = names.find(arg);
  return (is_transfer ? "transfer by '" : "extension '") +
         (found != names.end() ? found->second : std::to_string(arg)) + "'";
}

std::string ActivityNames::task(std::uint32_t callable_id) {
  const std::lock_guard lock(mutex_);
  const auto found = callables_.find(callable_id);
  return "'" + (found != callables_.end() ? found->second : std::to_string(callable_id)) + "'";
}

RunningTree::RunningTree(TreeOptions options)
    : manager_(std::move(options), *this), async_(manager_) {}

RunningTree::~RunningTree() { close(Deadline::at(0)); }

TreeBuilder::Started TreeBuilder::start(
    RunningTree::ChildEntry entry, ForkHooks hooks, std::vector<const SharedRegion*> keep_regions,
    Deadline deadline, const std::function<std::unique_ptr<Interrupt>()>& make_interrupt) && {
  auto answers = tree_->manager().start(std::move(entry), std::move(hooks), std::move(keep_regions),
                                        deadline, make_interrupt);
  tree_->start_engine();
  return {std::move(tree_), std::move(answers)};
}

void RunningTree::start_engine() {
  TaskEngineConfig config;
  config.window = manager_.options().task_window;
  config.patience_ns = manager_.options().patience_ns;
  config.regions = static_cast<std::uint32_t>(manager_.chips()) + 1;
  config.spin_ns = manager_.options().spin_ns;
  std::vector<ChildProcess*> children;
  children.reserve(static_cast<std::size_t>(manager_.size()));
  for (int worker = 0; worker < manager_.size(); ++worker)
    children.push_back(&manager_.child(worker));
  EngineListener* const listener = this;
  engine_ = std::make_unique<TaskEngine>(config, manager_.memory().header(), children, listener);
  has_engine_.store(true, std::memory_order_seq_cst);
  // Whoever died before that was told to nobody.
  for (int worker = 0; worker < manager_.size(); ++worker) {
    const WorkerManager::ChildReport report = manager_.report(worker);
    if (report.state == ChildState::kDead) engine_->worker_lost(worker, report.first_cause);
  }
}

void RunningTree::close(Deadline deadline, Interrupt* interrupt) {
  if (engine_) engine_->close();
  manager_.stop(deadline, interrupt);
  async_.finish();
}

void RunningTree::run_done(EngineRunId run) {
  async_.push({AsyncEvent::Kind::kRunDone,
               -1,
               std::uint64_t{run.generation} << 32 | run.slot,
               {},
               {},
               nullptr});
}

void RunningTree::turn_came(graph::TaskId task) {
  async_.push({AsyncEvent::Kind::kTurnCame,
               -1,
               std::uint64_t{task.generation} << 32 | task.slot,
               {},
               {},
               nullptr});
}

void RunningTree::buffers_idle() {
  async_.push({AsyncEvent::Kind::kBuffersIdle, -1, 0, {}, {}, nullptr});
}

void RunningTree::child_died(int worker, const std::string& how) {
  if (has_engine_.load(std::memory_order_seq_cst)) engine_->worker_lost(worker, how);
  async_.push({AsyncEvent::Kind::kDied, worker, 0, {}, how, nullptr});
}

void RunningTree::child_logged(int worker, std::vector<std::byte> frame) {
  async_.push({AsyncEvent::Kind::kLog, worker, 0, std::move(frame), {}, nullptr});
}

void RunningTree::check_size(const ControlRequest& request) const {
  if (request.payload.size() <= manager_.options().max_payload) return;
  throw Error(ErrorCode::kInvalidArgument,
              "the payload of " + std::to_string(request.payload.size()) +
                  " bytes exceeds max_control_payload (" +
                  std::to_string(manager_.options().max_payload) + ")");
}

std::shared_ptr<StagedBlock> RunningTree::wait_stage(ChildProcess& child,
                                                     const ControlRequest& request,
                                                     Interrupt* interrupt) {
  std::shared_ptr<StagedBlock> staged;
  switch (child.arena.wait_stage(request.nbytes(), request.deadline, interrupt, staged)) {
    case ArenaWait::kOk:
      break;
    case ArenaWait::kClosed:
      throw manager_.gone_error(child.index);
    case ArenaWait::kInterrupted:
      throw CallError(CallError::Kind::kInterrupted, child.index, "interrupted");
    case ArenaWait::kTimedOut:
      throw manager_.timed_out_error(child, request, false);
  }
  std::byte* to = child.arena.at(staged->offset());
  if (!request.meta.empty()) std::memcpy(to, request.meta.data(), request.meta.size());
  if (!request.payload.empty())
    std::memcpy(to + request.meta.size(), request.payload.data(), request.payload.size());
  return staged;
}

int RunningTree::poll_post(ChildProcess& child, const ControlRequest& request) {
  if (request.nbytes() > std::min(kSlotInlineBytes, manager_.options().max_payload)) return -1;
  const int slot = child.control.poll_slot();
  if (slot < 0) return -1;
  child.control.fill(slot, request, nullptr);
  child.control.post_alone(slot, manager_.next_request_id());
  return slot;
}

int RunningTree::wait_post(ChildProcess& child, const ControlRequest& request,
                           Interrupt* interrupt) {
  check_size(request);
  std::shared_ptr<StagedBlock> staged;
  if (request.nbytes() > kSlotInlineBytes) staged = wait_stage(child, request, interrupt);
  int slot = -1;
  switch (child.control.wait_slot(request.deadline, interrupt, slot)) {
    case CallWait::kOk:
      break;
    case CallWait::kTimedOut:
      throw manager_.timed_out_error(child, request, false);
    case CallWait::kInterrupted:
      throw CallError(CallError::Kind::kInterrupted, child.index, "interrupted");
    default:
      throw manager_.gone_error(child.index);
  }
  child.control.fill(slot, request, std::move(staged));
  child.control.post_alone(slot, manager_.next_request_id());
  return slot;
}

void RunningTree::wait_reply(ChildProcess& child, int slot, const ControlRequest& request,
                             Interrupt* interrupt) {
  const CallWait how = child.control.wait_reply(slot, request.deadline, interrupt);
  switch (how) {
    case CallWait::kOk:
      return;
    case CallWait::kPeerGone:
      throw manager_.gone_error(child.index);
    case CallWait::kInterrupted:
    case CallWait::kInterruptedStarted:
      throw CallError(CallError::Kind::kInterrupted, child.index, "interrupted",
                      how == CallWait::kInterruptedStarted);
    case CallWait::kTimedOut:
    case CallWait::kTimedOutStarted:
      throw manager_.timed_out_error(child, request, how == CallWait::kTimedOutStarted);
  }
}

}  // namespace simpler
