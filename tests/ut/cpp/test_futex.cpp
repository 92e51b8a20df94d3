#include "hierarchical/os/futex.h"

#include <pthread.h>

#include <atomic>
#include <csignal>
#include <new>
#include <thread>

#include <gtest/gtest.h>

#include "child_process.h"
#include "hierarchical/os/shared_region.h"

namespace simpler {
namespace {

using testing::ChildProcess;
using testing::thread_state;
using testing::wait_until;
using testing::watchdog;

TEST(Futex, AWordThatDiffersReturnsAtOnce) {
  const std::atomic<std::uint32_t> word{7};
  EXPECT_EQ(futex_wait(word, 8, Deadline::never()), FutexResult::kChanged);
}

TEST(Futex, APassedDeadlineTimesOut) {
  const std::atomic<std::uint32_t> word{7};
  EXPECT_EQ(futex_wait(word, 7, Deadline::at(0)), FutexResult::kTimedOut);
  EXPECT_EQ(futex_wait(word, 7, Deadline::at(-5)), FutexResult::kTimedOut);
  EXPECT_EQ(futex_wait(word, 7, Deadline::after_seconds(0.001)), FutexResult::kTimedOut);
}

TEST(Futex, ASleeperInAnotherProcessIsWoken) {
  const SharedRegion region(sizeof(std::atomic<std::uint32_t>), "test",
                            SharedRegion::Pages::kCommitted);
  auto& word = *new (region.data()) std::atomic<std::uint32_t>{0};
  ChildProcess child([&word] {
    while (word.load(std::memory_order_acquire) == 0) {
      if (futex_wait(word, 0, watchdog()) == FutexResult::kTimedOut) return 1;
    }
    return 0;
  });
  ASSERT_TRUE(wait_until([&child] { return thread_state(child.pid()) == 'S'; }));
  word.store(1, std::memory_order_release);
  futex_wake(word, 1);
  EXPECT_EQ(child.finish_and_describe(), "exited with code 0");
}

TEST(Futex, ASignalHandlerInterruptsTheSleep) {
  struct sigaction handler{};
  struct sigaction before{};
  handler.sa_handler = [](int) {};
  sigaction(SIGUSR1, &handler, &before);
  const std::atomic<std::uint32_t> word{0};
  std::atomic<bool> returned{false};
  FutexResult result = FutexResult::kWoken;
  std::thread sleeper([&] {
    result = futex_wait(word, 0, watchdog());
    returned = true;
  });
  // One signal could arrive before the sleep begins.
  EXPECT_TRUE(wait_until([&] {
    if (!returned) pthread_kill(sleeper.native_handle(), SIGUSR1);
    return returned.load();
  }));
  sleeper.join();
  EXPECT_EQ(result, FutexResult::kInterrupted);
  sigaction(SIGUSR1, &before, nullptr);
}

}  // namespace
}  // namespace simpler
