// Tree's broadcasts, calls that nobody waits in, and the events that end them.
#include <pybind11/stl.h>

#include <vector>

#include "errors.h"
#include "gil.h"
#include "hierarchical/base/error.h"
#include "tree.h"

namespace simpler::bindings {

namespace {

std::shared_ptr<RunningTree> use_or_throw(const PyTree& tree) {
  auto running = tree.use();
  if (!running) throw py::error_already_set();
  return running;
}

// What a broadcast or a submitted call is made of, kept alive for as long as the spans are used.
class RequestParts {
 public:
  RequestParts(int chips, const std::vector<py::bytes>& metas, const py::object& payload)
      : payload_(payload.ptr()) {
    if (!payload_.ok()) throw py::error_already_set();
    if (!metas.empty() && metas.size() != static_cast<std::size_t>(chips)) {
      throw Error(ErrorCode::kInvalidArgument, "metas must be empty or one per chip");
    }
    for (const py::bytes& meta : metas) {
      metas_.emplace_back(reinterpret_cast<const std::byte*>(PyBytes_AS_STRING(meta.ptr())),
                          static_cast<std::size_t>(PyBytes_GET_SIZE(meta.ptr())));
    }
  }

  [[nodiscard]] ControlRequest request(int op, std::uint32_t arg, int lane, double timeout_s,
                                       std::uint64_t hold) const {
    ControlRequest request;
    request.op = static_cast<ControlOp>(op);
    request.arg = arg;
    const bool any = request.op == ControlOp::PING || request.op == ControlOp::ECHO;
    request.lane = any ? Lane::kAny : static_cast<Lane>(lane);
    request.payload = payload_.bytes();
    request.timeout_s = timeout_s;
    request.deadline = Deadline::after_seconds(timeout_s);
    request.hold = hold;
    return request;
  }
  [[nodiscard]] std::span<const std::span<const std::byte>> metas() const noexcept {
    return metas_;
  }

 private:
  ReadBuffer payload_;
  std::vector<std::span<const std::byte>> metas_;
};

void check_size(const PyTree& tree, const ControlRequest& request) {
  if (request.payload.size() <= tree.max_payload) return;
  throw Error(ErrorCode::kInvalidArgument,
              "the payload of " + std::to_string(request.payload.size()) +
                  " bytes exceeds max_control_payload (" + std::to_string(tree.max_payload) + ")");
}

[[noreturn]] void raise(const PyTree& tree, const CallError& error) {
  set_call_error(tree.make_error, error);
  throw py::error_already_set();
}

py::list broadcast(PyTree& tree, int op, std::uint32_t arg, int lane,
                   const std::vector<py::bytes>& metas, const py::object& payload, double timeout_s,
                   bool fail_fast, std::uint64_t hold) {
  const auto running = use_or_throw(tree);
  const RequestParts parts(running->manager().chips(), metas, payload);
  const ControlRequest request = parts.request(op, arg, lane, timeout_s, hold);
  std::vector<BroadcastReply> replies;
  try {
    const bool main = on_main_thread();
    const py::gil_scoped_release release;
    SignalCheck check;
    replies = running->broadcast(request, parts.metas(), fail_fast, main ? &check : nullptr);
  } catch (const CallError& error) {
    raise(tree, error);
  }
  py::list out;
  for (const BroadcastReply& reply : replies) {
    switch (reply.kind) {
      case BroadcastReply::Kind::kReply:
        out.append(to_bytes(reply.bytes));
        break;
      case BroadcastReply::Kind::kError:
        out.append(call_error_object(tree.make_error, *reply.error));
        break;
      case BroadcastReply::Kind::kPending:
        out.append(py::none());
        break;
    }
  }
  return out;
}

std::uint64_t submit(PyTree& tree, int worker, int op, std::uint32_t arg, int lane,
                     const py::bytes& meta, const py::object& payload, double timeout_s,
                     std::uint64_t hold) {
  const auto running = use_or_throw(tree);
  running->manager().child(worker);
  const RequestParts parts(0, {}, payload);
  ControlRequest request = parts.request(op, arg, lane, timeout_s, hold);
  check_size(tree, request);
  const ReadBuffer own_meta(meta.ptr());
  request.meta = own_meta.bytes();
  try {
    const py::gil_scoped_release release;
    return running->async().submit(worker, request);
  } catch (const CallError& error) {
    raise(tree, error);
  }
}

std::vector<std::uint64_t> submit_broadcast(PyTree& tree, int op, std::uint32_t arg, int lane,
                                            const std::vector<py::bytes>& metas,
                                            const py::object& payload, double timeout_s,
                                            std::uint64_t hold) {
  const auto running = use_or_throw(tree);
  const RequestParts parts(running->manager().chips(), metas, payload);
  const ControlRequest request = parts.request(op, arg, lane, timeout_s, hold);
  check_size(tree, request);
  try {
    const py::gil_scoped_release release;
    return running->async().submit_broadcast(request, parts.metas());
  } catch (const CallError& error) {
    raise(tree, error);
  }
}

py::tuple event_tuple(const PyTree& tree, const AsyncEvent& event) {
  switch (event.kind) {
    case AsyncEvent::Kind::kLog:
      return py::make_tuple("log", event.worker, to_bytes(event.bytes));
    case AsyncEvent::Kind::kLogsLost:
      return py::make_tuple("lost", event.worker, event.number);
    case AsyncEvent::Kind::kDied:
      return py::make_tuple("died", event.worker, to_text(event.text));
    case AsyncEvent::Kind::kEnded:
      return py::make_tuple("ended", event.worker, event.number);
    case AsyncEvent::Kind::kRunDone:
      return py::make_tuple("run", event.worker, event.number);
    case AsyncEvent::Kind::kTurnCame:
      return py::make_tuple("turn", event.worker, event.number);
    case AsyncEvent::Kind::kBuffersIdle:
      return py::make_tuple("idle", event.worker, event.number);
    case AsyncEvent::Kind::kReply:
      break;
  }
  py::object result = event.error ? call_error_object(tree.make_error, *event.error)
                                  : py::object(to_bytes(event.bytes));
  return py::make_tuple("reply", event.number, result);
}

py::list next_events(PyTree& tree) {
  py::list out;
  const std::shared_ptr<RunningTree> running = tree.running;
  if (!running) return out;
  std::vector<AsyncEvent> events;
  {
    const py::gil_scoped_release release;
    events = running->async().wait_events();
  }
  for (const AsyncEvent& event : events) out.append(event_tuple(tree, event));
  return out;
}

bool cancel(PyTree& tree, std::uint64_t token) {
  const auto running = use_or_throw(tree);
  const py::gil_scoped_release release;
  return running->async().cancel(token);
}

}  // namespace

void add_tree_events(py::class_<PyTree>& type) {
  type.def("broadcast", &broadcast, py::pos_only())
      .def("submit", &submit, py::pos_only())
      .def("submit_broadcast", &submit_broadcast, py::pos_only())
      .def("cancel", &cancel, py::pos_only())
      .def("next_events", &next_events);
}

}  // namespace simpler::bindings
