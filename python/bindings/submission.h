// Python's description of a task, and of a launch, as the engine takes them.
//
// Each function that returns false leaves a Python error.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "hierarchical/sched/captured_graph.h"
#include "hierarchical/sched/task_engine.h"

namespace simpler::bindings {

template <typename Each>  // each(item) returns false with a Python error set
bool for_each_item(PyObject* object, const char* what, Each each) {
  if (object == Py_None) return true;
  PyObject* const fast = PySequence_Fast(object, what);
  if (fast == nullptr) return false;
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(fast);
  bool ok = true;
  for (Py_ssize_t i = 0; ok && i < size; ++i) ok = each(PySequence_Fast_GET_ITEM(fast, i));
  Py_DECREF(fast);
  return ok;
}

inline graph::BufferId buffer_of(std::uint64_t number) noexcept {
  return {static_cast<std::uint32_t>(number), static_cast<std::uint32_t>(number >> 32)};
}

bool accesses_from(PyObject* object,
                   std::vector<graph::Access>& out);  // (region, mode, begin, end)
bool buffers_from(PyObject* object, std::vector<graph::BufferId>& out);
bool values_from(PyObject* object, std::vector<ParameterValue>& out);  // (bits, buffer)

// Its spans point into itself and into the Python objects.
class Submission {
 public:
  TaskDesc desc;

  // An int is one chip; a sequence of ints is a group; None is any sub worker, a negative int
  // -n a group of n.
  bool set_targets(PyObject* object);
  bool set_args(PyObject* object);
  bool set_accesses(PyObject* object);
  bool set_buffers(PyObject* object);
  bool set_deps(PyObject* object, const TaskEngine* engine);
  bool set_priority(PyObject* object);

 private:
  std::uint32_t one_target_ = 0;
  std::vector<std::uint32_t> targets_;
  std::vector<std::span<const std::byte>> member_args_;
  std::vector<graph::Access> accesses_;
  std::vector<graph::BufferId> buffers_;
  std::vector<graph::TaskId> deps_;
};

}  // namespace simpler::bindings
