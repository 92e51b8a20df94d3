// _core.Run: the tasks of one run.
#include "run_objects.h"

#include <structmember.h>

#include <cstring>
#include <memory>
#include <vector>

#include "hierarchical/ipc/task_wire.h"
#include "submission.h"

namespace simpler::bindings {

namespace {

PyTypeObject* run_type = nullptr;  // the module's, for good

// run.submit(callable_id, targets, args, accesses, buffers, deps, priority, timeout_s)
PyObject* run_submit(PyObject* self, PyObject* const* args, Py_ssize_t given) {
  const RunObject* run = as_run(self);
  const PyEngine& wrapped = engine_of(run);
  return guarded(wrapped.make_error, [&]() -> PyObject* {
    Arguments arguments(args, given, 8);
    const long callable_id = arguments.integer(0);
    const double timeout_s = arguments.real(7);
    if (!arguments.ok()) return nullptr;
    const auto engine = wrapped.use();
    if (!engine) return nullptr;
    Submission parts;
    if (!parts.set_targets(args[1]) || !parts.set_args(args[2]) || !parts.set_accesses(args[3]) ||
        !parts.set_buffers(args[4]) || !parts.set_deps(args[5], engine.get()) ||
        !parts.set_priority(args[6])) {
      return nullptr;
    }
    parts.desc.callable_id = static_cast<std::uint32_t>(callable_id);
    parts.desc.is_kept = true;
    SubmittedTask made;
    if (!engine->poll_submit(run->id, {}, parts.desc, made)) {
      const Deadline deadline = Deadline::after_seconds(timeout_s);
      blocking([&](Interrupt* interrupt) {
        made = engine->submit(run->id, {}, parts.desc, deadline, interrupt);
      });
    }
    PyObject* task = new_task(self, made, parts.desc);
    if (task == nullptr) engine->forget(made);
    return task;
  });
}

constexpr std::size_t kBitsAt = offsetof(task_wire::ScalarRecord, bits);

// One scalar of each of many tasks: an array, or one value for all.
struct ScalarColumn {
  std::span<const std::byte> bits;  // 8 bytes a task, or 8 in all
  std::size_t step = 0;
};

// run.submit_many(callable_id, workers, args, columns, priority, timeout_s): `workers` is a buffer
// of uint32, `args` the packed arguments of one task, all of them scalars; column i, a buffer of 8
// bytes a task or 8 in all, replaces the value of the scalar i.
PyObject* run_submit_many(PyObject* self, PyObject* const* args, Py_ssize_t given) {
  const RunObject* run = as_run(self);
  const PyEngine& wrapped = engine_of(run);
  return guarded(wrapped.make_error, [&]() -> PyObject* {
    Arguments arguments(args, given, 6);
    const long callable_id = arguments.integer(0);
    const double timeout_s = arguments.real(5);
    const ReadBuffer workers(args[1]);
    const ReadBuffer pattern(args[2]);
    if (!arguments.ok() || !workers.ok() || !pattern.ok()) return nullptr;
    Submission parts;
    if (!parts.set_priority(args[4])) return nullptr;
    const std::size_t count = workers.bytes().size() / sizeof(std::uint32_t);
    std::vector<std::unique_ptr<ReadBuffer>> buffers;
    std::vector<ScalarColumn> columns;
    const auto add_column = [&](PyObject* item) {
      buffers.push_back(std::make_unique<ReadBuffer>(item));
      if (!buffers.back()->ok()) return false;
      const auto bits = buffers.back()->bytes();
      columns.push_back({bits, bits.size() == 8 ? std::size_t{0} : std::size_t{8}});
      return true;
    };
    if (!for_each_item(args[3], "columns are buffers", add_column)) return nullptr;
    if (pattern.bytes().size() != task_wire::scalar_place(columns.size()) - kBitsAt)
      throw Error(ErrorCode::kInvalidArgument, "a scalar has one column");
    for (const ScalarColumn& column : columns) {
      if (column.step != 0 && column.bits.size() != count * 8)
        throw Error(ErrorCode::kInvalidArgument, "a column has 8 bytes a task");
    }
    const auto engine = wrapped.use();
    if (!engine) return nullptr;
    std::vector<std::byte> scratch(pattern.bytes().begin(), pattern.bytes().end());
    TaskDesc& desc = parts.desc;
    std::uint32_t target = 0;
    desc.callable_id = static_cast<std::uint32_t>(callable_id);
    desc.args = scratch;
    desc.spec.targets = {&target, 1};
    const auto describe = [&](std::size_t i) -> const TaskDesc& {
      std::memcpy(&target, workers.bytes().data() + i * sizeof target, sizeof target);
      for (std::size_t c = 0; c < columns.size(); ++c)
        std::memcpy(scratch.data() + task_wire::scalar_place(c),
                    columns[c].bits.data() + i * columns[c].step, 8);
      return desc;
    };
    const Deadline deadline = Deadline::after_seconds(timeout_s);
    blocking([&](Interrupt* interrupt) {
      engine->submit_many(run->id, {}, count, describe, deadline, interrupt);
    });
    Py_RETURN_NONE;
  });
}

// Handles of the tasks of those nodes that are kept.
PyObject* tasks_of(PyObject* run, const CapturedGraph& captured, TaskEngine& engine,
                   const std::vector<SubmittedTask>& tasks) {
  PyObject* const list = PyList_New(0);
  auto task = tasks.begin();
  for (const CapturedGraph::Node& node : captured.nodes()) {
    if (!node.is_kept) continue;
    TaskDesc desc;
    desc.callable_id = node.callable_id;
    desc.spec.targets = node.targets;
    PyObject* made = list == nullptr ? nullptr : new_task(run, *task, desc);
    if (made == nullptr) {
      engine.forget(*task);
    } else {
      if (PyList_Append(list, made) != 0) PyErr_Clear();
      Py_DECREF(made);
    }
    ++task;
  }
  return list;
}

// run.launch(captured, values, timeout_s): the tasks of those nodes whose results are kept.
PyObject* run_launch(PyObject* self, PyObject* const* args, Py_ssize_t given) {
  const RunObject* run = as_run(self);
  return guarded(engine_of(run).make_error, [&]() -> PyObject* {
    Arguments arguments(args, given, 3);
    const double timeout_s = arguments.real(2);
    if (!arguments.ok()) return nullptr;
    auto& captured = py::cast<CapturedGraph&>(py::handle(args[0]));
    std::vector<ParameterValue> values;
    if (!values_from(args[1], values)) return nullptr;
    const auto engine = engine_of(run).use();
    if (!engine) return nullptr;
    const Deadline deadline = Deadline::after_seconds(timeout_s);
    std::vector<SubmittedTask> tasks;
    blocking([&](Interrupt* interrupt) {
      tasks = captured.launch(*engine, run->id, values, deadline, interrupt);
    });
    return tasks_of(self, captured, *engine, tasks);
  });
}

// run.trace(): a _core.RunTrace of what is submitted from now on.
PyObject* run_trace(PyObject* self, PyObject* /*none*/) {
  const RunObject* run = as_run(self);
  return guarded(engine_of(run).make_error, [&]() -> PyObject* {
    const auto engine = engine_of(run).use();
    if (!engine) return nullptr;
    return py::cast(std::const_pointer_cast<RunTrace>(engine->trace_run(run->id))).release().ptr();
  });
}

PyObject* run_seal(PyObject* self, PyObject* /*none*/) {
  const RunObject* run = as_run(self);
  return guarded(engine_of(run).make_error, [&]() -> PyObject* {
    if (const auto engine = engine_of(run).use_if_open()) engine->seal_run(run->id);
    Py_RETURN_NONE;
  });
}

PyObject* run_cancel(PyObject* self, PyObject* /*none*/) {
  const RunObject* run = as_run(self);
  return guarded(engine_of(run).make_error, [&]() -> PyObject* {
    const auto engine = engine_of(run).use_if_open();
    if (engine && run->answer == nullptr) engine->cancel_run(run->id);
    Py_RETURN_NONE;
  });
}

PyObject* run_watch(PyObject* self, PyObject* /*none*/) {
  const RunObject* run = as_run(self);
  return guarded(engine_of(run).make_error, [&]() -> PyObject* {
    const auto engine = engine_of(run).use();
    if (!engine) return nullptr;
    return PyBool_FromLong(run->answer != nullptr || engine->watch_run(run->id) ? 1 : 0);
  });
}

bool wait_run(TaskEngine& engine, EngineRunId run, double timeout_s) {
  return wait_with_gil(
      timeout_s, [&] { return engine.poll_run(run); },
      [&](Nanoseconds bound) { return engine.spin_run(run, bound); },
      [&](Deadline deadline, Interrupt* interrupt) {
        return engine.wait_run(run, deadline, interrupt);
      });
}

// run.wait(timeout_s): whether it is done.
PyObject* run_wait(PyObject* self, PyObject* const* args, Py_ssize_t given) {
  const RunObject* run = as_run(self);
  return guarded(engine_of(run).make_error, [&]() -> PyObject* {
    Arguments arguments(args, given, 1);
    const double timeout_s = arguments.real(0);
    if (!arguments.ok()) return nullptr;
    if (run->answer != nullptr) Py_RETURN_TRUE;
    const auto engine = engine_of(run).use();
    if (!engine) return nullptr;
    return PyBool_FromLong(wait_run(*engine, run->id, timeout_s) ? 1 : 0);
  });
}

PyObject* answer_of(const RunSummary& summary) {
  const graph::RunResult& counts = summary.counts;
  if (counts.failed + counts.poisoned + counts.cancelled == 0) return Py_NewRef(Py_True);
  return py::make_tuple(counts.tasks, counts.failed, counts.poisoned, counts.cancelled,
                        summary.was_timed_out, summary.was_closed,
                        failure_tuple(summary.failure.get()))
      .release()
      .ptr();
}

// run.finish(timeout_s): seals it and waits. None when the time ran out; True when every task
// succeeded; else (tasks, failed, poisoned, cancelled, timed out, closed, failure).
PyObject* run_finish(PyObject* self, PyObject* const* args, Py_ssize_t given) {
  RunObject* run = as_run(self);
  return guarded(engine_of(run).make_error, [&]() -> PyObject* {
    Arguments arguments(args, given, 1);
    const double timeout_s = arguments.real(0);
    if (!arguments.ok()) return nullptr;
    if (run->answer != nullptr) return Py_NewRef(run->answer);
    const auto engine = engine_of(run).use();
    if (!engine) return nullptr;
    engine->seal_run(run->id);
    if (!wait_run(*engine, run->id, timeout_s)) Py_RETURN_NONE;
    // Another thread may have taken it while this one waited without the GIL.
    if (run->answer == nullptr) run->answer = answer_of(engine->take_run(run->id));
    return Py_NewRef(run->answer);
  });
}

PyObject* run_number(PyObject* self, void* /*closure*/) {
  const RunObject* run = as_run(self);
  return PyLong_FromUnsignedLongLong(std::uint64_t{run->id.generation} << 32 | run->id.slot);
}

void run_dealloc(PyObject* self) {
  RunObject* run = as_run(self);
  if (run->answer == nullptr) {
    if (const auto engine = engine_of(run).use_if_open()) engine->detach_run(run->id);
  }
  Py_DECREF(run->engine);
  Py_DECREF(run->context);
  Py_XDECREF(run->answer);
  free_object(self);
}

PyMethodDef run_methods[] = {
    {"submit", as_c_function(run_submit), METH_FASTCALL, nullptr},
    {"submit_many", as_c_function(run_submit_many), METH_FASTCALL, nullptr},
    {"launch", as_c_function(run_launch), METH_FASTCALL, nullptr},
    {"trace", run_trace, METH_NOARGS, nullptr},
    {"seal", run_seal, METH_NOARGS, nullptr},
    {"cancel", run_cancel, METH_NOARGS, nullptr},
    {"watch", run_watch, METH_NOARGS, nullptr},
    {"wait", as_c_function(run_wait), METH_FASTCALL, nullptr},
    {"finish", as_c_function(run_finish), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyMemberDef run_members[] = {
    {"context", T_OBJECT_EX, offsetof(RunObject, context), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyGetSetDef run_getset[] = {
    {"number", run_number, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot run_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(run_dealloc)},
    {Py_tp_methods, run_methods},
    {Py_tp_members, run_members},
    {Py_tp_getset, run_getset},
    {0, nullptr},
};

PyType_Spec run_spec = {"simpler._core.Run", sizeof(RunObject), 0,
                        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, run_slots};

}  // namespace

PyObject* new_run(PyObject* engine, EngineRunId id, PyObject* context) {
  PyObject* made = run_type->tp_alloc(run_type, 0);
  if (made == nullptr) return nullptr;
  RunObject* run = as_run(made);
  run->engine = Py_NewRef(engine);
  run->context = Py_NewRef(context);
  run->id = id;
  return made;
}

void bind_run_type(py::module_& module) { run_type = add_type(module, "Run", run_spec); }

}  // namespace simpler::bindings
