// Life marks and the thread that sleeps on them, with real children that end, lie or do neither.
#include "hierarchical/workers/exit_watch.h"

#include <gtest/gtest.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>
#include <memory>
#include <new>
#include <string>
#include <thread>

#include "child_process.h"
#include "hierarchical/os/shared_region.h"

namespace simpler {
namespace {

using testing::ChildProcess;
using testing::wait_until;
using testing::watchdog;

[[noreturn]] void stay_for_ever() {
  for (;;) pause();
}

bool kernel_waits_for_many() {
  const std::atomic<std::uint32_t> word{1};
  const FutexExpectation differs{&word, 2};
  return futex_wait_any({&differs, 1}).kind == FutexAny::Kind::kLookAgain;
}

TEST(FutexAny, SleepsUntilOneOfSeveralWordsIsWokenAndSaysWhich) {
  if (!kernel_waits_for_many()) GTEST_SKIP() << "no futex_waitv";
  std::atomic<std::uint32_t> words[2]{1, 1};
  std::atomic<bool> returned{false};
  FutexAny woken{FutexAny::Kind::kUnsupported};
  std::thread sleeper([&] {
    const FutexExpectation both[]{{&words[0], 1}, {&words[1], 1}};
    woken = futex_wait_any(both);
    returned.store(true);
  });
  EXPECT_TRUE(wait_until([&] {
    futex_wake(words[1], 1);
    return returned.load();
  }));
  sleeper.join();
  EXPECT_EQ(woken.kind, FutexAny::Kind::kWoken);
  EXPECT_EQ(woken.position, 1U);
}

// A child that holds a mark, as spawn_child makes them.
class ExitWatchTest : public ::testing::Test {
 protected:
  SharedRegion region{4096, "test-marks", SharedRegion::Pages::kCommitted};
  LifeMark& life{*new (region.data()) LifeMark};
  std::atomic<std::uint32_t>& go{*new (region.data() + 1024) std::atomic<std::uint32_t>{0}};
  std::atomic<int> asked{0};
  std::atomic<bool> believed{true};
  ExitWatch watch{[this](const ExitWatch::Child&) {
    asked.fetch_add(1);
    return believed.load();
  }};

  void SetUp() override {
    if (!kernel_waits_for_many()) GTEST_SKIP() << "no futex_waitv";
  }
  // The child's body runs when `go` is 1, so that the watch sleeps on its mark by then.
  std::unique_ptr<ChildProcess> child(const std::function<int()>& body) {
    auto made = std::make_unique<ChildProcess>([&] {
      life.hold();
      go.store(2);
      while (go.load() == 2) futex_wait(go, 2, watchdog());
      return body();
    });
    EXPECT_TRUE(wait_until([&] { return go.load() == 2; }));
    return made;
  }
  void let_go(std::uint32_t value) {
    go.store(value);
    futex_wake(go, 1);
  }
  std::atomic<std::uint32_t>& word() {
    return const_cast<std::atomic<std::uint32_t>&>(life.word());
  }
  void watch_closely(const ChildProcess& made) {
    watch.watch({0, made.pid(), made.pidfd(), &life});
    watch.start();
    ASSERT_TRUE(wait_until([&] { return (word().load() & FUTEX_WAITERS) != 0; }));
  }
};

TEST_F(ExitWatchTest, AMarkSaysThatItsHolderHasEndedUntilItIsMadeAnew) {
  const auto made = child([] { return 3; });
  EXPECT_FALSE(life.says_ended());
  EXPECT_FALSE(life.arm(made->pid() + 1).has_value());
  EXPECT_TRUE(life.arm(made->pid()).has_value());
  let_go(1);
  ASSERT_TRUE(wait_process_end(made->pidfd(), watchdog()));
  EXPECT_TRUE(life.says_ended());
  EXPECT_FALSE(life.arm(made->pid()).has_value());
  life.reset();
  EXPECT_FALSE(life.says_ended());
  const auto successor = child([] { return 0; });
  EXPECT_TRUE(life.arm(successor->pid()).has_value());
}

TEST_F(ExitWatchTest, CP3_AnEndIsToldOnceAndForgetSaysThatItWas) {
  const auto made = child([]() -> int { stay_for_ever(); });
  watch_closely(*made);
  send_signal(made->pidfd(), SIGKILL);
  ASSERT_TRUE(wait_until([&] { return asked.load() == 1; }));
  EXPECT_TRUE(watch.forget(0));
  EXPECT_FALSE(watch.forget(0));
  watch.stop();
  EXPECT_EQ(asked.load(), 1);
}

TEST_F(ExitWatchTest, AnEndThatTheKernelDoesNotConfirmIsNotTold) {
  believed.store(false);
  const auto made = child([]() -> int { stay_for_ever(); });
  watch_closely(*made);
  send_signal(made->pidfd(), SIGKILL);
  ASSERT_TRUE(wait_until([&] { return asked.load() == 1; }));
  EXPECT_FALSE(watch.forget(0));
}

TEST_F(ExitWatchTest, AChildThatEndsBeforeItsMarkIsHeldIsLeftToItsPidfd) {
  ChildProcess made([] { return 0; });
  watch.watch({0, made.pid(), made.pidfd(), &life});
  watch.start();
  ASSERT_TRUE(wait_process_end(made.pidfd(), watchdog()));
  watch.start();
  EXPECT_FALSE(watch.forget(0));
  watch.stop();
  EXPECT_EQ(asked.load(), 0);
}

TEST_F(ExitWatchTest, AMarkThatLiesIsAskedAboutOnceAndNoMore) {
  believed.store(false);
  const auto made = child([this]() -> int {
    word().fetch_or(FUTEX_OWNER_DIED);
    futex_wake(word(), 1);
    while (go.load() == 1) futex_wait(go, 1, watchdog());
    for (;;) {
      word().fetch_xor(FUTEX_OWNER_DIED);
      futex_wake(word(), 1);
    }
  });
  watch_closely(*made);
  let_go(1);
  ASSERT_TRUE(wait_until([&] { return asked.load() == 1; }));
  let_go(3);
  watch.start();  // a look at all that is watched
  watch.stop();
  EXPECT_EQ(asked.load(), 1);
}

TEST_F(ExitWatchTest, AMarkThatWakesWithoutACauseIsWatchedNoMore) {
  const auto made = child([this]() -> int {
    while (go.load() != 3) futex_wake(word(), 1);
    stay_for_ever();
  });
  watch_closely(*made);
  let_go(1);
  // Whoever is woken and finds nothing changed stops listening: then a wake meets nobody.
  int unheard = 0;
  ASSERT_TRUE(wait_until([&] {
    unheard =
        syscall(SYS_futex, &word(), FUTEX_WAKE, 1, nullptr, nullptr, 0) == 0 ? unheard + 1 : 0;
    return unheard == 1000;
  }));
  let_go(3);
  send_signal(made->pidfd(), SIGKILL);
  ASSERT_TRUE(wait_process_end(made->pidfd(), watchdog()));
  EXPECT_FALSE(watch.forget(0));
  watch.stop();
}

TEST_F(ExitWatchTest, StopEndsTheThreadWhateverIsWatched) {
  const auto made = child([]() -> int { stay_for_ever(); });
  watch_closely(*made);
  watch.quit();
  watch.stop();
  watch.stop();
  watch.start();  // comes to nothing now
  EXPECT_EQ(asked.load(), 0);
}

}  // namespace
}  // namespace simpler
