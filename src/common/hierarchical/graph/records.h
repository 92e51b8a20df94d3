// What the graph keeps of tasks, runs, scopes and buffers. Internal to graph/.
#pragma once

#include <cstdint>
#include <vector>

#include "hierarchical/graph/action.h"
#include "hierarchical/graph/ids.h"
#include "hierarchical/graph/ready_queue.h"
#include "hierarchical/graph/spec.h"

namespace simpler::graph {

enum class TaskState : std::uint8_t {
  kWaiting,  // for producers
  kReady,    // in a queue
  kSent,     // in a ring
  kEnded,    // its outcome is decided and told
};

struct Task {
  std::uint32_t generation = 0;
  TaskState state = TaskState::kWaiting;
  Kind kind = Kind::kNextLevel;
  Outcome outcome = Outcome::kOk;
  bool was_passed : 1 = false;       // a worker has told of its end, so what it follows has ended
  bool has_lost_member : 1 = false;  // an entry of it is in the ring of a worker that is gone
  bool is_released : 1 = false;      // nothing has to wait for it any more
  bool is_poisoned : 1 = false;      // something upstream in its run did not succeed
  bool is_recalled : 1 = false;      // the run was cancelled after it had been sent
  bool is_settling : 1 = false;      // in TaskGraph::ended_
  bool is_doomed : 1 = false;        // did not succeed, or is a group of which a member did not
  bool has_poisoned : 1 = false;     // its consumers know that it did not succeed
  ReadyKey key = 0;
  std::uint64_t last_consumer = 0;  // key of the task that last got an edge from this one
  TaskId cause;                     // of a poisoned one: who failed or was lost, if somebody did
  std::uint32_t run = kNone;        // kNone once the run is done
  std::uint32_t scope = kNone;
  std::uint32_t worker = kNone;  // of a single: its chip, or its sub worker once sent
  std::uint32_t group = kNone;
  std::uint32_t blockers = 0;        // edges that keep it from being sent
  std::uint32_t first_out = kNone;   // edges to those that come after it
  std::uint32_t first_in = kNone;    // edges from those not released yet
  std::uint32_t first_hold = kNone;  // buffers
  std::uint32_t previous_of_run = kNone;
  std::uint32_t next_of_run = kNone;
};

// `consumer` comes after `producer`, which is not released yet.
struct Edge {
  std::uint32_t producer = kNone;
  std::uint32_t consumer = kNone;  // kNone once the consumer has gone
  std::uint32_t next_out = kNone;
  std::uint32_t next_in = kNone;
  std::uint32_t previous_in = kNone;
  bool blocks = false;  // until the producer is released or sent where that is enough
};

struct Hold {
  std::uint32_t buffer = kNone;
  std::uint32_t next = kNone;
};

struct Group {
  struct Member {
    std::uint32_t worker = kNone;
    bool has_ended = false;
  };
  std::vector<Member> members;
  std::uint32_t unfinished = 0;
  bool was_skipped = false;
  Outcome failure = Outcome::kOk;  // of the member that failed first, if one did
};

struct Run {
  std::uint32_t generation = 0;
  std::int16_t priority = 0;
  bool is_sealed = false;
  std::uint64_t unended = 0;
  std::uint32_t first_task = kNone;  // those with a record, in order of submission
  std::uint32_t last_task = kNone;
  RunResult result;
};

struct Scope {
  std::uint32_t generation = 0;
  bool is_closed = false;
  std::uint64_t unended = 0;
};

struct Buffer {
  std::uint32_t generation = 0;
  bool is_released = false;
  std::uint64_t holders = 0;
};

// One chip or sub worker.
struct Place {
  std::uint32_t outstanding = 0;
  bool is_lost = false;
};

}  // namespace simpler::graph
