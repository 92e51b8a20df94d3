// SharedRegion, ArenaAllocator, SharedBuffer, and views and copies of raw memory.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <memory>
#include <string>

#include "bindings.h"
#include "gil.h"
#include "hierarchical/base/error.h"
#include "hierarchical/base/stream_copy.h"
#include "hierarchical/ipc/arena_allocator.h"
#include "hierarchical/os/shared_region.h"

namespace simpler::bindings {

namespace {

// A range of a region with the buffer protocol, which keeps the mapping alive.
class SharedBuffer {
 public:
  SharedBuffer(std::shared_ptr<SharedRegion> region, std::size_t offset, std::size_t nbytes)
      : region_(std::move(region)), data_(region_->data() + offset), nbytes_(nbytes) {
    if (offset > region_->size() || nbytes > region_->size() - offset) {
      throw Error(ErrorCode::kInvalidArgument, "the range lies outside the region");
    }
  }

  [[nodiscard]] std::uintptr_t address() const noexcept {
    return reinterpret_cast<std::uintptr_t>(data_);
  }
  [[nodiscard]] std::size_t nbytes() const noexcept { return nbytes_; }
  [[nodiscard]] std::size_t exports() const noexcept { return exports_; }
  [[nodiscard]] bool retired() const noexcept { return retired_; }
  void retire() {
    if (exports_ != 0) {
      const std::string text =
          "the buffer has " + std::to_string(exports_) + " live view(s); release them first";
      PyErr_SetString(PyExc_BufferError, text.c_str());
      throw py::error_already_set();
    }
    retired_ = true;
  }

  int get_buffer(PyObject* self, Py_buffer* view, int flags) {
    if (retired_) {
      PyErr_SetString(PyExc_BufferError, "the buffer has been freed");
      view->obj = nullptr;
      return -1;
    }
    if (PyBuffer_FillInfo(view, self, data_, static_cast<Py_ssize_t>(nbytes_), 0, flags) != 0)
      return -1;
    ++exports_;
    return 0;
  }
  void release_buffer() noexcept { --exports_; }

 private:
  std::shared_ptr<SharedRegion> region_;
  std::byte* data_;
  std::size_t nbytes_;
  std::size_t exports_ = 0;  // guarded by the GIL
  bool retired_ = false;
};

int shared_buffer_get(PyObject* self, Py_buffer* view, int flags) {
  try {
    return py::cast<SharedBuffer&>(py::handle(self)).get_buffer(self, view, flags);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_BufferError, error.what());
    view->obj = nullptr;
    return -1;
  }
}

void shared_buffer_release(PyObject* self, Py_buffer*) {
  py::cast<SharedBuffer&>(py::handle(self)).release_buffer();
}

void bind_region(py::module_& module) {
  py::class_<SharedRegion, std::shared_ptr<SharedRegion>>(module, "SharedRegion", py::is_final())
      .def(py::init([](std::size_t nbytes, const std::string& name, bool commit) {
             const auto pages =
                 commit ? SharedRegion::Pages::kCommitted : SharedRegion::Pages::kSparse;
             return std::make_shared<SharedRegion>(nbytes, name, pages);
           }),
           py::arg("nbytes"), py::arg("name"), py::arg("commit") = false)
      .def_property_readonly("address", &SharedRegion::address)
      .def_property_readonly("nbytes", &SharedRegion::size)
      .def_property_readonly("resident_bytes", &SharedRegion::resident_bytes)
      .def(
          "release_pages",
          [](const SharedRegion& region, std::size_t offset, std::size_t nbytes) {
            if (offset > region.size() || nbytes > region.size() - offset) {
              throw Error(ErrorCode::kInvalidArgument, "the range lies outside the region");
            }
            const py::gil_scoped_release release;
            region.release_pages(offset, nbytes);
          },
          py::arg("offset"), py::arg("nbytes"));
}

void bind_allocator(py::module_& module) {
  py::class_<ArenaAllocator>(module, "ArenaAllocator", py::is_final())
      .def(py::init<std::size_t, std::size_t>(), py::arg("nbytes"), py::arg("alignment") = 256)
      .def(
          "allocate",
          [](ArenaAllocator& arena, std::size_t nbytes) {
            const auto offset = arena.allocate(nbytes);
            if (!offset) {
              throw Error(ErrorCode::kOutOfMemory,
                          "no free block of " + std::to_string(nbytes) + " bytes (" +
                              std::to_string(arena.used_bytes()) + " of " +
                              std::to_string(arena.capacity()) + " used, largest free " +
                              std::to_string(arena.largest_free()) + ")");
            }
            return *offset;
          },
          py::arg("nbytes"))
      .def("release", &ArenaAllocator::release, py::arg("offset"))
      .def_property_readonly("capacity", &ArenaAllocator::capacity)
      .def_property_readonly("used_bytes", &ArenaAllocator::used_bytes)
      .def_property_readonly("largest_free", &ArenaAllocator::largest_free)
      .def_property_readonly("block_count", &ArenaAllocator::block_count);
}

}  // namespace

void bind_memory(py::module_& module) {
  bind_region(module);
  bind_allocator(module);
  py::class_<SharedBuffer>(module, "SharedBuffer",
                           py::custom_type_setup([](PyHeapTypeObject* type) {
                             type->ht_type.tp_as_buffer = &type->as_buffer;
                             type->as_buffer.bf_getbuffer = shared_buffer_get;
                             type->as_buffer.bf_releasebuffer = shared_buffer_release;
                           }))
      .def(py::init<std::shared_ptr<SharedRegion>, std::size_t, std::size_t>(),
           py::arg("region").none(false), py::arg("offset"), py::arg("nbytes"))
      .def_property_readonly("address", &SharedBuffer::address)
      .def_property_readonly("nbytes", &SharedBuffer::nbytes)
      .def_property_readonly("exports", &SharedBuffer::exports)
      .def_property_readonly("retired", &SharedBuffer::retired)
      .def("retire", &SharedBuffer::retire);
  module.def(
      "memory_at",
      [](std::uintptr_t address, std::size_t nbytes, bool readonly) {
        PyObject* view = PyMemoryView_FromMemory(reinterpret_cast<char*>(address),
                                                 static_cast<Py_ssize_t>(nbytes),
                                                 readonly ? PyBUF_READ : PyBUF_WRITE);
        if (view == nullptr) throw py::error_already_set();
        return py::reinterpret_steal<py::memoryview>(view);
      },
      py::arg("address"), py::arg("nbytes"), py::arg("readonly"));
  module.def(
      "copy_memory",
      [](std::uintptr_t to, std::uintptr_t from, std::size_t nbytes, std::size_t whole) {
        const py::gil_scoped_release release;
        stream_copy(reinterpret_cast<std::byte*>(to), reinterpret_cast<const std::byte*>(from),
                    nbytes, std::max(whole, nbytes));
      },
      py::arg("dst_address"), py::arg("src_address"), py::arg("nbytes"), py::arg("whole") = 0);
}

}  // namespace simpler::bindings
