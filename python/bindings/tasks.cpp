// Task arguments to and from their wire form, and direct calls of native kernels.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings.h"
#include "gil.h"
#include "hierarchical/base/error.h"
#include "hierarchical/ipc/task_codec.h"
#include "hierarchical/workers/native_kernel.h"

namespace simpler::bindings {

namespace {

TensorArg tensor_from(const py::tuple& item) {
  if (item.size() != 6) throw Error(ErrorCode::kInvalidArgument, "a tensor is a tuple of six");
  TensorArg tensor;
  tensor.address = item[0].cast<std::uint64_t>();
  tensor.nbytes = item[1].cast<std::int64_t>();
  tensor.shape = item[2].cast<std::vector<std::int64_t>>();
  tensor.strides = item[3].cast<std::vector<std::int64_t>>();
  tensor.dtype = item[4].cast<std::int32_t>();
  tensor.tag = item[5].cast<std::int32_t>();
  return tensor;
}

TaskItem item_from(py::handle item) {
  PyObject* object = item.ptr();
  if (PyBool_Check(object)) return object == Py_True;
  if (PyLong_Check(object)) {
    const long long value = PyLong_AsLongLong(object);
    if (value == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return static_cast<std::int64_t>(value);
  }
  if (PyFloat_Check(object)) return PyFloat_AS_DOUBLE(object);
  if (PyTuple_Check(object)) return tensor_from(py::reinterpret_borrow<py::tuple>(item));
  throw Error(ErrorCode::kInvalidArgument,
              std::string("not a task argument: ") + Py_TYPE(object)->tp_name);
}

py::bytes pack_task(const py::sequence& items) {
  std::vector<TaskItem> packed;
  packed.reserve(items.size());
  for (const py::handle item : items) packed.push_back(item_from(item));
  return to_bytes(encode_task(packed));
}

py::tuple ints(const std::vector<std::int64_t>& values) {
  py::tuple out(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) out[i] = values[i];
  return out;
}

py::object item_to(const TaskItem& item) {
  if (const auto* flag = std::get_if<bool>(&item)) return py::bool_(*flag);
  if (const auto* integer = std::get_if<std::int64_t>(&item)) return py::int_(*integer);
  if (const auto* real = std::get_if<double>(&item)) return py::float_(*real);
  const auto& tensor = std::get<TensorArg>(item);
  return py::make_tuple(tensor.address, tensor.nbytes, ints(tensor.shape), ints(tensor.strides),
                        tensor.dtype, tensor.tag);
}

py::list unpack_task(const py::bytes& wire) {
  const ReadBuffer buffer(wire.ptr());
  py::list out;
  for (const TaskItem& item : decode_task(buffer.bytes())) out.append(item_to(item));
  return out;
}

std::optional<std::string> call_native(std::uintptr_t function, const py::bytes& args,
                                       std::int32_t device_id) {
  const ReadBuffer buffer(args.ptr());
  const py::gil_scoped_release release;
  const KernelOutcome outcome =
      call_native_kernel(reinterpret_cast<simpler_kernel_fn>(function), buffer.bytes(), device_id);
  if (outcome.code == 0) return std::nullopt;
  return outcome.message;
}

}  // namespace

void bind_tasks(py::module_& module) {
  module.def("pack_task", &pack_task, py::arg("items"));
  module.def("unpack_task", &unpack_task, py::arg("wire"));
  module.def(
      "call_native",
      [](std::uintptr_t function, const py::bytes& args, std::int32_t device_id) -> py::object {
        const auto message = call_native(function, args, device_id);
        if (!message) return py::none();
        return to_text(*message);
      },
      py::arg("function_address"), py::arg("args"), py::arg("device_id"));
}

}  // namespace simpler::bindings
