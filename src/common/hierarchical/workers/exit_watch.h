// Notices that a child begins to end, before its pidfd can be read: one thread that sleeps on the
// life marks of all children.
//
// A mark is the child's word, so nothing is believed: whatever changes or wakes it ends the watch
// of that child, once, and the kernel is asked. Says nothing on Linux older than 5.16 and, past
// kWatched children, about the rest; then the pidfd alone tells.
//
// Thread safety: all methods may be called from any thread, stop() from one.
// Fork: start() after the last fork of init.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "hierarchical/os/futex.h"
#include "hierarchical/os/life_mark.h"

namespace simpler {

class ExitWatch {
 public:
  static constexpr std::size_t kWatched = kMaxFutexExpectations - 1;  // and the word of its own

  struct Child {
    int index = 0;
    pid_t pid = -1;
    int pidfd = -1;            // borrowed until forget()
    LifeMark* life = nullptr;  // held by the main thread of the process, soon after the fork
  };

  // `tell` is called on the thread for a child that may be ending: it asks the kernel, says so to
  // whom it concerns, and returns whether it did.
  explicit ExitWatch(std::function<bool(const Child&)> tell) : tell_(std::move(tell)) {}
  ~ExitWatch() { stop(); }
  ExitWatch(const ExitWatch&) = delete;
  ExitWatch& operator=(const ExitWatch&) = delete;

  void watch(const Child& child);
  // Every child watched until now that lives holds its mark. May be called again.
  void start();
  // Once the child has ended. Waits for a `tell` under way; returns whether it was told.
  bool forget(int index);
  // Tells the thread to end, and returns at once.
  void quit() noexcept;
  void stop();

 private:
  struct Watched {
    Child child;
    std::uint32_t armed = 0;  // what its word holds while it lives; 0: not armed
    bool is_watched = true;
    bool is_told = false;
  };

  void run();
  std::vector<Child> look(std::vector<FutexExpectation>& words);
  void ask(const Child& child);
  void ignore_woken(const std::atomic<std::uint32_t>* word);
  void change() noexcept;

  const std::function<bool(const Child&)> tell_;
  std::mutex telling_;  // held around tell_; before mutex_
  std::mutex mutex_;
  std::thread thread_;                     // guarded by mutex_
  std::vector<Watched> watched_;           // guarded by mutex_
  std::atomic<std::uint32_t> changes_{0};  // futex word: counts what the thread must look at
  std::atomic<bool> quitting_{false};
};

}  // namespace simpler
