#include <pybind11/pybind11.h>

#include "bindings.h"
#include "errors.h"
#include "hierarchical/ipc/control_op.h"
#include "hierarchical/ipc/layout.h"
#include "hierarchical/os/fork_epoch.h"
#include "hierarchical/os/process.h"

namespace simpler::bindings {

namespace {

void bind_platform(py::module_& module) {
  const py::object int_enum = py::module_::import("enum").attr("IntEnum");
  py::dict members;
  for (const ControlOpName& entry : kControlOps) {
    members[py::str(entry.name.data(), entry.name.size())] = static_cast<int>(entry.op);
  }
  py::object control_op = int_enum("ControlOp", members, py::arg("module") = "simpler._core");
  control_op.attr("__doc__") = "Every control code; generated from the one C++ enum.";
  module.attr("ControlOp") = control_op;
  module.attr("LANE_MAIN") = static_cast<int>(Lane::kMain);
  module.attr("LANE_SERVICE") = static_cast<int>(Lane::kService);
  module.attr("LANE_TRANSFER") = static_cast<int>(Lane::kTransfer);
  module.def("require_platform", &require_platform);
  module.def("usable_cores", &usable_cores);
  module.def("process_epoch", &fork_epoch);
}

}  // namespace

}  // namespace simpler::bindings

PYBIND11_MODULE(_core, module) {
  namespace bindings = simpler::bindings;
  module.doc() = "The compiled core of simpler: internal, see the package for the public names.";
  bindings::register_error_translator(module);
  bindings::bind_platform(module);
  bindings::bind_memory(module);
  bindings::bind_tasks(module);
  bindings::bind_child_port(module);
  bindings::bind_tree(module);
  bindings::bind_captured(module);
  bindings::bind_engine(module);
  bindings::bind_graph_testing(module);
}
