// Tree's blocking calls as C methods: the time of a call is the time of the exchange, not of its
// binding.
#include <array>
#include <climits>
#include <vector>

#include "errors.h"
#include "gil.h"
#include "hierarchical/base/error.h"
#include "hierarchical/workers/replies.h"
#include "tree.h"

namespace simpler::bindings {

namespace {

// A caller keeps the GIL for this long: most replies come sooner, and giving it up and taking it
// back costs more than it gives anybody.
constexpr Nanoseconds kSpinWithGil = 2'000;

PyTree& tree_of(PyObject* self) {
  auto* instance = reinterpret_cast<py::detail::instance*>(self);
  return *static_cast<PyTree*>(instance->simple_layout
                                   ? instance->simple_value_holder[0]
                                   : instance->get_value_and_holder().value_ptr());
}

// Arguments by position; the first that does not fit leaves a Python error and ok() false.
class Arguments {
 public:
  Arguments(PyObject* const* args, Py_ssize_t given, Py_ssize_t expected) : args_(args) {
    if (given != expected) {
      PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, given);
      ok_ = false;
    }
  }
  [[nodiscard]] bool ok() const noexcept { return ok_; }

  long integer(int i) {
    if (!ok_) return 0;
    const long value = PyLong_AsLong(args_[i]);
    if (value == -1 && PyErr_Occurred() != nullptr) ok_ = false;
    return value;
  }
  // A worker's index: any int, so that one out of range is refused as such.
  int worker(int i) {
    if (!ok_) return 0;
    int overflow = 0;
    const long value = PyLong_AsLongAndOverflow(args_[i], &overflow);
    if (value == -1 && PyErr_Occurred() != nullptr) ok_ = false;
    if (overflow != 0 || value < -1 || value > INT_MAX) return -1;
    return static_cast<int>(value);
  }
  std::uint64_t number(int i) {
    if (!ok_) return 0;
    const std::uint64_t value = PyLong_AsUnsignedLongLong(args_[i]);
    if (value == ~std::uint64_t{0} && PyErr_Occurred() != nullptr) ok_ = false;
    return value;
  }
  double real(int i) {
    if (!ok_) return 0;
    const double value = PyFloat_AsDouble(args_[i]);
    if (value == -1.0 && PyErr_Occurred() != nullptr) ok_ = false;
    return value;
  }

