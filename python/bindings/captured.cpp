// A captured graph while it is recorded; Run.launch (runs.cpp) plays it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "gil.h"
#include "hierarchical/base/error.h"
#include "hierarchical/ipc/task_wire.h"
#include "hierarchical/sched/captured_graph.h"
#include "submission.h"

namespace simpler::bindings {

namespace {

using AccessTuple = std::tuple<std::uint32_t, bool, std::uint64_t, std::uint64_t, int>;
using BufferTuple = std::pair<std::uint64_t, int>;
using PatchTuple = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint64_t>;

std::uint32_t parameter_from(int number) noexcept {
  return number < 0 ? CapturedGraph::kNoParameter : static_cast<std::uint32_t>(number);
}

std::uint32_t add(CapturedGraph& self, std::uint32_t callable_id,
                  const std::vector<std::uint32_t>& chips, std::uint32_t sub_members,
                  const std::vector<py::bytes>& args, const std::vector<AccessTuple>& accesses,
                  const std::vector<BufferTuple>& buffers, std::vector<std::uint32_t> deps,
                  std::optional<std::int16_t> priority, const std::vector<PatchTuple>& patches,
                  bool is_kept) {
  CapturedGraph::Node node;
  node.callable_id = callable_id;
  node.kind = chips.empty() ? graph::Kind::kSub : graph::Kind::kNextLevel;
  node.targets = chips;
  node.sub_members = sub_members;
  node.priority = priority;
  node.deps = std::move(deps);
  node.is_kept = is_kept;
  for (const py::bytes& one : args) {
    const ReadBuffer wire(one.ptr());
    node.args.emplace_back(wire.bytes().begin(), wire.bytes().end());
  }
  for (const auto& [region, writes, begin, end, parameter] : accesses) {
    const auto mode = writes ? graph::Mode::kWrite : graph::Mode::kRead;
    node.accesses.push_back({{region, mode, begin, end}, parameter_from(parameter)});
  }
  for (const auto& [number, parameter] : buffers) {
    node.buffers.push_back({buffer_of(number), parameter_from(parameter)});
  }
  for (const auto& [member, place, parameter, plus] : patches)
    node.patches.push_back({member, place, parameter, plus});
  return self.add(std::move(node));
}

std::vector<ParameterValue> values_from(
    const std::vector<std::pair<std::uint64_t, std::uint64_t>>& values) {
  std::vector<ParameterValue> out;
  out.reserve(values.size());
  for (const auto& [bits, number] : values) {
    out.push_back({bits, buffer_of(number)});
  }
  return out;
}

// For each item of packed arguments where its 8 bytes are that a launch may replace: a tensor's
// address, or a scalar.
std::vector<std::size_t> task_places(const py::bytes& packed) {
  const ReadBuffer wire(packed.ptr());
  std::vector<std::size_t> places;
  std::size_t at = sizeof(task_wire::TaskHeader);
  task_wire::visit(
      wire.bytes(),
      [&](const task_wire::TensorRecord& tensor, const std::byte*) {
        places.push_back(at + offsetof(task_wire::TensorRecord, address));
        at += sizeof tensor + static_cast<std::size_t>(tensor.ndim) * 2 * sizeof(std::int64_t);
      },
      [&](const task_wire::ScalarRecord& scalar) {
        places.push_back(at + offsetof(task_wire::ScalarRecord, bits));
        at += sizeof scalar;
      });
  return places;
}

}  // namespace

void bind_captured(py::module_& module) {
  py::class_<CapturedGraph>(module, "CapturedGraph", py::is_final())
      .def(py::init<std::uint32_t>(), py::arg("parameters"))
      .def("add", &add, py::arg("callable_id"), py::arg("chips"), py::arg("sub_members"),
           py::arg("args"), py::arg("accesses"), py::arg("buffers"), py::arg("deps"),
           py::arg("priority"), py::arg("patches"), py::arg("is_kept"))
      .def("task",
           [](const CapturedGraph& self, std::size_t index) {
             const CapturedGraph::Node& node = self.nodes().at(index);
             return py::make_tuple(node.callable_id, node.targets);
           })
      .def("__len__", [](const CapturedGraph& self) { return self.nodes().size(); })
      .def(
          "edges",
          [](CapturedGraph& self,
             const std::vector<std::pair<std::uint64_t, std::uint64_t>>& values,
             std::uint32_t chips, std::uint32_t sub_workers) {
            return self.edges(values_from(values), chips, sub_workers);
          },
          py::arg("values"), py::arg("chips"), py::arg("sub_workers"));
  module.def("task_places", &task_places, py::arg("packed"));
}

}  // namespace simpler::bindings
