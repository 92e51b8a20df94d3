// C methods for the hot path: arguments by position, errors as Python errors, waiting without the
// GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <climits>
#include <cstdint>
#include <exception>
#include <new>

#include "errors.h"
#include "gil.h"
#include "hierarchical/base/deadline.h"
#include "hierarchical/base/error.h"

namespace simpler::bindings {

// A caller keeps the GIL for this long: most replies come sooner, and giving it up and taking it
// back costs more than it gives anybody.
inline constexpr Nanoseconds kSpinWithGil = 2'000;

// The C++ object of an instance of a pybind11 class without another base.
template <typename T>
T& instance_of(PyObject* self) noexcept {
  auto* instance = reinterpret_cast<py::detail::instance*>(self);
  return *static_cast<T*>(instance->simple_layout ? instance->simple_value_holder[0]
                                                  : instance->get_value_and_holder().value_ptr());
}

// The first argument that does not fit leaves a Python error and ok() false.
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

// Runs `body` with everything it may throw as a Python error; nullptr then.
template <typename Body>
PyObject* guarded(const py::object& make_error, Body body) noexcept {
  try {
    return body();
  } catch (const CallError& error) {
    set_call_error(make_error, error);
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

inline PyCFunction as_c_function(PyObject* (*method)(PyObject*, PyObject* const*,
                                                     Py_ssize_t)) noexcept {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(method));
}

// Adds positional-only C methods to a pybind11 class. `methods` must live for ever.
template <std::size_t N>
void add_methods(const py::handle& type, PyMethodDef (&methods)[N]) {
  for (PyMethodDef& method : methods) {
    PyObject* descriptor = PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), &method);
    if (descriptor == nullptr) throw py::error_already_set();
    type.attr(method.ml_name) = py::reinterpret_steal<py::object>(descriptor);
  }
}

}  // namespace simpler::bindings