 private:
  PyObject* const* args_;
  bool ok_ = true;
};

// Everything that may throw, as Python errors.
template <typename Body>
PyObject* guarded(const PyTree& tree, Body body) noexcept {
  try {
    return body();
  } catch (const CallError& error) {
    set_call_error(tree.make_error, error);
  } catch (const Error& error) {
    set_error(error);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// Waits without the GIL, on the main thread looking for signals.
template <typename Body>
void blocking(Body body) {
  const bool main = on_main_thread();
  const py::gil_scoped_release release;
  SignalCheck check;
  body(main ? &check : nullptr);
}

// For a signal handler that has raised while the reply came: it ends the call, and the reply is
// dropped.
[[noreturn]] void drop_reply(ChildProcess& child, int slot) {
  bool is_error = false;
  try {
    take_reply(child, slot);
  } catch (const CallError&) {
    is_error = true;  // and the slot is released
  }
  if (!is_error) child.control.release(slot);
  throw CallError(CallError::Kind::kInterrupted, child.index, "interrupted");
}

PyObject* call(RunningTree& running, ChildProcess& child, const ControlRequest& request) {
  int slot = running.poll_post(child, request);
  if (slot < 0)
    blocking([&](Interrupt* interrupt) { slot = running.wait_post(child, request, interrupt); });
  if (!child.control.spin_reply(slot, kSpinWithGil)) {
    blocking([&](Interrupt* interrupt) { running.wait_reply(child, slot, request, interrupt); });
    if (PyErr_Occurred() != nullptr) drop_reply(child, slot);
  } else {
    running.wait_reply(child, slot, request, nullptr);  // nothing is due any more: does not wait
  }
  PyObject* reply = bytes_from(take_reply(child, slot));
  child.control.release(slot);
  return reply;
}

ControlRequest request_from(Arguments& arguments, int first, const ReadBuffer& meta,
                            const ReadBuffer& payload) {
  ControlRequest request;
  request.op = static_cast<ControlOp>(arguments.integer(first));
  request.arg = static_cast<std::uint32_t>(arguments.integer(first + 1));
  const auto lane = static_cast<Lane>(arguments.integer(first + 2));
  const bool any = request.op == ControlOp::PING || request.op == ControlOp::ECHO;
  request.lane = any ? Lane::kAny : lane;
  request.meta = meta.bytes();
  request.payload = payload.bytes();
  request.timeout_s = arguments.real(first + 5);
  request.deadline = Deadline::after_seconds(request.timeout_s);
  return request;
}

PyObject* run_call(PyObject* self, PyObject* const* args, Py_ssize_t given, bool held) noexcept {
  PyTree& tree = tree_of(self);
  return guarded(tree, [&]() -> PyObject* {
    Arguments arguments(args, given, held ? 8 : 7);
    if (!arguments.ok()) return nullptr;
    const auto running = tree.use();
    if (!running) return nullptr;
    const ReadBuffer meta(args[4]);
    const ReadBuffer payload(args[5]);
    if (!meta.ok() || !payload.ok()) return nullptr;
    const int worker = arguments.worker(0);
    ControlRequest request = request_from(arguments, 1, meta, payload);
    if (held) request.hold = arguments.number(7);
    if (!arguments.ok()) return nullptr;
    ChildProcess& child = running->manager().child(worker);
    try {
      return call(*running, child, request);
    } catch (const CallError& error) {
      if (error.kind == CallError::Kind::kInterrupted && !error.started)
        running->report_over(child.index, request.hold);
      throw;
    }
  });
}

PyObject* tree_call(PyObject* self, PyObject* const* args, Py_ssize_t given) {
  return run_call(self, args, given, false);
}
PyObject* tree_call_held(PyObject* self, PyObject* const* args, Py_ssize_t given) {
  return run_call(self, args, given, true);
}

PyObject* tree_publish(PyObject* self, PyObject* const* args, Py_ssize_t given) {
  PyTree& tree = tree_of(self);
  return guarded(tree, [&]() -> PyObject* {
    Arguments arguments(args, given, 5);
    if (!arguments.ok()) return nullptr;
    const auto running = tree.use();
    if (!running) return nullptr;
    const ReadBuffer task(args[2]);
    if (!task.ok()) return nullptr;
    const int worker = arguments.worker(0);
    const auto callable = static_cast<std::uint32_t>(arguments.integer(1));
    const std::uint64_t after = arguments.number(3);
    const double timeout_s = arguments.real(4);
    if (!arguments.ok()) return nullptr;
    ChildProcess& child = running->manager().child(worker);
    std::uint64_t seq = 0;
    const bool at_once = task.bytes().size() <= kTaskInlineBytes && child.ring.has_room_now() &&
                         child.ring.publish(callable, task.bytes(), after, Deadline::at(0), nullptr,
                                            seq) == TaskWait::kOk;
    if (!at_once) {
      const Deadline deadline = Deadline::after_seconds(timeout_s);
      blocking([&](Interrupt* interrupt) {
        seq = running->publish(child, callable, task.bytes(), after, deadline, interrupt);
      });
    }
    return PyLong_FromUnsignedLongLong(seq);
  });
}

PyObject* outcome_tuple(const TaskOutcome& outcome) {
  switch (outcome.status) {
    case TaskStatus::kDone: {
      PyObject* bytes = bytes_from(outcome.result);
      return bytes == nullptr ? nullptr : Py_BuildValue("(iNO)", 0, bytes, Py_None);
    }
    case TaskStatus::kSkipped:
      return Py_BuildValue("(iyO)", 2, "", Py_None);
    default:
      break;
  }
  const RemoteFailure failure = decode_failure(outcome.result);
  const py::tuple remote = py::make_tuple(to_text(failure.type_name), to_text(failure.message),
                                          to_text(failure.traceback));
  return Py_BuildValue("(iyO)", 1, "", remote.ptr());
}

PyObject* tree_wait_task(PyObject* self, PyObject* const* args, Py_ssize_t given) {
  PyTree& tree = tree_of(self);
  return guarded(tree, [&]() -> PyObject* {
    Arguments arguments(args, given, 3);
    if (!arguments.ok()) return nullptr;
    const auto running = tree.use();
    if (!running) return nullptr;
    const int worker = arguments.worker(0);
    const std::uint64_t seq = arguments.number(1);
    const double timeout_s = arguments.real(2);
    if (!arguments.ok()) return nullptr;
    ChildProcess& child = running->manager().child(worker);
    TaskOutcome outcome;
    bool done = false;
    if (timeout_s <= 0 || child.ring.spin(seq, kSpinWithGil)) {
      done = running->wait_task(child, seq, Deadline::at(0), nullptr, outcome);
    } else {
      const Deadline deadline = Deadline::after_seconds(timeout_s);
      blocking([&](Interrupt* interrupt) {
        done = running->wait_task(child, seq, deadline, interrupt, outcome);
      });
    }
    if (!done) Py_RETURN_NONE;
    return outcome_tuple(outcome);
  });
}

PyMethodDef methods[] = {
    {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(tree_call)), METH_FASTCALL,
     nullptr},
    {"call_held", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(tree_call_held)),
     METH_FASTCALL, nullptr},
    {"publish", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(tree_publish)),
     METH_FASTCALL, nullptr},
    {"wait_task", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(tree_wait_task)),
     METH_FASTCALL, nullptr},
};

}  // namespace

void add_tree_calls(py::class_<PyTree>& type) {
  for (PyMethodDef& method : methods) {
    PyObject* descriptor = PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), &method);
    if (descriptor == nullptr) throw py::error_already_set();
    type.attr(method.ml_name) = py::reinterpret_steal<py::object>(descriptor);
  }
}

}  // namespace simpler::bindings
