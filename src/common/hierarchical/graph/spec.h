// What a caller says of a task when submitting it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "hierarchical/graph/ids.h"

namespace simpler::graph {

// kWrite is OUT and INOUT, which order alike; an access without dependencies is not passed at all.
enum class Mode : std::uint8_t { kRead, kWrite };

// Bytes [begin, end) of one address space. An empty range touches nothing.
struct Access {
  std::uint32_t region = 0;
  Mode mode = Mode::kRead;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

enum class Kind : std::uint8_t {
  kNextLevel,  // on chosen chips
  kSub,        // on any sub workers
  kHost,       // done by the caller itself: a copy or a transfer, ordered like a task
};

struct Spec {
  Kind kind = Kind::kNextLevel;
  std::span<const std::uint32_t> targets = {};  // kNextLevel: one chip, or those of a group
  std::uint32_t sub_members = 1;                // kSub: more than one is a group
  std::span<const Access> accesses = {};
  std::span<const TaskId> deps = {};       // explicit edges; an id whose task is gone is satisfied
  std::span<const BufferId> buffers = {};  // kept from becoming idle until the task has ended
  std::optional<std::int16_t> priority = std::nullopt;  // that of the run, if not given
};

}  // namespace simpler::graph
