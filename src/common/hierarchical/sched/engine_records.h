// What the engine keeps of tasks and runs beside their place in the graph.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "hierarchical/base/deadline.h"
#include "hierarchical/graph/action.h"
#include "hierarchical/graph/ids.h"
#include "hierarchical/graph/spec.h"
#include "hierarchical/ipc/request_arena.h"
#include "hierarchical/sched/run_trace.h"

namespace simpler {

struct TaskDesc {
  std::uint32_t callable_id = 0;
  graph::Spec spec = {};
  // Encoded (task_codec.h); copied at submit. For a group either of each member or the same for
  // all. A task of the host has none.
  std::span<const std::byte> args = {};
  std::span<const std::span<const std::byte>> member_args = {};
  bool is_kept = false;  // its result will be taken or forgotten
};

// How a task failed or was lost.
struct TaskFailure {
  graph::TaskId task;
  std::uint32_t callable_id = 0;
  std::uint32_t worker = graph::kNone;  // where it failed first
  graph::Outcome outcome = graph::Outcome::kFailed;
  std::vector<std::byte> failure;  // kFailed: encoded (error_codec.h)
  std::string lost;                // kLost: how the worker died
};

struct TaskResult {
  graph::Outcome outcome = graph::Outcome::kOk;
  std::uint32_t worker = graph::kNone;          // where it ran, or where it failed first
  std::vector<std::byte> bytes;                 // a single: its result
  std::vector<std::vector<std::byte>> members;  // a group: the results
  // Its own, or the one that it was poisoned by.
  std::shared_ptr<const TaskFailure> failure;
  bool was_closed = false;  // ended by close()
};

struct RunSummary {
  graph::RunResult counts;
  std::shared_ptr<const TaskFailure> failure;  // the first, if there was one
  bool was_timed_out = false;                  // cancelled at its deadline
  bool was_closed = false;                     // ended by close()
};

// --- internal to the engine ---

// A task whose result is wanted.
struct KeptTask {
  std::uint32_t generation = 0;
  bool has_ended = false;
  TaskResult result;
};
using KeptId = graph::Id<KeptTask>;

struct EngineRun {
  std::uint32_t generation = 0;
  graph::RunId in_graph;
  bool is_sealed = false;
  bool is_done = false;
  bool is_watched = false;   // the listener is told when it is done
  bool is_detached = false;  // nobody will take the summary
  Nanoseconds deadline_ns = Deadline::kForever;
  RunSummary summary;
  std::shared_ptr<RunTrace> trace;  // nullptr: none is kept
};
using EngineRunId = graph::Id<EngineRun>;

// Arguments that are too large for a ring's entry lie in an arena from the start.
struct StagedArgs {
  std::shared_ptr<StagedBlock> block;  // nullptr: not staged
  std::span<const std::byte> bytes;
};

// The arguments of a task that has not been sent, by member; keeps its memory.
struct StoredArgs {
  std::vector<std::byte> bytes;
  std::vector<std::size_t> ends;   // of each member's; empty: all members have the same
  std::vector<StagedArgs> staged;  // empty: none of them
};

// By its slot in the graph.
struct EngineTask {
  graph::TaskId id;
  std::uint32_t run = graph::kNone;  // slot of an EngineRun
  std::uint32_t callable_id = 0;
  std::uint32_t worker = graph::kNone;  // where it was sent last, or failed first
  bool is_sent = false;
  bool has_ended = true;
  bool is_group = false;
  bool is_host = false;
  bool is_watched = false;  // of the host: the listener is told when its turn has come
  std::uint32_t trace_index = graph::kNone;  // in the trace of its run, if that has one
  std::uint64_t seq = 0;                     // of a single, once sent
  KeptId kept;
  StoredArgs args;
  std::shared_ptr<TaskFailure> failure;  // of the member that failed first
};

}  // namespace simpler
