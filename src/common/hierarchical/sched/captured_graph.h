// The tasks of a run, recorded once, to be submitted again with other memory and scalars.
//
// Thread safety: one thread at a time builds it; launches from several threads take turns.
// Failure: Error{kInvalidArgument} for a mistake of the caller; a launch passes on what submitting
// throws, and then the tasks before are submitted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "hierarchical/sched/task_engine.h"

namespace simpler {

// What a launch puts in place of a parameter: a tensor's first byte and buffer, or a scalar.
struct ParameterValue {
  std::uint64_t bits = 0;  // the address, or the scalar's 8 bytes
  graph::BufferId buffer;
};

class CapturedGraph {
 public:
  static constexpr std::uint32_t kNoParameter = graph::kNone;

  struct Access {
    graph::Access range;  // from the parameter's first byte, if there is one (it may wrap below 0)
    std::uint32_t parameter = kNoParameter;
  };
  struct Buffer {
    graph::BufferId id;
    std::uint32_t parameter = kNoParameter;
  };
  // 8 bytes of a member's arguments: the parameter's bits plus `plus`.
  struct Patch {
    std::uint32_t member = 0;
    std::uint32_t place = 0;
    std::uint32_t parameter = 0;
    std::uint64_t plus = 0;
  };
  struct Node {
    std::uint32_t callable_id = 0;
    graph::Kind kind = graph::Kind::kNextLevel;
    std::uint32_t sub_members = 1;
    std::optional<std::int16_t> priority;
    std::vector<std::uint32_t> targets;
    std::vector<std::vector<std::byte>> args;  // of each member, or one for all
    std::vector<Access> accesses;
    std::vector<Buffer> buffers;
    std::vector<std::uint32_t> deps;  // nodes
    std::vector<Patch> patches;
    bool is_kept = false;  // a launch gives its task back
  };

  explicit CapturedGraph(std::uint32_t parameters) : parameters_(parameters) {}

  // Returns its index.
  std::uint32_t add(Node node);
  [[nodiscard]] const std::vector<Node>& nodes() const noexcept { return nodes_; }

  // Submits every node; returns the tasks of those kept, in order. REQUIRES: a value for each
  // parameter.
  std::vector<SubmittedTask> launch(TaskEngine& engine, EngineRunId run,
                                    std::span<const ParameterValue> values, Deadline deadline,
                                    Interrupt* interrupt);

  // (earlier, later) for each direct dependency, as the parameters are bound by `values`.
  [[nodiscard]] std::vector<std::pair<std::uint32_t, std::uint32_t>> edges(
      std::span<const ParameterValue> values, std::uint32_t chips, std::uint32_t sub_workers);

 private:
  struct Ready;  // the description of one node, as bound
  void check(const Node& node) const;
  void check_values(std::span<const ParameterValue> values) const;
  void patch(std::span<const ParameterValue> values);
  [[nodiscard]] bool is_small(const Node& node) const noexcept;

  const std::uint32_t parameters_;
  std::mutex mutex_;  // of launches: they patch the nodes' arguments
  std::vector<Node> nodes_;
};

}  // namespace simpler
