#include "engine.h"

#include <pybind11/stl.h>

#include <new>
#include <utility>

#include "bindings.h"
#include "fastcall.h"
#include "hierarchical/os/fork_epoch.h"
#include "run_objects.h"
#include "submission.h"

namespace simpler::bindings {

namespace {

// Level 2 has no tree whose header sleepers could use.
struct LocalEngine {
  TreeHeader<> header;
  TaskEngine engine;

  explicit LocalEngine(const TaskEngineConfig& config) : engine(config, header, {}) {}
};

// Work of this process that touches memory, in its turn.
struct PyHostTask {
  std::shared_ptr<TaskEngine> engine;
  HostTask task;
  py::object make_error;
  std::uint32_t epoch = fork_epoch();

  PyHostTask() = default;
  ~PyHostTask() { end(); }
  PyHostTask(const PyHostTask&) = delete;
  PyHostTask& operator=(const PyHostTask&) = delete;

  void end() noexcept {
    if (epoch != fork_epoch()) {
      static_cast<void>(new (std::nothrow) std::shared_ptr<TaskEngine>(std::move(engine)));
    } else if (engine) {
      engine->end_host(task);
    }
    engine.reset();
  }
};

std::shared_ptr<TaskEngine> use_or_throw(const PyEngine& self) {
  auto engine = self.use();
  if (!engine) throw py::error_already_set();
  return engine;
}

std::unique_ptr<PyEngine> wrap(std::shared_ptr<TaskEngine> engine, py::object make_error) {
  auto made = std::make_unique<PyEngine>();
  made->engine = std::move(engine);
  made->make_error = std::move(make_error);
  made->epoch = fork_epoch();
  return made;
}

std::unique_ptr<PyEngine> engine_of_tree(const PyTree& tree) {
  auto running = tree.use();
  if (!running) throw py::error_already_set();
  TaskEngine& engine = running->engine();
  return wrap(std::shared_ptr<TaskEngine>(std::move(running), &engine), tree.make_error);
}

std::unique_ptr<PyEngine> local_engine(py::object make_error, int chips) {
  TaskEngineConfig config;
  config.regions = static_cast<std::uint32_t>(chips) + 1;
  auto local = std::make_shared<LocalEngine>(config);
  TaskEngine& engine = local->engine;
  return wrap(std::shared_ptr<TaskEngine>(std::move(local), &engine), std::move(make_error));
}

void close(PyEngine& self) {
  if (self.epoch != fork_epoch()) return;
  const auto engine = std::exchange(self.engine, nullptr);
  if (!engine) return;
  const py::gil_scoped_release release;
  engine->close();
}

std::vector<std::uint64_t> take_idle_buffers(const PyEngine& self) {
  std::vector<std::uint64_t> out;
  const auto engine = self.use_if_open();
  if (!engine) return out;
  for (const graph::BufferId id : engine->take_idle_buffers()) out.push_back(number_of(id));
  return out;
}

void release_buffer(const PyEngine& self, std::uint64_t number) {
  const auto engine = self.use_if_open();
  if (!engine) return;  // all its memory has gone
  engine->release_buffer(buffer_of(number));
}

std::unique_ptr<PyHostTask> host_task(const PyEngine& self, const py::object& accesses,
                                      const py::object& buffers) {
  const auto engine = use_or_throw(self);
  std::vector<graph::Access> ranges;
  std::vector<graph::BufferId> ids;
  if (!accesses_from(accesses.ptr(), ranges) || !buffers_from(buffers.ptr(), ids))
    throw py::error_already_set();
  auto made = std::make_unique<PyHostTask>();
  graph::Spec spec;
  spec.kind = graph::Kind::kHost;
  spec.accesses = ranges;
  spec.buffers = ids;
  made->make_error = self.make_error;
  try {
    blocking([&](Interrupt* interrupt) {
      made->task = engine->submit_host(spec, Deadline::never(), interrupt);
    });
  } catch (const CallError& error) {
    set_call_error(self.make_error, error);
    throw py::error_already_set();
  }
  made->engine = engine;
  return made;
}

// True when it is its turn, false when the time ran out.
bool wait_turn(const PyHostTask& self, double timeout_s) {
  const auto engine = self.engine;
  if (!engine) throw Error(ErrorCode::kInvalidArgument, "it has ended");
  bool is_its_turn = false;
  TaskWait how = engine->wait_turn(self.task.task, Deadline::at(0), nullptr, is_its_turn);
  if (how == TaskWait::kTimedOut && timeout_s > 0) {
    const Deadline deadline = Deadline::after_seconds(timeout_s);
    blocking([&](Interrupt* interrupt) {
      how = engine->wait_turn(self.task.task, deadline, interrupt, is_its_turn);
    });
  }
  if (how == TaskWait::kTimedOut) return false;
  if (is_its_turn) return true;
  const auto kind =
      how == TaskWait::kInterrupted ? CallError::Kind::kInterrupted : CallError::Kind::kClosed;
  set_call_error(self.make_error, CallError(kind, -1, "the worker is closing or closed"));
  throw py::error_already_set();
}

bool watch_turn(const PyHostTask& self) {
  const auto engine = self.engine;
  return !engine || engine->watch_turn(self.task.task);
}

std::uint64_t host_task_number(const PyHostTask& self) {
  return std::uint64_t{self.task.task.id.generation} << 32 | self.task.task.id.slot;
}

// False when the time ran out.
bool wait_idle_buffers(const PyEngine& self, double timeout_s) {
  const auto engine = use_or_throw(self);
  const Deadline deadline = Deadline::after_seconds(timeout_s);
  TaskWait how = TaskWait::kOk;
  blocking([&](Interrupt* interrupt) { how = engine->wait_idle_buffers(deadline, interrupt); });
  if (how != TaskWait::kInterrupted) return how == TaskWait::kOk;
  set_call_error(self.make_error, CallError(CallError::Kind::kInterrupted, -1, "interrupted"));
  throw py::error_already_set();
}

py::dict counts(const PyEngine& self) {
  const TaskEngine::Counts now = use_or_throw(self)->counts();
  py::dict out;
  out["unfinished"] = now.unfinished;
  out["unsent"] = now.unsent;
  out["records"] = now.records;
  out["ended"] = now.ended;
  out["takeovers"] = now.takeovers;
  return out;
}

PyObject* open_run(PyObject* self, PyObject* const* args, Py_ssize_t given) {
  const PyEngine& wrapped = instance_of<PyEngine>(self);
  return guarded(wrapped.make_error, [&]() -> PyObject* {
    Arguments arguments(args, given, 3);
    const long priority = arguments.integer(1);
    const double timeout_s = arguments.real(2);
    if (!arguments.ok()) return nullptr;
    if (priority < INT16_MIN || priority > INT16_MAX)
      throw Error(ErrorCode::kInvalidArgument, "a priority has 16 bits");
    const auto engine = wrapped.use();
    if (!engine) return nullptr;
    const EngineRunId id =
        engine->open_run(static_cast<std::int16_t>(priority), Deadline::after_seconds(timeout_s));
    return new_run(self, id, args[0]);
  });
}

PyMethodDef methods[] = {
    {"open_run", as_c_function(open_run), METH_FASTCALL, nullptr},
};

}  // namespace

PyEngine::~PyEngine() {
  if (epoch == fork_epoch() || !engine) return;
  static_cast<void>(new (std::nothrow) std::shared_ptr<TaskEngine>(std::move(engine)));
}

std::shared_ptr<TaskEngine> PyEngine::use_if_open() const noexcept {
  return epoch == fork_epoch() ? engine : nullptr;
}

std::shared_ptr<TaskEngine> PyEngine::use() const {
  if (epoch != fork_epoch()) {
    PyErr_SetString(PyExc_RuntimeError,
                    "this Worker belongs to the process that made it; a forked copy cannot use it");
    return nullptr;
  }
  if (!engine) {
    set_call_error(make_error,
                   CallError(CallError::Kind::kClosed, -1, "the worker is closing or closed"));
  }
  return engine;
}

// For each task (callable, outcome, submitted, ended, members, producers), for each member (worker,
// sent, started, ended); times in ns since the run was opened, -1 for never.
py::list tasks_of(const RunTrace& trace) {
  const auto since = [&trace](Nanoseconds time) { return time == 0 ? -1 : time - trace.opened_ns; };
  py::list tasks;
  for (const TaskTrace& task : trace.tasks) {
    py::list members;
    for (const TaskTrace::Member& member : task.members) {
      members.append(py::make_tuple(static_cast<int>(member.worker), since(member.sent_ns),
                                    since(member.started_ns), since(member.ended_ns)));
    }
    tasks.append(py::make_tuple(task.callable_id, static_cast<int>(task.outcome),
                                since(task.submitted_ns), since(task.ended_ns), members,
                                task.producers));
  }
  return tasks;
}

void bind_engine(py::module_& module) {
  py::class_<RunTrace, std::shared_ptr<RunTrace>>(module, "RunTrace", py::is_final())
      .def("tasks", &tasks_of);
  py::class_<PyHostTask>(module, "HostTask", py::is_final())
      .def("wait", &wait_turn, py::arg("timeout_s"))
      .def("watch", &watch_turn)
      .def_property_readonly("number", &host_task_number)
      .def("end", [](PyHostTask& self) { self.end(); });
  py::class_<PyEngine> type(module, "TaskEngine", py::is_final());
  type.def_static("of", &engine_of_tree, py::arg("tree"))
      .def_static("local", &local_engine, py::arg("make_error"), py::arg("chips"))
      .def("close", &close)
      .def("open_buffer",
           [](const PyEngine& self) { return number_of(use_or_throw(self)->open_buffer()); })
      .def("release_buffer", &release_buffer, py::arg("buffer"))
      .def("busy_buffers", [](const PyEngine& self) { return use_or_throw(self)->busy_buffers(); })
      .def("wait_idle_buffers", &wait_idle_buffers, py::arg("timeout_s"))
      .def("take_idle_buffers", &take_idle_buffers)
      .def(
          "worker_back",
          [](const PyEngine& self, int worker) { use_or_throw(self)->worker_back(worker); },
          py::arg("worker"))
      .def("host_task", &host_task, py::arg("accesses"), py::arg("buffers"))
      .def("counts", &counts);
  add_methods(type, methods);
  bind_run_type(module);
  bind_task_type(module);
}

}  // namespace simpler::bindings
