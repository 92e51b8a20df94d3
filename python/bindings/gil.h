// Small helpers over the C API for code that must not pay for a general binding layer.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstring>
#include <span>

#include "hierarchical/os/huge_pages.h"

namespace simpler::bindings {

namespace py = pybind11;

// Copies above this size are made without the GIL.
inline constexpr std::size_t kCopyWithoutGil = std::size_t{64} << 10;
// New bytes of this size come as fresh pages from the kernel each time.
inline constexpr std::size_t kHugeCopy = std::size_t{8} << 20;

// A readable, contiguous view of `object`: bytes without ceremony, anything else by the buffer
// protocol.
class ReadBuffer {
 public:
  // On failure the span is empty, ok() is false and a Python error is set.
  explicit ReadBuffer(PyObject* object) noexcept {
    if (PyBytes_CheckExact(object)) {
      bytes_ = {reinterpret_cast<const std::byte*>(PyBytes_AS_STRING(object)),
                static_cast<std::size_t>(PyBytes_GET_SIZE(object))};
      return;
    }
    if (PyObject_GetBuffer(object, &view_, PyBUF_SIMPLE) != 0) {
      ok_ = false;
      return;
    }
    owned_ = true;
    bytes_ = {static_cast<const std::byte*>(view_.buf), static_cast<std::size_t>(view_.len)};
  }
  ~ReadBuffer() {
    if (owned_) PyBuffer_Release(&view_);
  }
  ReadBuffer(const ReadBuffer&) = delete;
  ReadBuffer& operator=(const ReadBuffer&) = delete;

  [[nodiscard]] bool ok() const noexcept { return ok_; }
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return bytes_; }

 private:
  Py_buffer view_{};
  bool owned_ = false;
  bool ok_ = true;
  std::span<const std::byte> bytes_;
};

// New bytes with a copy of `from`; nullptr with MemoryError set. REQUIRES: the GIL.
inline PyObject* bytes_from(std::span<const std::byte> from) noexcept {
  PyObject* bytes = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(from.size()));
  if (bytes == nullptr || from.empty()) return bytes;
  char* to = PyBytes_AS_STRING(bytes);
  if (from.size() < kCopyWithoutGil) {
    std::memcpy(to, from.data(), from.size());
  } else {
    const py::gil_scoped_release release;
    if (from.size() >= kHugeCopy) prefer_huge_pages(to, from.size());
    std::memcpy(to, from.data(), from.size());
  }
  return bytes;
}

inline py::bytes to_bytes(std::span<const std::byte> from) {
  PyObject* bytes = bytes_from(from);
  if (bytes == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::bytes>(bytes);
}

// Text from a child: whatever bytes it sent, as str.
inline py::str to_text(const std::string& text) {
  PyObject* decoded =
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "backslashreplace");
  if (decoded == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(decoded);
}

}  // namespace simpler::bindings
