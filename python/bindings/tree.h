// Tree in Python: a plan before start(), the running tree after it, nothing after close().
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "hierarchical/runtime.h"

namespace simpler::bindings {

namespace py = pybind11;

struct PyTree {
  std::optional<TreeBuilder> builder;
  std::shared_ptr<RunningTree> running;  // read and written with the GIL only
  std::shared_ptr<SharedRegion> heap;
  py::object make_error;
  py::object child_main;    // called in children only
  std::uint32_t epoch = 0;  // fork_epoch() of the process it was made in
  std::size_t max_payload = 0;

  PyTree() = default;
  // In a forked copy of the process the tree is left alone: it, its processes and its threads are
  // the original's.
  ~PyTree();
  PyTree(const PyTree&) = delete;
  PyTree& operator=(const PyTree&) = delete;

  // The running tree for the length of one call. Sets a Python error and returns null in a forked
  // copy of the process, before start() and after close().
  std::shared_ptr<RunningTree> use() const;
};

// The positional-only calls of the hot path, as methods of the Python type.
void add_tree_calls(py::class_<PyTree>& type);
void add_tree_events(py::class_<PyTree>& type);

}  // namespace simpler::bindings
