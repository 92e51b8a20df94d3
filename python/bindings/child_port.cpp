#include "child_port.h"

#include <pybind11/stl.h>

#include "bindings.h"
#include "gil.h"
#include "hierarchical/base/error.h"
#include "hierarchical/ipc/error_codec.h"
#include "hierarchical/os/descriptor.h"
#include "hierarchical/workers/native_kernel.h"

namespace simpler::bindings {

namespace {

// The calling thread's hold on the GIL between a handler and the moment its reply is out: letting
// go of the GIL after the reply takes the time of that off the caller's wait.
struct GilHold {
  PyThreadState* state = nullptr;
  bool held = false;

  void take() {
    if (held) return;
    if (state == nullptr) {
      PyGILState_Ensure();  // a new thread's state, kept for the life of the process
      state = PyThreadState_Get();
    } else {
      PyEval_RestoreThread(state);
    }
    held = true;
  }
  void drop() {
    if (!held) return;
    held = false;
    state = PyEval_SaveThread();
  }
};
thread_local GilHold gil;

}  // namespace

ChildPort::ChildPort(const ChildContext& context, std::size_t max_payload)
    : context_(context),
      max_payload_(max_payload),
      loop_(context.memory.header(), context.child.block, context.memory.payload(),
            context.memory.space(context.child.index), context.child.seat, context.spin_ns, *this),
      device_(py::int_(context.child.device_id)) {}

void ChildPort::set_extension(std::uint32_t id, py::object handler, py::object chip_view) {
  if (extensions_.size() <= id) extensions_.resize(id + 1);
  extensions_[id] = {std::move(handler), std::move(chip_view)};
}

void ChildPort::set_native_kernel(std::uint32_t callable_id, std::uintptr_t function) {
  if (native_kernels_.size() <= callable_id) native_kernels_.resize(callable_id + 1, nullptr);
  native_kernels_[callable_id] = reinterpret_cast<simpler_kernel_fn>(function);
}

void ChildPort::send_log(const py::bytes& frame) {
  const ReadBuffer buffer(frame.ptr());
  const py::gil_scoped_release release;
  const std::lock_guard lock(log_mutex_);
  send_frame(context_.log_socket, buffer.bytes());
}

void ChildPort::serve(py::object on_control, py::object on_task, py::object reply_of,
                      py::object describe) {
  on_control_ = std::move(on_control);
  on_task_ = std::move(on_task);
  reply_of_ = std::move(reply_of);
  describe_ = std::move(describe);
  gil.held = true;  // as every function called from Python holds it
  gil.drop();
  loop_.run();
  gil.take();
}

void ChildPort::fail_start(py::error_already_set& error) {
  error.restore();
  const RemoteFailure failure = describe_error();
  loop_.fail_start(encode_failure(failure));
}

PyObject* ChildPort::call_extension(const Extension& extension, const ChildRequest& request) {
  PyObject* payload = bytes_from(request.payload);
  if (payload == nullptr) return nullptr;
  PyObject* const args[] = {extension.chip_view.ptr(), payload, device_.ptr()};
  PyObject* result = PyObject_Vectorcall(extension.handler.ptr(), args, 3, nullptr);
  Py_DECREF(payload);
  if (result == nullptr || PyBytes_CheckExact(result)) return result;
  PyObject* id = PyLong_FromUnsignedLong(request.arg);
  PyObject* reply =
      id == nullptr ? nullptr : PyObject_CallFunctionObjArgs(reply_of_.ptr(), id, result, nullptr);
  Py_XDECREF(id);
  Py_DECREF(result);
  return reply;
}

PyObject* ChildPort::call_control(const ChildRequest& request) {
  try {
    const py::bytes meta = to_bytes(request.meta);
    const auto payload = py::memoryview::from_memory(
        request.payload.data(), static_cast<py::ssize_t>(request.payload.size()));
    py::object result = on_control_(static_cast<int>(request.op), request.arg, meta, payload);
    // The request's memory is the parent's again after the reply: a view kept by the handler must
    // not see it.
    PyObject* released = PyObject_CallMethod(payload.ptr(), "release", nullptr);
    if (released == nullptr) return nullptr;
    Py_DECREF(released);
    return result.release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
}

bool ChildPort::write_result(PyObject* result, ReplyWriter& reply) {
  const py::object owned = py::reinterpret_steal<py::object>(result);
  if (owned.is_none()) return true;
  const ReadBuffer buffer(owned.ptr());
  if (!buffer.ok()) return false;
  const std::span<const std::byte> bytes = buffer.bytes();
  if (bytes.size() > max_payload_) {
    PyErr_Format(PyExc_ValueError, "the reply of %zu bytes exceeds max_control_payload (%zu)",
                 bytes.size(), max_payload_);
    return false;
  }
  if (bytes.size() <= kTaskInlineBytes) {
    reply.write(ReplyStatus::kOk, bytes);
  } else {
    const py::gil_scoped_release release;  // may wait for space
    reply.write(ReplyStatus::kOk, bytes);
  }
  return true;
}

RemoteFailure ChildPort::describe_error() {
  PyObject* type = nullptr;
  PyObject* value = nullptr;
  PyObject* trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (trace != nullptr && value != nullptr) PyException_SetTraceback(value, trace);
  const py::object owned_type = py::reinterpret_steal<py::object>(type);
  const py::object owned = py::reinterpret_steal<py::object>(value);
  const py::object owned_trace = py::reinterpret_steal<py::object>(trace);
  RemoteFailure failure{"Exception", "an exception that could not be described", "", false};
  if (!owned) return failure;
  failure.type_name = Py_TYPE(owned.ptr())->tp_name;
  try {
    if (describe_) {
      const py::tuple parts = describe_(owned);
      const auto text = [&](int i) {
        return py::str(parts[static_cast<std::size_t>(i)])
            .attr("encode")("utf-8", "backslashreplace")
            .cast<std::string>();
      };
      failure = {text(0), text(1), text(2), false};
    } else {
      failure.message = py::str(owned).cast<std::string>();
      const py::object format = py::module_::import("traceback").attr("format_exception");
      failure.traceback = py::str("").attr("join")(format(owned)).cast<std::string>();
    }
  } catch (const std::exception&) {  // its own __str__ failed, say: its type is all there is
    failure.message = "an exception that could not be described";
  }
  return failure;
}

void ChildPort::write_failure(const RemoteFailure& failure, ReplyWriter& reply) noexcept {
  const std::vector<std::byte> wire = encode_failure(failure);
  reply.write(ReplyStatus::kFailure, wire);
}

void ChildPort::write_error(ReplyWriter& reply) noexcept {
  const RemoteFailure failure = describe_error();
  const py::gil_scoped_release release;
  write_failure(failure, reply);
}

void ChildPort::control(const ChildRequest& request, ReplyWriter& reply) noexcept {
  gil.take();
  const bool direct = request.op == ControlOp::EXTENSION && request.meta.empty() &&
                      request.arg < extensions_.size() && extensions_[request.arg].handler;
  PyObject* result =
      direct ? call_extension(extensions_[request.arg], request) : call_control(request);
  if (result == nullptr || !write_result(result, reply)) write_error(reply);
}

void ChildPort::task(std::uint32_t callable_id, std::span<const std::byte> args,
                     ReplyWriter& reply) noexcept {
  if (callable_id < native_kernels_.size() && native_kernels_[callable_id] != nullptr) {
    try {
      const KernelOutcome outcome =
          call_native_kernel(native_kernels_[callable_id], args, device_id());
      if (outcome.code != 0) write_failure({"RuntimeError", outcome.message, "", false}, reply);
    } catch (const Error& error) {
      write_failure({"ValueError", error.what(), "", false}, reply);
    }
    return;
  }
  gil.take();
  PyObject* bytes = bytes_from(args);
  PyObject* id = PyLong_FromUnsignedLong(callable_id);
  PyObject* result = nullptr;
  if (bytes != nullptr && id != nullptr) {
    result = PyObject_CallFunctionObjArgs(on_task_.ptr(), id, bytes, nullptr);
  }
  Py_XDECREF(bytes);
  Py_XDECREF(id);
  if (result == nullptr || !write_result(result, reply)) write_error(reply);
}

void ChildPort::replied() noexcept { gil.drop(); }

void bind_child_port(py::module_& module) {
  py::class_<ChildPort>(module, "ChildPort", py::is_final())
      .def_property_readonly("worker", &ChildPort::worker)
      .def_property_readonly("is_chip", &ChildPort::is_chip)
      .def_property_readonly("device_id", &ChildPort::device_id)
      .def_property_readonly("generation", &ChildPort::generation)
      .def("set_extension", &ChildPort::set_extension, py::arg("ext_id"), py::arg("handler"),
           py::arg("chip_view"))
      .def("set_native_kernel", &ChildPort::set_native_kernel, py::arg("callable_id"),
           py::arg("function_address"))
      .def("send_log", &ChildPort::send_log, py::arg("frame"))
      .def("serve", &ChildPort::serve, py::kw_only(), py::arg("on_control"), py::arg("on_task"),
           py::arg("reply_of"), py::arg("describe"));
}

}  // namespace simpler::bindings
