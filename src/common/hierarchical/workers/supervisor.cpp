#include "hierarchical/workers/supervisor.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace simpler {

namespace {

constexpr Nanoseconds kTrimAfter = 1'000'000'000;
constexpr std::size_t kMaxLogFrame = std::size_t{16} << 20;

}  // namespace

Supervisor::Supervisor(SupervisorDelegate& delegate, SpareHandle& spare)
    : delegate_(delegate), spare_(spare), wake_(make_event()) {}

void Supervisor::watch(Child child) {
  {
    const std::lock_guard lock(mutex_);
    new_.push_back(std::move(child));
  }
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof one);
}

void Supervisor::poke_trim() {
  const std::int64_t before =
      trim_at_.exchange(monotonic_now() + kTrimAfter, std::memory_order_relaxed);
  if (before != 0) return;  // awake for it already
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof one);
}

void Supervisor::start() {
  if (thread_.joinable()) return;
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);  // LC-4: signals are for the threads of the program
  thread_ = std::thread([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread_.native_handle(), "simpler-watch");
}

void Supervisor::stop() {
  if (!thread_.joinable()) return;
  stopping_.store(true, std::memory_order_seq_cst);
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof one);
  thread_.join();
}

void Supervisor::run() {
  while (!stopping_.load(std::memory_order_seq_cst)) {
    take_new();
    poll_once();
  }
}

void Supervisor::take_new() {
  const std::lock_guard lock(mutex_);
  for (Child& child : new_) watched_.push_back({std::move(child), {}, false});
  new_.clear();
}

void Supervisor::poll_once() {
  // Order: wake, spare, reports, then a pidfd and a log socket per child. poll ignores negative
  // descriptors.
  std::vector<pollfd> polled{{wake_.get(), POLLIN, 0},
                             {spare_alive_ ? spare_.pidfd() : -1, POLLIN, 0},
                             {reports_open_ ? spare_.report_pipe() : -1, POLLIN, 0}};
  for (const Watched& watched : watched_) {
    polled.push_back({watched.awaiting_report ? -1 : watched.child.pidfd, POLLIN, 0});
    polled.push_back({watched.child.log_socket.get(), POLLIN, 0});
  }
  int timeout = -1;
  const std::int64_t trim_at = trim_at_.load(std::memory_order_relaxed);
  if (trim_at != 0) {
    timeout =
        static_cast<int>(std::max<std::int64_t>(0, (trim_at - monotonic_now()) / 1'000'000 + 1));
  }
  const int ready = poll(polled.data(), polled.size(), timeout);
  if (ready == 0 && trim_at != 0 && trim_at_.load(std::memory_order_relaxed) <= monotonic_now()) {
    trim_at_.store(0, std::memory_order_relaxed);
    delegate_.trim();
  }
  if (ready <= 0) return;
  if (polled[0].revents != 0) {
    std::uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = read(wake_.get(), &count, sizeof count);
  }
  for (std::size_t i = watched_.size(); i-- > 0;) {  // backwards: handle_end may erase
    if (polled[4 + 2 * i].revents != 0) read_log(watched_[i]);
    if (polled[3 + 2 * i].revents != 0) handle_end(i);
  }
  if (polled[2].revents != 0) handle_report();
  if (polled[1].revents != 0) {
    spare_alive_ = false;
    delegate_.spare_ended(reap(spare_.pidfd()));
  }
}

void Supervisor::read_log(Watched& watched) {
  std::array<std::byte, 65536> chunk;
  for (;;) {
    const ssize_t got =
        recv(watched.child.log_socket.get(), chunk.data(), chunk.size(), MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got == 0 || (got < 0 && errno != EAGAIN)) watched.child.log_socket.reset();
    if (got <= 0) return;
    watched.received.insert(watched.received.end(), chunk.begin(), chunk.begin() + got);
    std::size_t start = 0;
    while (watched.received.size() - start >= sizeof(std::uint32_t)) {
      std::uint32_t length = 0;
      std::memcpy(&length, watched.received.data() + start, sizeof length);
      if (length > kMaxLogFrame) {  // not a frame of ours: the stream cannot be trusted any more
        watched.child.log_socket.reset();
        watched.received.clear();
        return;
      }
      if (watched.received.size() - start - sizeof length < length) break;
      const auto* frame = watched.received.data() + start + sizeof length;
      delegate_.child_logged(watched.child.index, std::vector<std::byte>(frame, frame + length));
      start += sizeof length + length;
    }
    watched.received.erase(watched.received.begin(),
                           watched.received.begin() + static_cast<std::ptrdiff_t>(start));
  }
}

void Supervisor::handle_end(std::size_t position) {
  Watched& watched = watched_[position];
  if (watched.child.log_socket.valid()) read_log(watched);  // its last words
  if (!watched.child.forked_by_spare) return finish(position, reap(watched.child.pidfd));
  const auto report = reports_.find(watched.child.pid);
  if (report != reports_.end()) {
    const ExitStatus status = report->second;
    reports_.erase(report);
    return finish(position, status);
  }
  if (!reports_open_) return finish(position, {});
  watched.awaiting_report = true;
}

void Supervisor::handle_report() {
  const auto report = spare_.read_report();
  if (!report) {
    reports_open_ = false;
    for (std::size_t i = watched_.size(); i-- > 0;) {
      if (watched_[i].awaiting_report) finish(i, {});
    }
    return;
  }
  for (std::size_t i = 0; i < watched_.size(); ++i) {
    if (watched_[i].awaiting_report && watched_[i].child.pid == report->pid)
      return finish(i, report->status);
  }
  reports_[report->pid] = report->status;
}

void Supervisor::finish(std::size_t position, const ExitStatus& status) {
  const int index = watched_[position].child.index;
  watched_.erase(watched_.begin() + static_cast<std::ptrdiff_t>(position));
  delegate_.child_ended(index, status);
}

}  // namespace simpler
