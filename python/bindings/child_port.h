// A child's end in Python: answers the child loop with the handlers that child_main has set.
//
// Thread safety: control() runs on the main thread or a service thread, each with a thread state of
// its own; the tables are filled before or on the main thread with the GIL and read with it, but
// for native kernels, which the main thread alone reads and writes. Fork: constructed in the child.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "hierarchical/workers/child_loop.h"
#include "hierarchical/workers/worker_manager.h"
#include "simpler/kernel.h"

namespace simpler::bindings {

namespace py = pybind11;

class ChildPort : public ChildHandler {
 public:
  ChildPort(const ChildContext& context, std::size_t max_payload);

  [[nodiscard]] int worker() const noexcept { return context_.child.index; }
  [[nodiscard]] bool is_chip() const noexcept { return context_.child.is_chip; }
  [[nodiscard]] int device_id() const noexcept { return context_.child.device_id; }
  [[nodiscard]] std::uint64_t generation() const noexcept { return context_.generation; }

  void set_extension(std::uint32_t id, py::object handler, py::object chip_view);
  void set_native_kernel(std::uint32_t callable_id, std::uintptr_t function);
  void send_log(const py::bytes& frame);
  void serve(py::object on_control, py::object on_task, py::object reply_of, py::object describe);
  // Answers START with `error` when serve() has not been reached.
  void fail_start(py::error_already_set& error);

  void control(const ChildRequest& request, ReplyWriter& reply) noexcept override;
  void task(std::uint32_t callable_id, std::span<const std::byte> args,
            ReplyWriter& reply) noexcept override;
  void replied() noexcept override;

 private:
  struct Extension {
    py::object handler;
    py::object chip_view;
  };

  // Returns a new reference, or nullptr with a Python error set.
  PyObject* call_extension(const Extension& extension, const ChildRequest& request);
  PyObject* call_control(const ChildRequest& request);
  // Both steal `result`; false with a Python error set.
  bool write_result(PyObject* result, ReplyWriter& reply);
  void write_error(ReplyWriter& reply) noexcept;
  void write_failure(const RemoteFailure& failure, ReplyWriter& reply) noexcept;
  RemoteFailure describe_error();

  const ChildContext context_;
  const std::size_t max_payload_;
  ChildLoop loop_;
  py::object device_;
  std::vector<Extension> extensions_;              // by id; an empty handler: not registered
  std::vector<simpler_kernel_fn> native_kernels_;  // by callable id; nullptr: in Python
  py::object on_control_;
  py::object on_task_;
  py::object reply_of_;
  py::object describe_;
  std::mutex log_mutex_;
};

}  // namespace simpler::bindings
