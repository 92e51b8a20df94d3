#include "tree.h"

#include <pybind11/stl.h>

#include <array>
#include <new>
#include <string>
#include <vector>

#include "bindings.h"
#include "child_port.h"
#include "errors.h"
#include "gil.h"
#include "hierarchical/base/error.h"
#include "hierarchical/os/fork_epoch.h"

namespace simpler::bindings {

namespace {

const char* state_name(ChildState state) {
  switch (state) {
    case ChildState::kStarting:
      return "starting";
    case ChildState::kReady:
      return "ready";
    case ChildState::kDead:
      return "dead";
    case ChildState::kClosed:
      break;
  }
  return "closed";
}

std::unique_ptr<PyTree> make_tree(std::vector<int> device_ids, int num_sub_workers,
                                  std::size_t max_control_payload, std::size_t heap_bytes,
                                  double spin_us, std::uint32_t max_pending_tasks,
                                  double patience_s, std::vector<int> keep_fds,
                                  const std::string& name, py::object make_error) {
  TreeOptions options;
  options.device_ids = std::move(device_ids);
  options.num_sub_workers = num_sub_workers;
  options.max_payload = max_control_payload;
  options.heap_bytes = heap_bytes;
  options.spin_ns = static_cast<Nanoseconds>(spin_us * 1e3);
  options.task_window = max_pending_tasks;
  if (patience_s < 1e9) options.patience_ns = static_cast<Nanoseconds>(patience_s * 1e9);
  options.keep_descriptors = std::move(keep_fds);
  options.name = name;
  auto tree = std::make_unique<PyTree>();
  tree->max_payload = max_control_payload;
  tree->builder.emplace(std::move(options));
  tree->heap = tree->builder->heap();
  tree->make_error = std::move(make_error);
  tree->epoch = fork_epoch();
  return tree;
}

ForkHooks python_hooks() {
  ForkHooks hooks;
  hooks.before = [] { PyOS_BeforeFork(); };
  hooks.after_in_parent = [] { PyOS_AfterFork_Parent(); };
  hooks.after_in_child = [] {
    PyOS_AfterFork_Child();
    py::module_::import("_signal").attr("set_wakeup_fd")(-1);  // an event loop of the parent's
  };
  return hooks;
}

// Runs in the child with the GIL, as its whole life.
int run_child(const ChildContext& context, const py::object& child_main, std::size_t max_payload) {
  auto port = std::make_unique<ChildPort>(context, max_payload);
  ChildPort& child = *port;
  const py::object handle = py::cast(std::move(port));
  try {
    child_main(handle);
    return 0;
  } catch (py::error_already_set& error) {
    child.fail_start(error);
    return kChildThrew;
  }
}

[[noreturn]] void raise(const py::object& make_error, const CallError& error) {
  set_call_error(make_error, error);
  throw py::error_already_set();
}

// Errors of start() that are not one child's own.
[[noreturn]] void raise_startup(const py::object& make_error, const Error& error) {
  raise(make_error, CallError(CallError::Kind::kStartup, -1, error.what()));
}

std::shared_ptr<RunningTree> use_or_throw(const PyTree& tree) {
  auto running = tree.use();
  if (!running) throw py::error_already_set();
  return running;
}

std::unique_ptr<Interrupt> make_interrupt() {
  if (!on_main_thread()) return nullptr;
  return std::make_unique<SignalCheck>();
}

py::list start(PyTree& tree, const py::object& child_main,
               const std::vector<std::shared_ptr<SharedRegion>>& regions, double timeout_s) {
  if (tree.epoch != fork_epoch() || !tree.builder) {
    throw Error(ErrorCode::kClosed, "the tree was started already, or in another process");
  }
  std::vector<const SharedRegion*> keep;
  keep.reserve(regions.size());
  for (const auto& region : regions) keep.push_back(region.get());
  TreeBuilder builder = std::move(*tree.builder);
  tree.builder.reset();
  TreeBuilder::Started started;
  // Forks with the GIL held, as os.fork() does; the waiting below it lets go (see make_interrupt's
  // caller).
  std::optional<py::gil_scoped_release> release;
  const auto waiting = [&release] {
    release.emplace();
    return make_interrupt();
  };
  tree.child_main = child_main;
  try {
    started = std::move(builder).start(
        [&tree](const ChildContext& context) {
          return run_child(context, tree.child_main, tree.max_payload);
        },
        python_hooks(), std::move(keep), Deadline::after_seconds(timeout_s), waiting);
    release.reset();
  } catch (const CallError& error) {
    release.reset();
    raise(tree.make_error, error);
  } catch (const Error& error) {
    release.reset();
    raise_startup(tree.make_error, error);
  }
  tree.running = std::move(started.tree);
  py::list answers;
  for (const auto& answer : started.answers) answers.append(to_bytes(answer));
  return answers;
}

void kill(PyTree& tree, int worker) {
  const auto running = use_or_throw(tree);
  const py::gil_scoped_release release;
  running->manager().kill(worker);
}

py::bytes restart(PyTree& tree, int worker, double timeout_s) {
  const auto running = use_or_throw(tree);
  try {
    std::vector<std::byte> answer;
    {
      const py::gil_scoped_release release;
      const auto interrupt = make_interrupt();
      answer =
          running->manager().restart(worker, Deadline::after_seconds(timeout_s), interrupt.get());
    }
    return to_bytes(answer);
  } catch (const CallError& error) {
    raise(tree.make_error, error);
  }
}

void close(PyTree& tree, double timeout_s) {
  if (tree.epoch != fork_epoch()) return;
  tree.builder.reset();
  std::shared_ptr<RunningTree> running = tree.running;
  if (!running) return;
  {
    const py::gil_scoped_release release;
    const auto interrupt = make_interrupt();
    running->close(Deadline::after_seconds(timeout_s), interrupt.get());
  }
  tree.running.reset();
  if (PyErr_Occurred() != nullptr)
    throw py::error_already_set();  // a signal's, after all is closed
}

py::dict running_record(const char* lane, const char* what, int op, std::uint64_t arg,
                        std::uint64_t id, Nanoseconds since) {
  py::dict record;
  record["lane"] = lane;
  record["what"] = what;
  record["op"] = op;
  record["arg"] = arg;
  record["id"] = id;
  // `since` is the child's word: 0 before it has spoken, or any number.
  const Nanoseconds now = monotonic_now();
  const Nanoseconds spent = since > 0 && since < now ? now - since : 0;
  record["seconds"] = static_cast<double>(spent) * 1e-9;
  return record;
}

py::list running_list(ChildProcess& child) {
  py::list running;
  if (const auto task = child.ring.running()) {
    running.append(
        running_record("main", "task", 0, task->callable_id, task->seq, task->started_ns));
  }
  std::array<InFlight, kControlSlots> calls;
  const int count = child.control.running(calls);
  for (int i = 0; i < count; ++i) {
    const InFlight& call = calls[static_cast<std::size_t>(i)];
    running.append(running_record(call.lane == Lane::kMain ? "main" : "service", "control",
                                  static_cast<int>(call.op), call.arg, call.request_id,
                                  call.started_ns));
  }
  return running;
}

py::dict status_record(const WorkerManager::ChildReport& report, const char* kind,
                       py::list running) {
  py::dict record;
  record["kind"] = kind;
  record["worker"] = report.worker;
  record["device_id"] = report.device_id;
  record["pid"] = report.pid;
  record["state"] = state_name(report.state);
  record["generation"] = report.generation;
  record["first_error"] =
      report.first_cause.empty() ? py::object(py::none()) : py::object(to_text(report.first_cause));
  record["running"] = std::move(running);
  return record;
}

py::list status(const PyTree& tree) {
  const auto running = use_or_throw(tree);
  WorkerManager& manager = running->manager();
  py::list out;
  for (int worker = 0; worker < manager.size(); ++worker) {
    ChildProcess& child = manager.child(worker);
    const WorkerManager::ChildReport report = manager.report(worker);
    out.append(
        status_record(report, report.is_chip ? "chip" : "sub",
                      report.state == ChildState::kReady ? running_list(child) : py::list()));
  }
  out.append(status_record(manager.report_spare(), "spare", py::list()));
  return out;
}

py::list counters(const PyTree& tree) {
  const auto running = use_or_throw(tree);
  WorkerManager& manager = running->manager();
  py::list out;
  for (int worker = 0; worker < manager.size(); ++worker) {
    ChildProcess& child = manager.child(worker);
    const ControlCounters& counters = child.control.counters();
    py::dict record;
    record["calls"] = counters.calls.load();
    record["timeouts"] = counters.timeouts.load();
    record["late_replies"] = counters.late_replies.load();
    record["request_bytes"] = counters.request_bytes.load();
    record["reply_bytes"] = counters.reply_bytes.load();
    record["tasks"] = child.ring.published();
    record["restarts"] = child.generation.load();
    record["queued"] = running->async().queued(worker);
    out.append(record);
  }
  return out;
}

}  // namespace

PyTree::~PyTree() {
  if (epoch == fork_epoch()) return;
  if (running)
    static_cast<void>(new (std::nothrow) std::shared_ptr<RunningTree>(std::move(running)));
  if (builder) static_cast<void>(new (std::nothrow) TreeBuilder(std::move(*builder)));
}

std::shared_ptr<RunningTree> PyTree::use() const {
  if (epoch != fork_epoch()) {
    PyErr_SetString(PyExc_RuntimeError,
                    "this Worker belongs to the process that made it; a forked copy cannot use it");
    return nullptr;
  }
  if (!running) {
    set_call_error(make_error,
                   CallError(CallError::Kind::kClosed, -1, "the worker is not running"));
    return nullptr;
  }
  return running;
}

void bind_tree(py::module_& module) {
  py::class_<PyTree> type(module, "Tree", py::is_final());
  type.def(py::init(&make_tree), py::kw_only(), py::arg("device_ids"), py::arg("num_sub_workers"),
           py::arg("max_control_payload"), py::arg("heap_bytes"), py::arg("spin_us"),
           py::arg("max_pending_tasks"), py::arg("patience_s"), py::arg("keep_fds"),
           py::arg("name"), py::arg("make_error"))
      .def_readonly("heap", &PyTree::heap)
      .def("start", &start, py::arg("child_main"), py::arg("keep_regions"), py::arg("timeout_s"))
      .def("kill", &kill, py::arg("worker"))
      .def("restart", &restart, py::arg("worker"), py::arg("timeout_s"))
      .def("close", &close, py::arg("timeout_s"))
      .def("alive",
           [](const PyTree& tree, int worker) {
             return use_or_throw(tree)->manager().report(worker).state == ChildState::kReady;
           })
      .def("generation",
           [](const PyTree& tree, int worker) {
             return use_or_throw(tree)->manager().child(worker).generation.load();
           })
      .def(
          "name_extension",
          [](PyTree& tree, std::uint32_t id, std::string name) {
            (tree.builder ? tree.builder->names() : use_or_throw(tree)->names())
                .name_extension(id, std::move(name));
          },
          py::arg("ext_id"), py::arg("name"))
      .def(
          "name_callable",
          [](PyTree& tree, std::uint32_t id, std::string name) {
            (tree.builder ? tree.builder->names() : use_or_throw(tree)->names())
                .name_callable(id, std::move(name));
          },
          py::arg("callable_id"), py::arg("name"))
      .def(
          "name_provider",
          [](PyTree& tree, std::uint32_t id, std::string name) {
            (tree.builder ? tree.builder->names() : use_or_throw(tree)->names())
                .name_provider(id, std::move(name));
          },
          py::arg("provider_id"), py::arg("name"))
      .def("status", &status)
      .def("counters", &counters);
  add_tree_calls(type);
  add_tree_events(type);
}

}  // namespace simpler::bindings
