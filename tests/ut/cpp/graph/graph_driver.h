// A task graph for tests: short ways to submit and to end, and what was sent as plain lists.
//
// Everything told since the last question is kept, so that tests read in order of events.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hierarchical/graph/task_graph.h"

namespace simpler::graph {

inline Access reads(std::uint64_t begin, std::uint64_t end, std::uint32_t region = 0) {
  return {region, Mode::kRead, begin, end};
}
inline Access writes(std::uint64_t begin, std::uint64_t end, std::uint32_t region = 0) {
  return {region, Mode::kWrite, begin, end};
}

// How a task was put into a ring.
struct Sent {
  TaskId task;
  std::uint32_t member = 0;
  std::uint32_t worker = kNone;
  std::vector<Producer> producers;
};

class GraphDriver {
 public:
  explicit GraphDriver(const Config& config) : graph(config), run(graph.open_run()) {}

  TaskId task(std::uint32_t chip, std::vector<Access> accesses = {},
              std::vector<TaskId> deps = {}) {
    return group({chip}, std::move(accesses), std::move(deps));
  }
  TaskId group(std::vector<std::uint32_t> chips, std::vector<Access> accesses = {},
               std::vector<TaskId> deps = {}) {
    Spec spec;
    spec.targets = chips;
    spec.accesses = accesses;
    spec.deps = deps;
    return submit(spec);
  }
  TaskId sub(std::uint32_t members = 1, std::vector<Access> accesses = {},
             std::vector<TaskId> deps = {}) {
    Spec spec;
    spec.kind = Kind::kSub;
    spec.sub_members = members;
    spec.accesses = accesses;
    spec.deps = deps;
    return submit(spec);
  }
  TaskId submit(Spec spec) {
    if (priority != 0) spec.priority = priority;
    const Submitted submitted = graph.submit(run, scope, spec);
    EXPECT_FALSE(submitted.is_full);
    take();
    return submitted.task;
  }

  bool ok(TaskId task, std::uint32_t member = 0) { return end(task, member, Report::kOk); }
  bool fail(TaskId task, std::uint32_t member = 0) { return end(task, member, Report::kFailed); }
  bool skip(TaskId task, std::uint32_t member = 0) { return end(task, member, Report::kSkipped); }
  bool end(TaskId task, std::uint32_t member, Report report) {
    const bool is_news = graph.finished(task, member, report);
    take();
    return is_news;
  }
  // Ends the oldest sent member, and the next, until nothing is left.
  void end_all() {
    while (!rings.empty()) {
      const auto [task, member] = rings.front();
      ok(task, member);
      rings.erase(rings.begin());
    }
  }

  // What has been sent since the last call, in order.
  std::vector<TaskId> take_sent() {
    std::vector<TaskId> tasks;
    for (const Sent& entry : std::exchange(sent, {})) tasks.push_back(entry.task);
    return tasks;
  }
  [[nodiscard]] const Sent* entry_of(TaskId task, std::uint32_t member = 0) const {
    const auto found = std::find_if(sent.begin(), sent.end(), [&](const Sent& entry) {
      return entry.task == task && entry.member == member;
    });
    return found == sent.end() ? nullptr : &*found;
  }
  // nullopt while it has not ended.
  [[nodiscard]] std::optional<Outcome> outcome_of(TaskId task) const {
    for (const auto& [id, outcome] : ended) {
      if (id == task) return outcome;
    }
    return std::nullopt;
  }
  [[nodiscard]] const RunResult* result_of(RunId id) const {
    const auto found = std::find_if(results.begin(), results.end(),
                                    [&](const RunResult& result) { return result.run == id; });
    return found == results.end() ? nullptr : &*found;
  }
  void expect_empty() const {
    EXPECT_EQ(graph.unfinished_tasks(), 0U);
    EXPECT_EQ(graph.task_records(), 0U);
    EXPECT_EQ(graph.edges(), 0U);
    EXPECT_EQ(graph.intervals(), 0U);
    EXPECT_EQ(graph.range_uses(), 0U);
  }

  void take() {
    for (const Action& action : graph.log().actions()) {
      switch (action.kind) {
        case ActionKind::kSend: {
          const auto producers = graph.log().producers(action);
          sent.push_back(
              {action.task(), action.member, action.worker, {producers.begin(), producers.end()}});
          rings.emplace_back(action.task(), action.member);
          break;
        }
        case ActionKind::kRecall:
          recalled.push_back({action.task(), action.member, action.worker, {}});
          break;
        case ActionKind::kTaskEnded:
          ended.emplace_back(action.task(), action.outcome);
          break;
        case ActionKind::kPassed:
          passed.push_back(action.task());
          break;
        case ActionKind::kRunDone:
          results.push_back(graph.log().result(action));
          break;
        case ActionKind::kScopeEmpty:
          empty_scopes.push_back(action.scope());
          break;
        case ActionKind::kBufferIdle:
          idle_buffers.push_back(action.buffer());
          break;
      }
    }
    graph.clear();
  }

  TaskGraph graph;
  RunId run;
  ScopeId scope;
  std::int16_t priority = 0;
  std::vector<Sent> sent;
  std::vector<std::pair<TaskId, std::uint32_t>> rings;
  std::vector<Sent> recalled;
  std::vector<std::pair<TaskId, Outcome>> ended;
  std::vector<TaskId> passed;
  std::vector<RunResult> results;
  std::vector<ScopeId> empty_scopes;
  std::vector<BufferId> idle_buffers;
};

inline Config two_chips() {
  Config config;
  config.chips = 2;
  config.regions = 2;
  return config;
}

using Tasks = std::vector<TaskId>;

}  // namespace simpler::graph
