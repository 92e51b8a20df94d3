// A word in shared memory that the kernel changes when the thread that holds it ends.
//
// It does so before it takes the memory of the process down, and only after that can the process be
// reaped: who sleeps on the word learns of the end milliseconds earlier than by a pidfd. It is the
// word of a robust mutex, which the C library keeps in a list for the kernel to walk. exec changes
// it as well, and whoever has the memory can write it: only a hint that an end may be near.
//
// Thread safety: hold() on the thread to be watched; the rest by one thread at a time.
// Fork: constructed in shared memory before the fork. Always says nothing where the C library is
// not glibc.
#pragma once

#include <pthread.h>
#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <optional>

namespace simpler {

class alignas(64) LifeMark {
 public:
  LifeMark() noexcept { reset(); }
  LifeMark(const LifeMark&) = delete;
  LifeMark& operator=(const LifeMark&) = delete;

  // Makes it anew. REQUIRES: its holder has ended.
  void reset() noexcept;
  // The calling thread holds it until its end. Never blocks.
  void hold() noexcept;

  // Asks the kernel to wake the sleepers on word() at the end of thread `holder`; returns what the
  // word holds until then, nullopt when that thread does not hold it.
  std::optional<std::uint32_t> arm(pid_t holder) noexcept;
  // A holder of this mark has ended, or says so.
  [[nodiscard]] bool says_ended() const noexcept;
  [[nodiscard]] const std::atomic<std::uint32_t>& word() const noexcept;

 private:
  pthread_mutex_t mutex_;
};

}  // namespace simpler
