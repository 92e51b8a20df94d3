#include "hierarchical/workers/spare.h"

#include <cerrno>
#include <csignal>
#include <cstring>
#include <string>

#include "hierarchical/base/error.h"
#include "hierarchical/os/messages.h"
#include "hierarchical/os/poller.h"

namespace simpler {

namespace {

constexpr Nanoseconds kGrace = 500'000'000;

struct ForkRequest {
  std::int32_t index;
  std::uint32_t reserved;
  std::uint64_t generation;
};
template <typename Record>
std::span<const std::byte> bytes_of(const Record& record) {
  return std::as_bytes(std::span(&record, 1));
}
template <typename Record>
std::span<std::byte> writable_bytes_of(Record& record) {
  return std::as_writable_bytes(std::span(&record, 1));
}

struct ForkReply {
  std::int32_t pid;    // -1: failed
  std::int32_t error;  // errno of the failure
};
struct ExitMessage {
  std::int32_t pid;
  std::int32_t kind;
  std::int32_t value;
  std::int32_t core_dumped;
};

class Spare {
 public:
  explicit Spare(const SpareDuties& duties) : duties_(duties) {}

  int run() {
    const ForkReply ready{0, 0};
    if (!send_record(duties_.request_socket, bytes_of(ready), -1)) return finish();
    for (;;) {
      Poller poller;
      const std::size_t request = poller.add(duties_.request_socket);
      const std::size_t parent = poller.add(duties_.parent_pidfd);
      for (const Child& child : own_) poller.add(child.pidfd.get());
      if (!poller.wait(Deadline::never()) || poller.ready(parent)) return finish();
      report_ended(poller, parent + 1);
      if (poller.ready(request) && !serve_request()) return finish();
    }
  }

 private:
  struct Child {
    pid_t pid;
    Descriptor pidfd;
  };

  bool serve_request() {
    ForkRequest request{};
    Descriptor log_socket;
    if (!receive_record(duties_.request_socket, writable_bytes_of(request), log_socket))
      return false;
    ForkReply reply{-1, 0};
    Descriptor pidfd;
    try {
      reply.pid = duties_.fork_child(request.index, request.generation, log_socket.get());
      // The child cannot be recycled before this process reaps it.
      if (auto opened = open_pidfd(reply.pid)) pidfd = std::move(*opened);
    } catch (const std::exception&) {
      reply.error = errno != 0 ? errno : EAGAIN;
      if (reply.pid >= 0) end_unwatched_child(reply.pid);  // nobody could watch it
      reply.pid = -1;
    }
    const bool sent = send_record(duties_.request_socket, bytes_of(reply), pidfd.get());
    if (pidfd.valid()) own_.push_back({reply.pid, std::move(pidfd)});
    return sent;
  }

  void report_ended(const Poller& poller, std::size_t first) {
    for (std::size_t i = own_.size(); i-- > 0;) {
      if (!poller.ready(first + i)) continue;
      const Child& child = own_[i];
      const ExitStatus status = exit_status(child.pidfd.get());
      const ExitMessage message{child.pid, static_cast<std::int32_t>(status.kind), status.value,
                                status.core_dumped};
      write_record(duties_.report_pipe, bytes_of(message));  // without a reader nobody asks
      reap(child.pidfd.get());
      own_.erase(own_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }

  // The parent is gone, or has closed its end: nothing may stay behind.
  int finish() {
    const Deadline deadline = Deadline::at(monotonic_now() + kGrace);
    std::vector<int> left = duties_.children;
    for (const Child& child : own_) left.push_back(child.pidfd.get());
    for (const int pidfd : left) {
      if (!wait_process_end(pidfd, deadline)) send_signal(pidfd, SIGKILL);
    }
    return 0;
  }

  const SpareDuties& duties_;
  std::vector<Child> own_;
};

}  // namespace

int run_spare(const SpareDuties& duties) { return Spare(duties).run(); }

void SpareHandle::set(pid_t pid, Descriptor pidfd, Descriptor request_socket,
                      Descriptor report_pipe) {
  const std::lock_guard lock(mutex_);
  pid_ = pid;
  pidfd_ = std::move(pidfd);
  request_socket_ = std::move(request_socket);
  report_pipe_ = std::move(report_pipe);
}

Error SpareHandle::gone() const {
  return {ErrorCode::kWorkerDied, "the spare process (pid " + std::to_string(pid_) +
                                      ") is gone: nothing can be restarted in this tree any more"};
}

bool SpareHandle::wait_ready(Deadline deadline) {
  const std::lock_guard lock(mutex_);
  Poller poller;
  poller.add(request_socket_.get());
  if (!poller.wait(deadline)) return false;
  ForkReply ready{};
  Descriptor none;
  if (!receive_record(request_socket_.get(), writable_bytes_of(ready), none)) throw gone();
  return true;
}

SpareHandle::Replacement SpareHandle::wait_reply(Deadline deadline) {
  Poller poller;
  const std::size_t reply_due = poller.add(request_socket_.get());
  const std::size_t cancelled = poller.add(cancel_.get());
  if (!poller.wait(deadline) || (poller.ready(cancelled) && !poller.ready(reply_due))) {
    throw Error(ErrorCode::kTimedOut, "the spare process did not fork in time");
  }
  ForkReply reply{};
  Replacement replacement;
  if (!receive_record(request_socket_.get(), writable_bytes_of(reply), replacement.pidfd)) {
    request_socket_.reset();
    throw gone();
  }
  reply_due_ = false;
  if (reply.pid < 0 || !replacement.pidfd.valid()) {
    throw Error(ErrorCode::kSystem,
                std::string("the spare process could not fork: ") + std::strerror(reply.error));
  }
  replacement.pid = reply.pid;
  return replacement;
}

void SpareHandle::settle(Deadline deadline) {
  const std::lock_guard lock(mutex_);
  if (!request_socket_.valid()) throw gone();
  if (!reply_due_) return;
  Replacement late;
  try {
    late = wait_reply(deadline);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kSystem) return;  // it could not fork: nothing to end
    throw;
  }
  send_signal(late.pidfd.get(), SIGKILL);
  wait_process_end(late.pidfd.get(), deadline);
}

SpareHandle::Replacement SpareHandle::fork_child(int index, std::uint64_t generation,
                                                 const Descriptor& log_socket, Deadline deadline) {
  const std::lock_guard lock(mutex_);
  const ForkRequest request{index, 0, generation};
  if (!request_socket_.valid() ||
      !send_record(request_socket_.get(), bytes_of(request), log_socket.get())) {
    throw gone();
  }
  reply_due_ = true;
  return wait_reply(deadline);
}

void SpareHandle::cancel() noexcept { event_notify(cancel_.get()); }

void SpareHandle::dismiss() {
  const std::lock_guard lock(mutex_);
  request_socket_.reset();
}

std::optional<SpareExitReport> SpareHandle::read_report() {
  ExitMessage message{};
  if (!read_record(report_pipe_.get(), writable_bytes_of(message))) return std::nullopt;
  const auto kind =
      message.kind >= 0 && message.kind <= static_cast<int>(ExitStatus::Kind::kUnknown)
          ? static_cast<ExitStatus::Kind>(message.kind)
          : ExitStatus::Kind::kUnknown;
  return SpareExitReport{message.pid, {kind, message.value, message.core_dumped != 0}};
}

}  // namespace simpler
