// The module is bound in parts, one file per family of types.
#pragma once

#include <pybind11/pybind11.h>

namespace simpler::bindings {

void bind_memory(pybind11::module_& module);
void bind_tasks(pybind11::module_& module);
void bind_child_port(pybind11::module_& module);
void bind_tree(pybind11::module_& module);
void bind_captured(pybind11::module_& module);
void bind_engine(pybind11::module_& module);
void bind_graph_testing(pybind11::module_& module);

}  // namespace simpler::bindings
