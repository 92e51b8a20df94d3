#include "errors.h"

#include <sys/syscall.h>
#include <unistd.h>

#include "gil.h"
#include "hierarchical/os/fork_epoch.h"

namespace simpler::bindings {

namespace {

PyObject* exception_for(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
    case ErrorCode::kProtocol:
      return PyExc_ValueError;
    case ErrorCode::kOutOfMemory:
      return PyExc_MemoryError;
    case ErrorCode::kSystem:
      return PyExc_OSError;
    default:
      return PyExc_RuntimeError;
  }
}

const char* kind_name(CallError::Kind kind) {
  switch (kind) {
    case CallError::Kind::kRemote:
      return "remote";
    case CallError::Kind::kDied:
      return "died";
    case CallError::Kind::kTimedOut:
      return "timeout";
    case CallError::Kind::kClosed:
      return "closed";
    case CallError::Kind::kBackPressure:
      return "backpressure";
    case CallError::Kind::kProtocol:
      return "protocol";
    case CallError::Kind::kInterrupted:
    case CallError::Kind::kStartup:
      break;
  }
  return "startup";
}

}  // namespace

void set_error(const Error& error) { PyErr_SetString(exception_for(error.code()), error.what()); }

void register_error_translator(py::module_& module) {
  static_cast<void>(module);
  // NOLINTNEXTLINE(performance-unnecessary-value-param): the signature is pybind11's
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      set_error(error);
    }
  });
}

py::object call_error_object(const py::object& make_error, const CallError& error) {
  py::object remote = py::none();
  py::object limit = py::none();
  if (error.kind == CallError::Kind::kRemote) {
    remote = py::make_tuple(to_text(error.failure.type_name), to_text(error.failure.message),
                            to_text(error.failure.traceback));
  }
  if (error.kind == CallError::Kind::kTimedOut && !error.waited_for.empty()) {
    limit = py::make_tuple(to_text(error.waited_for), error.timeout_s);
  }
  return make_error(kind_name(error.kind), error.worker, to_text(error.message), error.started,
                    remote, limit);
}

void set_call_error(const py::object& make_error, const CallError& error) {
  if (error.kind == CallError::Kind::kInterrupted) {
    if (PyErr_Occurred() == nullptr) PyErr_SetNone(PyExc_KeyboardInterrupt);
    return;
  }
  try {
    const py::object made = call_error_object(make_error, error);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
  } catch (py::error_already_set& failed) {
    failed.restore();
  }
}

bool SignalCheck::pending() {
  if (raised_) return true;
  const py::gil_scoped_acquire acquire;
  raised_ = PyErr_CheckSignals() != 0;
  return raised_;
}

bool on_main_thread() noexcept {
  // In a forked copy the forking thread becomes the main thread, so the answer is kept per epoch.
  thread_local std::uint32_t known_epoch = ~std::uint32_t{0};
  thread_local bool is_main = false;
  const std::uint32_t epoch = fork_epoch();
  if (known_epoch != epoch) {
    known_epoch = epoch;
    is_main = static_cast<pid_t>(syscall(SYS_gettid)) == getpid();
  }
  return is_main;
}

}  // namespace simpler::bindings
