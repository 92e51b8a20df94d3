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

std::string ActivityNames::request(ControlOp op, std::uint32_t arg) {
  if (op != ControlOp::EXTENSION)
    return std::string(control_op_name(static_cast<std::uint16_t>(op)));
  const std::lock_guard lock(mutex_);
  const auto found = extensions_.find(arg);
  return "extension '" + (found != extensions_.end() ? found->second : std::to_string(arg)) + "'";
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
  return {std::move(tree_), std::move(answers)};
}

void RunningTree::close(Deadline deadline, Interrupt* interrupt) {
  manager_.stop(deadline, interrupt);
  async_.finish();
}

void RunningTree::child_died(int worker, const std::string& how) {
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
  child.control.post(slot, manager_.next_request_id());
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
  child.control.post(slot, manager_.next_request_id());
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

std::uint64_t RunningTree::publish(ChildProcess& child, std::uint32_t callable_id,
                                   std::span<const std::byte> args, std::uint64_t after,
                                   Deadline deadline, Interrupt* interrupt) {
  std::uint64_t seq = 0;
  switch (child.ring.publish(callable_id, args, after, deadline, interrupt, seq)) {
    case TaskWait::kOk:
      return seq;
    case TaskWait::kPeerGone:
      throw manager_.gone_error(child.index);
    case TaskWait::kInterrupted:
      throw CallError(CallError::Kind::kInterrupted, child.index, "interrupted");
    case TaskWait::kTimedOut:
      break;
  }
  throw CallError(CallError::Kind::kBackPressure, child.index,
                  "the task ring of " + child.describe() + " stayed full (" +
                      std::to_string(kTaskSlots) + " tasks)");
}

bool RunningTree::wait_task(ChildProcess& child, std::uint64_t seq, Deadline deadline,
                            Interrupt* interrupt, TaskOutcome& out) {
  switch (child.ring.wait(seq, deadline, interrupt, out)) {
    case TaskWait::kOk:
      return true;
    case TaskWait::kTimedOut:
      return false;
    case TaskWait::kInterrupted:
      throw CallError(CallError::Kind::kInterrupted, child.index, "interrupted");
    case TaskWait::kPeerGone:
      break;
  }
  throw manager_.gone_error(child.index);
}

}  // namespace simpler
