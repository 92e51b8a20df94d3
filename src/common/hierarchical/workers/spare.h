// The spare: a single-threaded process, forked at init, that forks replacements for dead children
// later, when the parent has threads and must not fork a tree any more.
//
// It also watches the parent: half a second after the parent's death it kills by pidfd whatever
// child is still there (a stopped child cannot act by itself).
//
// Protocol: fixed-size records over a Unix socket pair, one request at a time; a replacement's log
// socket travels to the spare and its pidfd back as SCM_RIGHTS. Exits of replacements are reported
// over a pipe of their own, since only the spare can wait for them.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "hierarchical/base/error.h"
#include "hierarchical/os/descriptor.h"
#include "hierarchical/os/process.h"

namespace simpler {

struct SpareExitReport {
  pid_t pid;
  ExitStatus status;
};

// The spare's side.
struct SpareDuties {
  int request_socket = -1;
  int report_pipe = -1;
  int parent_pidfd = -1;
  std::vector<int> children;  // pidfds of the children that the parent forked
  // Forks child `index` with its log socket; returns its pid.
  std::function<pid_t(int index, std::uint64_t generation, int log_socket)> fork_child;
};
int run_spare(const SpareDuties& duties);

// The parent's side.
// Thread safety: all methods may be called from any thread.
class SpareHandle {
 public:
  struct Replacement {
    pid_t pid = -1;
    Descriptor pidfd;
  };

  SpareHandle() : cancel_(make_event()) {}
  void set(pid_t pid, Descriptor pidfd, Descriptor request_socket, Descriptor report_pipe);

  // Until the spare has let go of what it inherited and takes requests; false at the deadline.
  // Throws Error{kWorkerDied} when it is gone. To be called until true, before any request.
  bool wait_ready(Deadline deadline);
  // A fork that was not waited for to its end may have happened since: ends that process. Before
  // anything is posted that it could take for its own. Throws as fork_child.
  void settle(Deadline deadline);
  // Throws Error{kWorkerDied} when the spare is gone, Error{kTimedOut}, Error{kSystem} when its
  // fork failed.
  Replacement fork_child(int index, std::uint64_t generation, const Descriptor& log_socket,
                         Deadline deadline);

  [[nodiscard]] pid_t pid() const noexcept { return pid_; }
  [[nodiscard]] int pidfd() const noexcept { return pidfd_.get(); }
  [[nodiscard]] int report_pipe() const noexcept { return report_pipe_.get(); }
  // The next report; nullopt at the end of the stream (the spare is gone). REQUIRES: the pipe is
  // readable.
  std::optional<SpareExitReport> read_report();
  // Waits for the spare end now and later as if their time had run out.
  void cancel() noexcept;
  // The end of the request stream tells the spare to leave.
  void dismiss();

 private:
  [[nodiscard]] Error gone() const;
  Replacement wait_reply(Deadline deadline);  // REQUIRES: mutex_ held

  std::mutex mutex_;  // one request at a time
  pid_t pid_ = -1;
  Descriptor pidfd_;
  Descriptor cancel_;
  Descriptor request_socket_;  // guarded by mutex_
  bool reply_due_ = false;     // guarded by mutex_
  Descriptor report_pipe_;
};

}  // namespace simpler
