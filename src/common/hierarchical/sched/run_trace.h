// When the tasks of one run were submitted, sent, begun and ended, for a picture of it.
//
// Thread safety: written under the engine's lock until the run is done; read after that.
#pragma once

#include <cstdint>
#include <vector>

#include "hierarchical/base/deadline.h"
#include "hierarchical/graph/action.h"

namespace simpler {

// Times are CLOCK_MONOTONIC; 0 is never.
struct TaskTrace {
  struct Member {
    std::uint32_t worker = graph::kNone;
    Nanoseconds sent_ns = 0;
    Nanoseconds started_ns = 0;
    Nanoseconds ended_ns = 0;
  };
  std::uint32_t callable_id = 0;
  graph::Outcome outcome = graph::Outcome::kOk;
  Nanoseconds submitted_ns = 0;
  Nanoseconds ended_ns = 0;  // as the engine learnt of it
  std::vector<Member> members;
  std::vector<std::uint32_t> producers;  // tasks of the run that it directly followed
};

struct RunTrace {
  Nanoseconds opened_ns = 0;
  std::vector<TaskTrace> tasks;  // in the order of their submission
};

}  // namespace simpler
