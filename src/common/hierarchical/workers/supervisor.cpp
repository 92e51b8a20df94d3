#include "hierarchical/workers/supervisor.h"

#include <array>
#include <csignal>
#include <cstring>

#include "hierarchical/os/messages.h"
#include "hierarchical/os/poller.h"
#include "hierarchical/os/thread.h"

namespace simpler {

namespace {

constexpr Nanoseconds kTrimAfter = 1'000'000'000;
constexpr Nanoseconds kReportPatience = 100'000'000;
constexpr std::size_t kMaxLogFrame = std::size_t{16} << 20;
// Per look at one child: more than its socket holds, so that its last words are among them, and
// little enough that a child that never stops talking hides no other's death.
constexpr std::size_t kMaxLogBytesAtOnce = std::size_t{1} << 20;

}  // namespace

Supervisor::Supervisor(SupervisorDelegate& delegate, SpareHandle& spare)
    : delegate_(delegate),
      spare_(spare),
      wake_(make_event()),
      exit_watch_([this](const ExitWatch::Child& child) { return tell_exiting(child); }) {}

void Supervisor::watch(Child child) {
  if (child.life != nullptr) exit_watch_.watch({child.index, child.pid, child.pidfd, child.life});
  {
    const std::lock_guard lock(mutex_);
    new_.push_back(std::move(child));
  }
  event_notify(wake_.get());
}

void Supervisor::poke_trim() {
  const std::int64_t before =
      trim_at_.exchange(monotonic_now() + kTrimAfter, std::memory_order_relaxed);
  if (before == 0) event_notify(wake_.get());  // else it is awake for it already
}

void Supervisor::start() {
  if (thread_.joinable()) return;
  thread_ = start_quiet_thread("simpler-watch", [this] { run(); });
}

void Supervisor::stop() {
  exit_watch_.stop();
  if (!thread_.joinable()) return;
  stopping_.store(true, std::memory_order_seq_cst);
  event_notify(wake_.get());
  thread_.join();
}

void Supervisor::run() {
  ask_for_short_slices();
  while (!stopping_.load(std::memory_order_seq_cst)) {
    take_new();
    poll_once();
  }
}

void Supervisor::take_new() {
  const std::lock_guard lock(mutex_);
  for (Child& child : new_) watched_.push_back({std::move(child), {}, 0});
  new_.clear();
}

void Supervisor::poll_once() {
  Poller poller;
  const std::size_t wake = poller.add(wake_.get());
  const std::size_t spare = poller.add(spare_alive_ ? spare_.pidfd() : -1);
  const std::size_t reports = poller.add(reports_open_ ? spare_.report_pipe() : -1);
  const std::size_t children = reports + 1;  // from here a pidfd and a log socket each
  for (const Watched& watched : watched_) {
    poller.add(watched.report_by != 0 ? -1 : watched.child.pidfd);
    poller.add(watched.child.log_socket.get());
  }
  const std::int64_t trim_at = trim_at_.load(std::memory_order_relaxed);
  Deadline deadline = trim_at != 0 ? Deadline::at(trim_at) : Deadline::never();
  for (const Watched& watched : watched_) {
    if (watched.report_by != 0) deadline = deadline.earlier(Deadline::at(watched.report_by));
  }
  if (!poller.wait(deadline)) {
    give_up_reports();
    const std::int64_t due = trim_at_.load(std::memory_order_relaxed);
    if (due == 0 || due > monotonic_now()) return;  // used again meanwhile
    trim_at_.store(0, std::memory_order_relaxed);
    delegate_.trim();
    return;
  }
  if (poller.ready(wake)) event_drain(wake_.get());
  for (std::size_t i = watched_.size(); i-- > 0;) {  // backwards: handle_end may erase
    if (poller.ready(children + 2 * i + 1)) read_log(watched_[i]);
    if (poller.ready(children + 2 * i)) handle_end(i);
  }
  if (poller.ready(reports)) handle_report();
  if (poller.ready(spare)) {
    spare_alive_ = false;
    delegate_.spare_ended(reap(spare_.pidfd()));
  }
}

void Supervisor::read_log(Watched& watched) {
  std::array<std::byte, 65536> chunk;
  for (std::size_t total = 0; total < kMaxLogBytesAtOnce;) {
    const auto got = poll_receive(watched.child.log_socket.get(), chunk);
    if (!got) watched.child.log_socket.reset();
    if (!got || *got == 0) return;
    total += *got;
    watched.received.insert(watched.received.end(), chunk.data(), chunk.data() + *got);
    if (!take_frames(watched)) {  // the stream cannot be trusted any more
      watched.child.log_socket.reset();
      watched.received.clear();
      return;
    }
  }
}

bool Supervisor::take_frames(Watched& watched) {
  const std::vector<std::byte>& received = watched.received;
  std::size_t start = 0;
  std::uint32_t length = 0;
  while (received.size() - start >= sizeof length) {
    std::memcpy(&length, received.data() + start, sizeof length);
    if (length > kMaxLogFrame) return false;
    if (received.size() - start - sizeof length < length) break;
    const std::byte* frame = received.data() + start + sizeof length;
    delegate_.child_logged(watched.child.index, std::vector<std::byte>(frame, frame + length));
    start += sizeof length + length;
  }
  watched.received.erase(watched.received.begin(),
                         watched.received.begin() + static_cast<std::ptrdiff_t>(start));
  return true;
}

// On the thread of exit_watch_. The pidfd stays the authority for the end; this says only earlier
// that it is coming.
bool Supervisor::tell_exiting(const ExitWatch::Child& child) {
  const auto status = exiting_status(child.pidfd, child.pid);
  if (!status) return false;
  // Its other threads end with its main thread, whatever ended that. Changes nothing for a process
  // that is ending as a whole, nor for what it died of.
  send_signal(child.pidfd, SIGKILL);
  delegate_.child_ended(child.index, *status);
  return true;
}

void Supervisor::handle_end(std::size_t position) {
  Watched& watched = watched_[position];
  if (watched.child.log_socket.valid()) read_log(watched);  // its last words
  if (!watched.child.forked_by_spare) return finish(position, exit_status(watched.child.pidfd));
  const auto report = reports_.find(watched.child.pid);
  if (report != reports_.end()) {
    const ExitStatus status = report->second;
    reports_.erase(report);
    return finish(position, status);
  }
  if (!reports_open_) return finish(position, {});
  watched.report_by = monotonic_now() + kReportPatience;
}

void Supervisor::handle_report() {
  const auto report = spare_.read_report();
  if (!report) {
    reports_open_ = false;
    for (std::size_t i = watched_.size(); i-- > 0;) {
      if (watched_[i].report_by != 0) finish(i, {});
    }
    return;
  }
  for (std::size_t i = 0; i < watched_.size(); ++i) {
    if (watched_[i].report_by != 0 && watched_[i].child.pid == report->pid)
      return finish(i, report->status);
  }
  reports_[report->pid] = report->status;
}

// A stopped spare says nothing: that a child has ended is known all the same.
void Supervisor::give_up_reports() {
  const Nanoseconds now = monotonic_now();
  for (std::size_t i = watched_.size(); i-- > 0;) {
    if (watched_[i].report_by != 0 && watched_[i].report_by <= now) finish(i, {});
  }
}

void Supervisor::finish(std::size_t position, const ExitStatus& status) {
  const Child& child = watched_[position].child;
  const int index = child.index;
  const int own_pidfd = child.forked_by_spare ? -1 : child.pidfd;
  watched_.erase(watched_.begin() + static_cast<std::ptrdiff_t>(position));
  if (!exit_watch_.forget(index)) delegate_.child_ended(index, status);
  if (own_pidfd >= 0) reap(own_pidfd);
  delegate_.child_reaped(index);
}

}  // namespace simpler
