#include "hierarchical/workers/spare.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "hierarchical/base/error.h"

namespace simpler {

namespace {

constexpr Nanoseconds kGrace = 500'000'000;

struct ForkRequest {
  std::int32_t index;
  std::uint32_t reserved;
  std::uint64_t generation;
};
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

// One record with at most one descriptor. False on a closed or broken stream.
bool send_record(int socket, const void* data, std::size_t size, int descriptor) {
  iovec part{const_cast<void*>(data), size};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (descriptor >= 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
  }
  ssize_t sent = -1;
  do {
    sent = sendmsg(socket, &message, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent == static_cast<ssize_t>(size);
}

bool receive_record(int socket, void* data, std::size_t size, Descriptor& descriptor) {
  iovec part{data, size};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t got = -1;
  do {
    got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_WAITALL);
  } while (got < 0 && errno == EINTR);
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
      int received = -1;
      std::memcpy(&received, CMSG_DATA(header), sizeof(int));
      descriptor = Descriptor(received);
    }
  }
  return got == static_cast<ssize_t>(size);
}

bool poll_until(std::vector<pollfd>& polled, Deadline deadline) {
  for (;;) {
    const Nanoseconds left = deadline.remaining_ns();
    const int timeout = deadline.is_never() ? -1 : static_cast<int>((left + 999'999) / 1'000'000);
    const int ready = poll(polled.data(), polled.size(), timeout);
    if (ready > 0) return true;
    if (ready == 0 && deadline.passed()) return false;
    if (ready < 0 && errno != EINTR) return false;
  }
}

class Spare {
 public:
  explicit Spare(const SpareDuties& duties) : duties_(duties) {}

  int run() {
    for (;;) {
      std::vector<pollfd> polled{{duties_.request_socket, POLLIN, 0},
                                 {duties_.parent_pidfd, POLLIN, 0}};
      for (const Child& child : own_) polled.push_back({child.pidfd.get(), POLLIN, 0});
      poll_until(polled, Deadline::never());
      if (polled[1].revents != 0) return finish();
      report_ended(polled);
      if (polled[0].revents != 0 && !serve_request()) return finish();
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
    if (!receive_record(duties_.request_socket, &request, sizeof request, log_socket)) return false;
    ForkReply reply{-1, 0};
    Descriptor pidfd;
    try {
      reply.pid = duties_.fork_child(request.index, request.generation, log_socket.get());
      // The child cannot be recycled before this process reaps it.
      if (auto opened = open_pidfd(reply.pid)) pidfd = std::move(*opened);
    } catch (const std::exception&) {
      reply.error = errno != 0 ? errno : EAGAIN;
    }
    const bool sent = send_record(duties_.request_socket, &reply, sizeof reply, pidfd.get());
    if (pidfd.valid()) own_.push_back({reply.pid, std::move(pidfd)});
    return sent;
  }

  void report_ended(const std::vector<pollfd>& polled) {
    for (std::size_t i = polled.size(); i-- > 2;) {
      if (polled[i].revents == 0) continue;
      Child& child = own_[i - 2];
      const ExitStatus status = reap(child.pidfd.get());
      const ExitMessage message{child.pid, static_cast<std::int32_t>(status.kind), status.value,
                                status.core_dumped};
      // A record smaller than PIPE_BUF is written whole or not at all; without a reader nobody
      // asks.
      while (write(duties_.report_pipe, &message, sizeof message) < 0 && errno == EINTR) {
      }
      own_.erase(own_.begin() + static_cast<std::ptrdiff_t>(i - 2));
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

SpareHandle::Replacement SpareHandle::fork_child(int index, std::uint64_t generation,
                                                 const Descriptor& log_socket, Deadline deadline) {
  const std::lock_guard lock(mutex_);
  const Error gone(ErrorCode::kWorkerDied,
                   "the spare process (pid " + std::to_string(pid_) +
                       ") is gone: nothing can be restarted in this tree any more");
  const ForkRequest request{index, 0, generation};
  if (!request_socket_.valid() ||
      !send_record(request_socket_.get(), &request, sizeof request, log_socket.get())) {
    throw gone;
  }
  std::vector<pollfd> polled{{request_socket_.get(), POLLIN, 0}};
  if (!poll_until(polled, deadline))
    throw Error(ErrorCode::kTimedOut, "the spare process did not fork in time");
  ForkReply reply{};
  Replacement replacement;
  if (!receive_record(request_socket_.get(), &reply, sizeof reply, replacement.pidfd)) throw gone;
  if (reply.pid < 0 || !replacement.pidfd.valid()) {
    throw Error(ErrorCode::kSystem,
                std::string("the spare process could not fork: ") + std::strerror(reply.error));
  }
  replacement.pid = reply.pid;
  return replacement;
}

void SpareHandle::dismiss() {
  const std::lock_guard lock(mutex_);
  request_socket_.reset();
}

std::optional<SpareExitReport> SpareHandle::read_report() {
  ExitMessage message{};
  ssize_t got = -1;
  do {
    got = read(report_pipe_.get(), &message, sizeof message);
  } while (got < 0 && errno == EINTR);
  if (got != static_cast<ssize_t>(sizeof message)) return std::nullopt;
  const auto kind =
      message.kind >= 0 && message.kind <= static_cast<int>(ExitStatus::Kind::kUnknown)
          ? static_cast<ExitStatus::Kind>(message.kind)
          : ExitStatus::Kind::kUnknown;
  return SpareExitReport{message.pid, {kind, message.value, message.core_dumped != 0}};
}

}  // namespace simpler
