// The task engine in Python: of a running tree, or on its own for the host alone (level 2).
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "hierarchical/sched/task_engine.h"
#include "tree.h"

namespace simpler::bindings {

namespace py = pybind11;

struct PyEngine {
  std::shared_ptr<TaskEngine> engine;  // read and written with the GIL only; nullptr once closed
  py::object make_error;
  std::uint32_t epoch = 0;  // fork_epoch() of the process it was made in

  PyEngine() = default;
  // In a forked copy of the process the engine is left alone, as PyTree does.
  ~PyEngine();
  PyEngine(const PyEngine&) = delete;
  PyEngine& operator=(const PyEngine&) = delete;

  // For the length of one call. Sets a Python error and returns null in a forked copy of the
  // process and after close().
  [[nodiscard]] std::shared_ptr<TaskEngine> use() const;
  // The same without an error, for what is only tidied up.
  [[nodiscard]] std::shared_ptr<TaskEngine> use_if_open() const noexcept;
};

inline std::uint64_t number_of(graph::BufferId id) noexcept {
  return std::uint64_t{id.generation} << 32 | id.slot;
}

// A new _core.Run; `engine` is the Python object of a PyEngine.
PyObject* new_run(PyObject* engine, EngineRunId id, PyObject* context);

}  // namespace simpler::bindings
