// Tree's blocking calls as C methods: the time of a call is the time of the exchange, not of its
// binding.
#include "fastcall.h"
#include "hierarchical/workers/replies.h"
#include "tree.h"

namespace simpler::bindings {

namespace {

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
  PyTree& tree = instance_of<PyTree>(self);
  return guarded(tree.make_error, [&]() -> PyObject* {
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

PyMethodDef methods[] = {
    {"call", as_c_function(tree_call), METH_FASTCALL, nullptr},
    {"call_held", as_c_function(tree_call_held), METH_FASTCALL, nullptr},
};

}  // namespace

void add_tree_calls(py::class_<PyTree>& type) { add_methods(type, methods); }

}  // namespace simpler::bindings
