#include "submission.h"

#include <array>

#include "run_objects.h"

namespace simpler::bindings {

namespace {

bool number_from(PyObject* object, std::uint64_t& out) {
  out = PyLong_AsUnsignedLongLong(object);
  return out != ~std::uint64_t{0} || PyErr_Occurred() == nullptr;
}

std::span<const std::byte> bytes_of(PyObject* bytes) noexcept {
  return {reinterpret_cast<const std::byte*>(PyBytes_AS_STRING(bytes)),
          static_cast<std::size_t>(PyBytes_GET_SIZE(bytes))};
}

bool access_from(PyObject* item, graph::Access& out) {
  if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 4) {
    PyErr_SetString(PyExc_TypeError, "an access is a tuple (region, mode, begin, end)");
    return false;
  }
  std::array<std::uint64_t, 4> values{};
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!number_from(PyTuple_GET_ITEM(item, static_cast<Py_ssize_t>(i)), values[i])) return false;
  }
  out.region = static_cast<std::uint32_t>(values[0]);
  out.mode = values[1] == 0 ? graph::Mode::kRead : graph::Mode::kWrite;
  out.begin = values[2];
  out.end = values[3];
  return true;
}

bool value_from(PyObject* item, ParameterValue& out) {
  std::uint64_t number = 0;
  if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 2) {
    PyErr_SetString(PyExc_TypeError, "a value is a tuple (bits, buffer)");
    return false;
  }
  if (!number_from(PyTuple_GET_ITEM(item, 0), out.bits) ||
      !number_from(PyTuple_GET_ITEM(item, 1), number)) {
    return false;
  }
  out.buffer = buffer_of(number);
  return true;
}

}  // namespace

bool accesses_from(PyObject* object, std::vector<graph::Access>& out) {
  return for_each_item(object, "accesses are tuples",
                       [&out](PyObject* item) { return access_from(item, out.emplace_back()); });
}

bool buffers_from(PyObject* object, std::vector<graph::BufferId>& out) {
  return for_each_item(object, "buffers are ints", [&out](PyObject* item) {
    std::uint64_t number = 0;
    if (!number_from(item, number)) return false;
    out.push_back(buffer_of(number));
    return true;
  });
}

bool values_from(PyObject* object, std::vector<ParameterValue>& out) {
  return for_each_item(object, "values are tuples",
                       [&out](PyObject* item) { return value_from(item, out.emplace_back()); });
}

bool Submission::set_targets(PyObject* object) {
  if (object == Py_None) {
    desc.spec.kind = graph::Kind::kSub;
    return true;
  }
  if (PyLong_Check(object)) {
    const long value = PyLong_AsLong(object);
    if (value == -1 && PyErr_Occurred() != nullptr) return false;
    if (value < 0) {
      desc.spec.kind = graph::Kind::kSub;
      desc.spec.sub_members = static_cast<std::uint32_t>(-value);
    } else {
      one_target_ = static_cast<std::uint32_t>(value);
      desc.spec.targets = {&one_target_, 1};
    }
    return true;
  }
  const auto add = [this](PyObject* item) {
    std::uint64_t chip = 0;
    if (!number_from(item, chip)) return false;
    targets_.push_back(static_cast<std::uint32_t>(chip));
    return true;
  };
  if (!for_each_item(object, "targets are ints", add)) return false;
  desc.spec.targets = targets_;
  return true;
}

bool Submission::set_args(PyObject* object) {
  if (PyBytes_CheckExact(object)) {
    desc.args = bytes_of(object);
    return true;
  }
  const auto add = [this](PyObject* item) {
    if (!PyBytes_CheckExact(item)) {
      PyErr_SetString(PyExc_TypeError, "packed arguments are bytes");
      return false;
    }
    member_args_.push_back(bytes_of(item));
    return true;
  };
  if (!for_each_item(object, "packed arguments are bytes, or one for each member", add))
    return false;
  desc.member_args = member_args_;
  return true;
}

bool Submission::set_accesses(PyObject* object) {
  if (!accesses_from(object, accesses_)) return false;
  desc.spec.accesses = accesses_;
  return true;
}

bool Submission::set_buffers(PyObject* object) {
  if (!buffers_from(object, buffers_)) return false;
  desc.spec.buffers = buffers_;
  return true;
}

bool Submission::set_deps(PyObject* object, const TaskEngine* engine) {
  const auto add = [&](PyObject* item) {
    if (!is_task(item)) {
      PyErr_Format(PyExc_TypeError, "a dependency is a TaskHandle, not %s", Py_TYPE(item)->tp_name);
      return false;
    }
    if (engine_of(as_task(item)).engine.get() != engine) {
      PyErr_SetString(PyExc_ValueError, "a dependency is a task of another Worker");
      return false;
    }
    deps_.push_back(as_task(item)->task.id);
    return true;
  };
  if (!for_each_item(object, "dependencies are TaskHandles", add)) return false;
  desc.spec.deps = deps_;
  return true;
}

bool Submission::set_priority(PyObject* object) {
  if (object == Py_None) return true;
  const long value = PyLong_AsLong(object);
  if (value == -1 && PyErr_Occurred() != nullptr) return false;
  if (value < INT16_MIN || value > INT16_MAX) {
    PyErr_SetString(PyExc_ValueError, "a priority has 16 bits");
    return false;
  }
  desc.spec.priority = static_cast<std::int16_t>(value);
  return true;
}

}  // namespace simpler::bindings
