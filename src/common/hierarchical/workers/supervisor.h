// One thread of the parent that sleeps until a child ends or logs: pidfds, log sockets, the spare's
// reports. A second one (exit_watch.h) tells of ends before the pidfds do.
//
// It never takes the GIL, so that a death is noticed whatever Python does.
//
// Thread safety: start, stop and watch from any thread, one at a time; the delegate is called on
// the supervisor's thread, child_ended also on the other. Fork: start() after the last fork of
// init.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "hierarchical/os/descriptor.h"
#include "hierarchical/os/process.h"
#include "hierarchical/workers/exit_watch.h"
#include "hierarchical/workers/spare.h"

namespace simpler {

class SupervisorDelegate {
 public:
  virtual ~SupervisorDelegate() = default;
  // No thread of the child will run code of its own again, but the process may be there still.
  virtual void child_ended(int index, const ExitStatus& status) = 0;
  // Follows child_ended, when nothing is left of it: the kernel takes its memory down in between,
  // and reaping may take long (os/process.h).
  virtual void child_reaped(int index) = 0;
  virtual void child_logged(int index, std::vector<std::byte> frame) = 0;
  virtual void spare_ended(const ExitStatus& status) = 0;
  // Called once about a second after poke_trim: gives unused payload pages back.
  virtual void trim() = 0;
};

class Supervisor {
 public:
  struct Child {
    int index = 0;
    pid_t pid = -1;
    int pidfd = -1;  // borrowed: stays open until child_reaped has been called
    Descriptor log_socket;
    bool forked_by_spare = false;
    LifeMark* life = nullptr;  // nullptr: its pidfd alone tells of its end
  };

  Supervisor(SupervisorDelegate& delegate, SpareHandle& spare);
  ~Supervisor() { stop(); }
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  void watch(Child child);
  // The children watched until now have begun their work: from now on their ends are told as soon
  // as they begin, where the kernel can say. Again after a restart.
  void watch_ends() { exit_watch_.start(); }
  // The children are about to leave: their ends need not be told early any more.
  void expect_ends() noexcept { exit_watch_.quit(); }
  void start();  // does nothing when it runs already
  void stop();
  // Payload pages were used: trim them when it has been quiet for a while.
  void poke_trim();

 private:
  struct Watched {
    Child child;
    std::vector<std::byte> received;  // of the log stream, not yet a whole frame
    Nanoseconds report_by = 0;        // ended, and only the spare can say how; 0: not ended
  };

  void run();
  void take_new();
  void poll_once();
  void read_log(Watched& watched);
  bool take_frames(Watched& watched);  // false for what is not a frame of ours
  bool tell_exiting(const ExitWatch::Child& child);
  void handle_end(std::size_t position);
  void handle_report();
  void give_up_reports();
  void finish(std::size_t position, const ExitStatus& status);

  SupervisorDelegate& delegate_;
  SpareHandle& spare_;
  Descriptor wake_;
  ExitWatch exit_watch_;
  std::thread thread_;
  std::mutex mutex_;
  std::vector<Child> new_;  // guarded by mutex_
  std::atomic<bool> stopping_{false};
  std::atomic<std::int64_t> trim_at_{0};  // 0: nothing to trim
  // the supervisor's thread only
  std::vector<Watched> watched_;
  std::map<pid_t, ExitStatus> reports_;
  bool spare_alive_ = true;
  bool reports_open_ = true;
};

}  // namespace simpler
