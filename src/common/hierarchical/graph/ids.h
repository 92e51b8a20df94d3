// Names of what the graph holds: a slot of a table, and the generation that tells its users apart.
//
// A generation is odd while its slot is in use, so a default id names nothing, ever.
#pragma once

#include <cstdint>

namespace simpler::graph {

inline constexpr std::uint32_t kNone = UINT32_MAX;

template <typename Noun>
struct Id {
  std::uint32_t slot = kNone;
  std::uint32_t generation = 0;

  friend bool operator==(const Id&, const Id&) = default;
};

struct Task;
struct Run;
struct Scope;
struct Buffer;

using TaskId = Id<Task>;
using RunId = Id<Run>;
using ScopeId = Id<Scope>;
using BufferId = Id<Buffer>;

}  // namespace simpler::graph
