#include "hierarchical/sched/captured_graph.h"

#include <algorithm>
#include <cstring>

#include "hierarchical/base/error.h"

namespace simpler {

namespace {

[[noreturn]] void refuse(const char* why) { throw Error(ErrorCode::kInvalidArgument, why); }

}  // namespace

// Keeps its memory from node to node.
struct CapturedGraph::Ready {
  TaskDesc desc;
  std::vector<graph::Access> accesses;
  std::vector<graph::BufferId> buffers;
  std::vector<graph::TaskId> deps;
  std::vector<std::span<const std::byte>> members;

  void set(const Node& node, std::span<const ParameterValue> values,
           std::span<const graph::TaskId> tasks) {
    accesses.clear();
    for (const Access& access : node.accesses) {
      graph::Access range = access.range;
      if (access.parameter != kNoParameter) {
        range.begin += values[access.parameter].bits;
        range.end += values[access.parameter].bits;
      }
      accesses.push_back(range);
    }
    buffers.clear();
    for (const Buffer& buffer : node.buffers) {
      buffers.push_back(buffer.parameter == kNoParameter ? buffer.id
                                                         : values[buffer.parameter].buffer);
    }
    deps.clear();
    for (const std::uint32_t dep : node.deps) deps.push_back(tasks[dep]);
    members.clear();
    if (node.args.size() > 1) {
      for (const auto& member : node.args) members.emplace_back(member);
    }
    desc.callable_id = node.callable_id;
    desc.args = node.args.front();
    desc.member_args = members;
    desc.is_kept = node.is_kept;
    desc.spec.kind = node.kind;
    desc.spec.targets = node.targets;
    desc.spec.sub_members = node.sub_members;
    desc.spec.accesses = accesses;
    desc.spec.deps = deps;
    desc.spec.buffers = buffers;
    desc.spec.priority = node.priority;
  }
};

std::uint32_t CapturedGraph::add(Node node) {
  check(node);
  nodes_.push_back(std::move(node));
  return static_cast<std::uint32_t>(nodes_.size() - 1);
}

void CapturedGraph::check(const Node& node) const {
  const std::size_t members =
      node.kind == graph::Kind::kSub ? node.sub_members : node.targets.size();
  if (node.kind == graph::Kind::kHost) refuse("work of the host is not captured");
  if (node.args.empty() || (node.args.size() != 1 && node.args.size() != members))
    refuse("a group has as many arguments as members");
  for (const Access& access : node.accesses) {
    if (access.parameter != kNoParameter && access.parameter >= parameters_)
      refuse("there is no such parameter");
  }
  for (const Buffer& buffer : node.buffers) {
    if (buffer.parameter != kNoParameter && buffer.parameter >= parameters_)
      refuse("there is no such parameter");
  }
  for (const std::uint32_t dep : node.deps) {
    if (dep >= nodes_.size()) refuse("a dependency is an earlier task of the same graph");
  }
  for (const Patch& patch : node.patches) {
    if (patch.parameter >= parameters_ || patch.member >= node.args.size() ||
        patch.place + sizeof(std::uint64_t) > node.args[patch.member].size()) {
      refuse("a patch beyond the arguments or the parameters");
    }
  }
}

void CapturedGraph::check_values(std::span<const ParameterValue> values) const {
  if (values.size() != parameters_) refuse("a launch has a value for each parameter");
}

void CapturedGraph::patch(std::span<const ParameterValue> values) {
  for (Node& node : nodes_) {
    for (const Patch& patch : node.patches) {
      const std::uint64_t bits = values[patch.parameter].bits + patch.plus;
      std::memcpy(node.args[patch.member].data() + patch.place, &bits, sizeof bits);
    }
  }
}

bool CapturedGraph::is_small(const Node& node) const noexcept {
  return std::ranges::all_of(node.args,
                             [](const auto& args) { return args.size() <= kTaskInlineBytes; });
}

std::vector<SubmittedTask> CapturedGraph::launch(TaskEngine& engine, EngineRunId run,
                                                 std::span<const ParameterValue> values,
                                                 Deadline deadline, Interrupt* interrupt) {
  check_values(values);
  const std::lock_guard lock(mutex_);
  patch(values);
  std::vector<graph::TaskId> tasks(nodes_.size());
  std::vector<SubmittedTask> kept;
  Ready ready;
  const auto note = [&](std::size_t index, const SubmittedTask& task) {
    tasks[index] = task.id;
    if (nodes_[index].is_kept) kept.push_back(task);
  };
  std::size_t next = 0;
  while (next < nodes_.size()) {
    std::size_t end = next;
    while (end < nodes_.size() && is_small(nodes_[end])) ++end;
    const std::size_t from = next;
    engine.submit_each(
        run, {}, end - from,
        [&](std::size_t i) -> const TaskDesc& {
          ready.set(nodes_[from + i], values, tasks);
          return ready.desc;
        },
        [&](std::size_t i, const SubmittedTask& task) { note(from + i, task); }, deadline,
        interrupt);
    next = end;
    if (next == nodes_.size()) break;
    ready.set(nodes_[next], values, tasks);
    note(next, engine.submit(run, {}, ready.desc, deadline, interrupt));
    ++next;
  }
  return kept;
}

std::vector<std::pair<std::uint32_t, std::uint32_t>> CapturedGraph::edges(
    std::span<const ParameterValue> values, std::uint32_t chips, std::uint32_t sub_workers) {
  check_values(values);
  graph::Config config;
  config.chips = chips;
  config.sub_workers = sub_workers;
  config.regions = chips + 1;
  config.capacity = static_cast<std::uint32_t>(nodes_.size()) + 1;
  graph::TaskGraph graph(config);
  const graph::RunId run = graph.open_run();
  std::vector<graph::TaskId> tasks;
  std::vector<std::uint32_t> by_slot(nodes_.size() + 1);
  std::vector<std::pair<std::uint32_t, std::uint32_t>> found;
  Ready ready;
  for (std::uint32_t i = 0; i < nodes_.size(); ++i) {
    ready.set(nodes_[i], values, tasks);
    graph::Spec spec = ready.desc.spec;
    spec.buffers = {};
    tasks.push_back(graph.submit(run, {}, spec).task);
    by_slot.at(tasks.back().slot) = i;
    graph.each_producer(tasks.back(), [&](graph::TaskId producer) {
      found.emplace_back(by_slot[producer.slot], i);
    });
    graph.clear();
  }
  return found;
}

}  // namespace simpler
