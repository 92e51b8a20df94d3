// The task graph for tests, which drive it against a model; the runtime drives it in C++.
// An id is one int: the generation above the slot.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "gil.h"
#include "hierarchical/base/error.h"
#include "hierarchical/graph/task_graph.h"

namespace simpler::bindings {

namespace {

using AccessTuple = std::tuple<std::uint32_t, bool, std::uint64_t, std::uint64_t>;

template <typename Noun>
std::uint64_t pack(graph::Id<Noun> id) {
  return (std::uint64_t{id.generation} << 32) | id.slot;
}

template <typename Noun>
graph::Id<Noun> unpack(std::uint64_t id) {
  return {static_cast<std::uint32_t>(id), static_cast<std::uint32_t>(id >> 32)};
}

template <typename Noun>
std::vector<graph::Id<Noun>> unpack_all(const std::vector<std::uint64_t>& packed) {
  std::vector<graph::Id<Noun>> ids;
  ids.reserve(packed.size());
  for (const std::uint64_t id : packed) ids.push_back(unpack<Noun>(id));
  return ids;
}

graph::Kind kind_of(const std::string& name) {
  if (name == "chip") return graph::Kind::kNextLevel;
  if (name == "sub") return graph::Kind::kSub;
  if (name == "host") return graph::Kind::kHost;
  throw Error(ErrorCode::kInvalidArgument, "not a kind of task: " + name);
}

graph::Report report_of(const std::string& name) {
  if (name == "ok") return graph::Report::kOk;
  if (name == "failed") return graph::Report::kFailed;
  if (name == "skipped") return graph::Report::kSkipped;
  throw Error(ErrorCode::kInvalidArgument, "not a report: " + name);
}

const char* name_of(graph::Outcome outcome) {
  switch (outcome) {
    case graph::Outcome::kOk:
      return "ok";
    case graph::Outcome::kFailed:
      return "failed";
    case graph::Outcome::kLost:
      return "lost";
    case graph::Outcome::kPoisoned:
      return "poisoned";
    case graph::Outcome::kCancelled:
      break;
  }
  return "cancelled";
}

py::object worker_or_none(std::uint32_t worker) {
  return worker == graph::kNone ? py::object(py::none()) : py::object(py::int_(worker));
}

py::tuple send_tuple(const graph::ActionLog& log, const graph::Action& action) {
  py::list producers;
  for (const graph::Producer& producer : log.producers(action)) {
    producers.append(py::make_tuple(pack(producer.task), producer.member, producer.worker,
                                    producer.must_succeed));
  }
  return py::make_tuple("send", pack(action.task()), action.member, worker_or_none(action.worker),
                        producers);
}

py::tuple done_tuple(const graph::RunResult& result) {
  const bool has_cause = result.cause != graph::TaskId{};
  const py::object cause =
      has_cause ? py::object(py::int_(pack(result.cause))) : py::object(py::none());
  return py::make_tuple("done", pack(result.run), cause, result.was_cancelled, result.tasks,
                        result.failed, result.poisoned, result.cancelled);
}

py::object cause_or_none(const graph::Action& end) {
  const bool has_cause = end.outcome == graph::Outcome::kPoisoned && end.cause().generation != 0;
  return has_cause ? py::object(py::int_(pack(end.cause()))) : py::none();
}

py::tuple action_tuple(const graph::ActionLog& log, const graph::Action& action) {
  switch (action.kind) {
    case graph::ActionKind::kSend:
      return send_tuple(log, action);
    case graph::ActionKind::kRecall:
      return py::make_tuple("recall", pack(action.task()), action.member,
                            worker_or_none(action.worker));
    case graph::ActionKind::kTaskEnded:
      return py::make_tuple("ended", pack(action.task()), name_of(action.outcome),
                            cause_or_none(action));
    case graph::ActionKind::kPassed:
      return py::make_tuple("passed", pack(action.task()));
    case graph::ActionKind::kRunDone:
      return done_tuple(log.result(action));
    case graph::ActionKind::kScopeEmpty:
      return py::make_tuple("empty", pack(action.scope()));
    case graph::ActionKind::kBufferIdle:
      break;
  }
  return py::make_tuple("idle", pack(action.buffer()));
}

py::list take_actions(graph::TaskGraph& graph) {
  py::list actions;
  for (const graph::Action& action : graph.log().actions()) {
    actions.append(action_tuple(graph.log(), action));
  }
  graph.clear();
  return actions;
}

std::optional<std::uint64_t> submit(
    graph::TaskGraph& graph, std::uint64_t run, const std::string& kind,
    const std::vector<std::uint32_t>& targets, std::uint32_t sub_members,
    const std::vector<AccessTuple>& accesses, const std::vector<std::uint64_t>& deps,
    const std::vector<std::uint64_t>& buffers, std::optional<std::uint64_t> scope,
    std::optional<std::int16_t> priority) {
  std::vector<graph::Access> ranges;
  ranges.reserve(accesses.size());
  for (const auto& [region, writes, begin, end] : accesses) {
    ranges.push_back({region, writes ? graph::Mode::kWrite : graph::Mode::kRead, begin, end});
  }
  const auto dep_ids = unpack_all<graph::Task>(deps);
  const auto buffer_ids = unpack_all<graph::Buffer>(buffers);
  graph::Spec spec;
  spec.kind = kind_of(kind);
  spec.targets = targets;
  spec.sub_members = sub_members;
  spec.accesses = ranges;
  spec.deps = dep_ids;
  spec.buffers = buffer_ids;
  spec.priority = priority;
  const auto scope_id = scope ? unpack<graph::Scope>(*scope) : graph::ScopeId{};
  const graph::Submitted submitted = graph.submit(unpack<graph::Run>(run), scope_id, spec);
  if (submitted.is_full) return std::nullopt;
  return pack(submitted.task);
}

py::dict sizes(const graph::TaskGraph& graph) {
  py::dict sizes;
  sizes["unfinished_tasks"] = graph.unfinished_tasks();
  sizes["task_records"] = graph.task_records();
  sizes["edges"] = graph.edges();
  sizes["intervals"] = graph.intervals();
  sizes["range_uses"] = graph.range_uses();
  return sizes;
}

std::unique_ptr<graph::TaskGraph> make_graph(std::uint32_t chips, std::uint32_t sub_workers,
                                             std::uint32_t ring_depth, std::uint32_t sub_depth,
                                             std::uint32_t regions, std::uint32_t capacity,
                                             bool send_ahead) {
  return std::make_unique<graph::TaskGraph>(
      graph::Config{chips, sub_workers, ring_depth, sub_depth, regions, capacity, send_ahead});
}

}  // namespace

void bind_graph_testing(py::module_& module) {
  using graph::TaskGraph;
  using Packed = std::uint64_t;
  py::class_<TaskGraph>(module, "TaskGraph", py::is_final())
      .def(py::init(&make_graph), py::arg("chips") = 1, py::arg("sub_workers") = 0,
           py::arg("ring_depth") = 64, py::arg("sub_depth") = 2, py::arg("regions") = 1,
           py::arg("capacity") = 1 << 16, py::arg("send_ahead") = false)
      .def(
          "open_run",
          [](TaskGraph& graph, std::int16_t priority) { return pack(graph.open_run(priority)); },
          py::arg("priority") = 0)
      .def(
          "seal_run", [](TaskGraph& graph, Packed run) { graph.seal_run(unpack<graph::Run>(run)); },
          py::arg("run"))
      .def(
          "cancel_run",
          [](TaskGraph& graph, Packed run) { graph.cancel_run(unpack<graph::Run>(run)); },
          py::arg("run"))
      .def(
          "open_scope",
          [](TaskGraph& graph, Packed run) {
            return pack(graph.open_scope(unpack<graph::Run>(run)));
          },
          py::arg("run"))
      .def(
          "close_scope",
          [](TaskGraph& graph, Packed scope) { graph.close_scope(unpack<graph::Scope>(scope)); },
          py::arg("scope"))
      .def("open_buffer", [](TaskGraph& graph) { return pack(graph.open_buffer()); })
      .def(
          "release_buffer",
          [](TaskGraph& graph, Packed buffer) {
            graph.release_buffer(unpack<graph::Buffer>(buffer));
          },
          py::arg("buffer"))
      .def("submit", &submit, py::arg("run"), py::arg("kind"),
           py::arg("targets") = std::vector<std::uint32_t>(), py::arg("sub_members") = 1,
           py::arg("accesses") = std::vector<AccessTuple>(),
           py::arg("deps") = std::vector<Packed>(), py::arg("buffers") = std::vector<Packed>(),
           py::arg("scope") = py::none(), py::arg("priority") = py::none())
      .def(
          "finished",
          [](TaskGraph& graph, Packed task, std::uint32_t member, const std::string& report) {
            return graph.finished(unpack<graph::Task>(task), member, report_of(report));
          },
          py::arg("task"), py::arg("member"), py::arg("report"))
      .def(
          "take_back",
          [](TaskGraph& graph, Packed task) { return graph.take_back(unpack<graph::Task>(task)); },
          py::arg("task"))
      .def("passed_over", &TaskGraph::passed_over, py::arg("worker"))
      .def(
          "worker_lost", [](TaskGraph& graph, std::uint32_t worker) { graph.worker_lost(worker); },
          py::arg("worker"))
      .def("worker_back", &TaskGraph::worker_back, py::arg("worker"))
      .def("take_actions", &take_actions)
      .def("sizes", &sizes);
}

}  // namespace simpler::bindings
