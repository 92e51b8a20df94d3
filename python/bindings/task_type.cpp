// _core.Task: one submitted task.
#include "run_objects.h"

#include <structmember.h>

#include <memory>
#include <new>

#include "hierarchical/ipc/error_codec.h"

namespace simpler::bindings {

namespace {

PyTypeObject* task_base = nullptr;  // the module's, for good
PyObject* task_type = nullptr;      // what submit() makes: task_base or a class derived from it

// What fetch() says of a task that close() has ended, after the values of graph::Outcome.
constexpr int kOutcomeClosed = 5;

py::object value_of(const TaskResult& result) {
  if (result.outcome != graph::Outcome::kOk) return failure_tuple(result.failure.get());
  if (result.members.empty()) return to_bytes(result.bytes);
  py::list members;
  for (const auto& member : result.members) members.append(to_bytes(member));
  return members;
}

bool wait_task(TaskEngine& engine, const SubmittedTask& task, double timeout_s) {
  return wait_with_gil(
      timeout_s, [&] { return engine.poll_task(task); },
      [&](Nanoseconds bound) { return engine.spin_task(task, bound); },
      [&](Deadline deadline, Interrupt* interrupt) {
        return engine.wait_task(task, deadline, interrupt);
      });
}

// task.fetch(timeout_s): (outcome, worker, value) once it has ended, else None.
PyObject* task_fetch(PyObject* self, PyObject* const* args, Py_ssize_t given) {
  TaskObject* task = as_task(self);
  if (task->outcome != nullptr) return Py_NewRef(task->outcome);
  return guarded(engine_of(task).make_error, [&]() -> PyObject* {
    Arguments arguments(args, given, 1);
    const double timeout_s = arguments.real(0);
    if (!arguments.ok()) return nullptr;
    const auto engine = engine_of(task).use();
    if (!engine) return nullptr;
    if (!wait_task(*engine, task->task, timeout_s)) Py_RETURN_NONE;
    if (task->outcome != nullptr) return Py_NewRef(task->outcome);  // another thread's
    if (!task->result)
      task->result = std::make_shared<const TaskResult>(engine->take_result(task->task));
    // The GIL may be let go below, and another thread may come here.
    const std::shared_ptr<const TaskResult> result = task->result;
    const int outcome = result->was_closed ? kOutcomeClosed : static_cast<int>(result->outcome);
    const py::tuple made =
        py::make_tuple(outcome, static_cast<int>(result->worker), value_of(*result));
    if (task->outcome == nullptr) task->outcome = Py_NewRef(made.ptr());
    task->result.reset();
    return Py_NewRef(task->outcome);
  });
}

PyObject* task_done(PyObject* self, PyObject* /*none*/) {
  const TaskObject* task = as_task(self);
  if (task->outcome != nullptr) Py_RETURN_TRUE;
  return guarded(engine_of(task).make_error, [&]() -> PyObject* {
    const auto engine = engine_of(task).use();
    if (!engine) return nullptr;
    return PyBool_FromLong(engine->poll_task(task->task) ? 1 : 0);
  });
}

void task_dealloc(PyObject* self) {
  TaskObject* task = as_task(self);
  if (task->run != nullptr) {
    if (task->outcome == nullptr && !task->result) {
      if (const auto engine = engine_of(task).use_if_open()) engine->forget(task->task);
    }
    Py_DECREF(task->run);
    task->result.~shared_ptr();
  }
  Py_XDECREF(task->outcome);
  free_object(self);
}

PyMethodDef task_methods[] = {
    {"fetch", as_c_function(task_fetch), METH_FASTCALL, nullptr},
    {"done", task_done, METH_NOARGS,
     "Whether it has ended: done, failed, or not run because something before it failed."},
    {nullptr, nullptr, 0, nullptr},
};

PyMemberDef task_members[] = {
    {"core_run", T_OBJECT_EX, offsetof(TaskObject, run), READONLY, nullptr},
    {"callable_id", T_UINT, offsetof(TaskObject, callable_id), READONLY, nullptr},
    {"worker", T_INT, offsetof(TaskObject, worker), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot task_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(task_dealloc)},
    {Py_tp_methods, task_methods},
    {Py_tp_members, task_members},
    {0, nullptr},
};

PyType_Spec task_spec = {
    "simpler._core.Task", sizeof(TaskObject), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION, task_slots};

}  // namespace

bool is_task(PyObject* object) noexcept { return PyObject_TypeCheck(object, task_base) != 0; }

PyObject* new_task(PyObject* run, const SubmittedTask& task, const TaskDesc& desc) {
  auto* type = reinterpret_cast<PyTypeObject*>(task_type);
  PyObject* made = type->tp_alloc(type, 0);
  if (made == nullptr) return nullptr;
  TaskObject* object = as_task(made);
  object->run = Py_NewRef(run);
  new (&object->result) std::shared_ptr<const TaskResult>();
  object->task = task;
  object->callable_id = desc.callable_id;
  const auto targets = desc.spec.targets;
  object->worker = targets.size() == 1 ? static_cast<int>(targets[0]) : -1;
  return made;
}

py::object failure_tuple(const TaskFailure* failure) {
  if (failure == nullptr) return py::none();
  py::object remote = py::none();
  if (failure->outcome == graph::Outcome::kFailed) {
    const RemoteFailure decoded = decode_failure(failure->failure);
    remote = py::make_tuple(to_text(decoded.type_name), to_text(decoded.message),
                            to_text(decoded.traceback));
  }
  return py::make_tuple(failure->callable_id, static_cast<int>(failure->worker), remote,
                        to_text(failure->lost));
}

PyTypeObject* add_type(py::module_& module, const char* name, PyType_Spec& spec) {
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  module.add_object(name, py::reinterpret_steal<py::object>(type));
  return reinterpret_cast<PyTypeObject*>(type);
}

void bind_task_type(py::module_& module) {
  task_base = add_type(module, "Task", task_spec);
  task_type = reinterpret_cast<PyObject*>(task_base);
  // The class that submit() makes its tasks of: derived from Task, and without a state of its own.
  module.def(
      "set_task_type",
      [](const py::type& type) {
        auto* made = reinterpret_cast<PyTypeObject*>(type.ptr());
        if (PyType_IsSubtype(made, task_base) == 0 || made->tp_basicsize != task_base->tp_basicsize)
          throw Error(ErrorCode::kInvalidArgument,
                      "not a class of tasks without a state of its own");
        task_type = type.inc_ref().ptr();  // for good, as the module
      },
      py::arg("task_type"));
}

}  // namespace simpler::bindings
