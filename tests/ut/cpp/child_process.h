// Real children for tests: started by fork, ended at the latest with the object.
#pragma once

#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include "hierarchical/base/deadline.h"
#include "hierarchical/os/process.h"

namespace simpler::testing {

inline Deadline watchdog() { return Deadline::after_seconds(60); }

// Gives way to others until `condition` holds; false when the watchdog fired.
inline bool wait_until(const std::function<bool()>& condition) {
  const Deadline end = watchdog();
  while (!condition()) {
    if (end.passed()) return false;
    std::this_thread::yield();
  }
  return true;
}

// The state letter of /proc/TID/stat, which follows the parenthesised name: 'S' for asleep.
inline char thread_state(pid_t tid) {
  std::ifstream file("/proc/" + std::to_string(tid) + "/stat");
  std::string line;
  std::getline(file, line);
  const std::size_t name_end = line.rfind(')');
  return name_end == std::string::npos || name_end + 2 >= line.size() ? '?' : line[name_end + 2];
}

class ChildProcess {
 public:
  // `body` runs in the child with fresh signals and no core file; its value is the exit code.
  explicit ChildProcess(const std::function<int()>& body) : pid_(fork_process()) {
    if (pid_ == 0) {
      reset_child_signals();
      const rlimit no_core{0, 0};
      setrlimit(RLIMIT_CORE, &no_core);
      _exit(body());
    }
    pidfd_ = open_pidfd(pid_).value();
  }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;
  ~ChildProcess() {
    if (reaped_) return;
    send_signal(pidfd_.get(), SIGKILL);
    finish();
  }

  [[nodiscard]] pid_t pid() const { return pid_; }
  [[nodiscard]] int pidfd() const { return pidfd_.get(); }

  ExitStatus finish() {
    reaped_ = true;
    EXPECT_TRUE(wait_process_end(pidfd_.get(), watchdog()));
    return reap(pidfd_.get());
  }
  std::string finish_and_describe() { return describe_exit(finish()); }

 private:
  pid_t pid_;
  Descriptor pidfd_;
  bool reaped_ = false;
};

}  // namespace simpler::testing
