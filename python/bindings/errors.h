// From the core's exceptions to Python's.
#pragma once

#include <pybind11/pybind11.h>

#include "hierarchical/base/error.h"
#include "hierarchical/base/interrupt.h"
#include "hierarchical/workers/call_error.h"

namespace simpler::bindings {

namespace py = pybind11;

// Makes Error raise ValueError, MemoryError, OSError or RuntimeError according to its code.
void register_error_translator(py::module_& module);
// Sets the Python error for `error`, as the translator does. REQUIRES: the GIL.
void set_error(const Error& error);

// Sets what make_error(kind, worker, message, started, remote) returns as the Python error; for
// kInterrupted keeps the error that the signal handler has set. REQUIRES: the GIL.
void set_call_error(const py::object& make_error, const CallError& error);
// The exception object instead.
py::object call_error_object(const py::object& make_error, const CallError& error);

// Looks for signals. Exists only on the main thread: elsewhere a blocked call sleeps undisturbed.
class SignalCheck : public Interrupt {
 public:
  bool pending() override;

 private:
  bool raised_ = false;
};

// True on the thread that Python calls the main thread.
bool on_main_thread() noexcept;

}  // namespace simpler::bindings
