// Run and Task as plain C types: making one costs little more than its memory.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>

#include "engine.h"
#include "fastcall.h"

namespace simpler::bindings {

struct RunObject {
  PyObject_HEAD PyObject* engine;  // of a PyEngine
  PyObject* context;               // Python's own
  PyObject* answer;  // as finish() gives it, once known; then the engine's run is gone
  EngineRunId id;
};

struct TaskObject {
  PyObject_HEAD PyObject* run;               // a RunObject
  PyObject* outcome;                         // as fetch() gives it, once known
  std::shared_ptr<const TaskResult> result;  // taken, while it is made an outcome
  SubmittedTask task;
  std::uint32_t callable_id;
  int worker;  // the chip of a single; else -1
};

inline RunObject* as_run(PyObject* self) noexcept { return reinterpret_cast<RunObject*>(self); }
inline TaskObject* as_task(PyObject* self) noexcept { return reinterpret_cast<TaskObject*>(self); }
inline PyEngine& engine_of(const RunObject* run) noexcept {
  return instance_of<PyEngine>(run->engine);
}
inline PyEngine& engine_of(const TaskObject* task) noexcept { return engine_of(as_run(task->run)); }

inline void free_object(PyObject* self) noexcept {
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// Whether what poll() asks for has come within `timeout_s`, of which the first moments are spent
// spinning with the GIL. wait(deadline, interrupt) sleeps.
template <typename Poll, typename Spin, typename Wait>
bool wait_with_gil(double timeout_s, Poll poll, Spin spin, Wait wait) {
  if (timeout_s <= 0) return poll();
  if (spin(kSpinWithGil)) return true;
  TaskWait how = TaskWait::kOk;
  const Deadline deadline = Deadline::after_seconds(timeout_s);
  blocking([&](Interrupt* interrupt) { how = wait(deadline, interrupt); });
  if (how == TaskWait::kInterrupted)
    throw CallError(CallError::Kind::kInterrupted, -1, "interrupted");
  return how == TaskWait::kOk;
}

bool is_task(PyObject* object) noexcept;
// A new Task of the class given to set_task_type; nullptr with a Python error set.
PyObject* new_task(PyObject* run, const SubmittedTask& task, const TaskDesc& desc);
// (callable, worker, the exception in the child or None, how the worker died), or None.
py::object failure_tuple(const TaskFailure* failure);

PyTypeObject* add_type(py::module_& module, const char* name, PyType_Spec& spec);
void bind_run_type(py::module_& module);
void bind_task_type(py::module_& module);

}  // namespace simpler::bindings
