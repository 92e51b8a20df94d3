// The supervisor's thread over real children, told to a delegate that writes down what it hears.
#include "hierarchical/workers/supervisor.h"

#include <gtest/gtest.h>
#include <linux/futex.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <thread>

#include "child_process.h"
#include "hierarchical/os/shared_region.h"

namespace simpler {
namespace {

using testing::wait_until;

class Notes : public SupervisorDelegate {
 public:
  void child_ended(int index, const ExitStatus& status) override {
    add("child " + std::to_string(index) + " " + describe_exit(status));
  }
  void child_reaped(int index) override { add("reaped " + std::to_string(index)); }
  void child_logged(int index, std::vector<std::byte> frame) override {
    add("log " + std::to_string(index) + " " +
        std::string(reinterpret_cast<const char*>(frame.data()), frame.size()));
  }
  void spare_ended(const ExitStatus& status) override { add("spare " + describe_exit(status)); }
  void trim() override { add("trim"); }

  std::vector<std::string> all() {
    const std::lock_guard lock(mutex_);
    return notes_;
  }
  bool wait_for(std::size_t count) {
    return wait_until([&] { return all().size() >= count; });
  }

 private:
  void add(std::string note) {
    const std::lock_guard lock(mutex_);
    notes_.push_back(std::move(note));
  }
  std::mutex mutex_;
  std::vector<std::string> notes_;  // guarded by mutex_
};

using Strings = std::vector<std::string>;

class SupervisorTest : public ::testing::Test {
 protected:
  Notes notes;
  SpareHandle spare;
  Supervisor supervisor{notes, spare};
  std::pair<Descriptor, Descriptor> log = make_socket_pair();

  SharedRegion region{4096, "test-mark", SharedRegion::Pages::kCommitted};
  LifeMark& life{*new (region.data()) LifeMark};
  std::atomic<std::uint32_t>& begun{*new (region.data() + 1024) std::atomic<std::uint32_t>{0}};

  void watch(const testing::ChildProcess& child, int index, Descriptor socket = {}) {
    supervisor.watch({index, child.pid(), child.pidfd(), std::move(socket), false});
  }
  // A child that holds the mark, watched closely when this returns.
  std::unique_ptr<testing::ChildProcess> closely(const std::function<int()>& body) {
    auto child = std::make_unique<testing::ChildProcess>([&] {
      life.hold();
      begun.store(1);
      return body();
    });
    supervisor.watch({0, child->pid(), child->pidfd(), {}, false, &life});
    supervisor.start();
    EXPECT_TRUE(wait_until([&] { return begun.load() != 0; }));
    supervisor.watch_ends();
    return child;
  }
  void send(std::string_view bytes) {
    ASSERT_EQ(write(log.second.get(), bytes.data(), bytes.size()),
              static_cast<ssize_t>(bytes.size()));
  }
};

TEST_F(SupervisorTest, CP3_EachEndIsToldOnceAndThenReaped) {
  testing::ChildProcess first([] { return 4; });
  testing::ChildProcess second([]() -> int {
    for (;;) pause();
  });
  watch(first, 0);
  watch(second, 1);
  supervisor.start();
  ASSERT_TRUE(notes.wait_for(2));
  EXPECT_EQ(notes.all(), (Strings{"child 0 exited with code 4", "reaped 0"}));
  send_signal(second.pidfd(), SIGKILL);
  ASSERT_TRUE(notes.wait_for(4));
  EXPECT_EQ(notes.all()[2], "child 1 killed by SIGKILL");
}

TEST_F(SupervisorTest, AChildWatchedWhileItSleepsIsNoticedAtOnce) {
  supervisor.start();
  testing::ChildProcess child([] { return 0; });
  watch(child, 7);
  ASSERT_TRUE(notes.wait_for(2));
  EXPECT_EQ(notes.all()[0], "child 7 exited with code 0");
}

TEST_F(SupervisorTest, CP3_AnEndToldEarlyIsToldOnceAndReapedLater) {
  const auto child = closely([]() -> int {
    for (;;) pause();
  });
  send_signal(child->pidfd(), SIGKILL);
  ASSERT_TRUE(notes.wait_for(2));
  supervisor.stop();
  EXPECT_EQ(notes.all(), (Strings{"child 0 killed by SIGKILL", "reaped 0"}));
}

TEST_F(SupervisorTest, AChildWhoseMainThreadHasEndedIsDeadAndIsMadeToEnd) {
  std::atomic<std::uint32_t> probe{1};
  const FutexExpectation differs{&probe, 2};
  if (futex_wait_any({&differs, 1}).kind == FutexAny::Kind::kUnsupported)
    GTEST_SKIP() << "no futex_waitv";
  const auto child = closely([]() -> int {
    std::thread([] {
      for (;;) pause();
    }).detach();
    syscall(SYS_exit, 6);  // the process lives on in its other thread
    return 0;
  });
  ASSERT_TRUE(notes.wait_for(2));
  EXPECT_EQ(notes.all(), (Strings{"child 0 exited with code 6", "reaped 0"}));
}

TEST_F(SupervisorTest, AMarkThatLiesChangesNothing) {
  const auto child = closely([this]() -> int {
    auto& word = const_cast<std::atomic<std::uint32_t>&>(life.word());
    word.fetch_or(FUTEX_OWNER_DIED);
    futex_wake(word, 1);
    begun.store(2);
    for (;;) pause();
  });
  ASSERT_TRUE(wait_until([&] { return begun.load() == 2; }));
  testing::ChildProcess other([] { return 0; });
  watch(other, 1);
  ASSERT_TRUE(notes.wait_for(2));
  EXPECT_EQ(notes.all(), (Strings{"child 1 exited with code 0", "reaped 1"}));
  send_signal(child->pidfd(), SIGTERM);
  ASSERT_TRUE(notes.wait_for(4));
  EXPECT_EQ(notes.all()[2], "child 0 killed by SIGTERM (terminated)");
}

TEST_F(SupervisorTest, FramesCutAnywhereArriveWhole) {
  testing::ChildProcess child([]() -> int {
    for (;;) pause();
  });
  watch(child, 0, std::move(log.first));
  supervisor.start();
  const std::string two("\x03\0\0\0abc\x02\0\0\0de", 13);
  for (const char byte : two) send({&byte, 1});
  ASSERT_TRUE(notes.wait_for(2));
  send(two + two);
  ASSERT_TRUE(notes.wait_for(6));
  EXPECT_EQ(notes.all(),
            (Strings{"log 0 abc", "log 0 de", "log 0 abc", "log 0 de", "log 0 abc", "log 0 de"}));
}

TEST_F(SupervisorTest, LastWordsAreHeardBeforeTheDeath) {
  const std::string frame("\x04\0\0\0last", 8);
  testing::ChildProcess child(
      [&] { return write(log.second.get(), frame.data(), frame.size()) == 8 ? 0 : 1; });
  ASSERT_TRUE(wait_process_end(child.pidfd(), testing::watchdog()));
  watch(child, 0, std::move(log.first));
  supervisor.start();
  ASSERT_TRUE(notes.wait_for(3));
  EXPECT_EQ(notes.all()[0], "log 0 last");
}

TEST_F(SupervisorTest, AFrameLengthBeyondAllMeasureEndsTheStreamButNotTheWatch) {
  testing::ChildProcess child([]() -> int {
    for (;;) pause();
  });
  log = make_socket_pair();  // of which the child has no copy
  watch(child, 0, std::move(log.first));
  supervisor.start();
  send(std::string(8, '\xff'));
  const std::string good("\x01\0\0\0x", 5);
  ASSERT_TRUE(wait_until([&] {  // until the reader has hung up
    return ::send(log.second.get(), good.data(), good.size(), MSG_NOSIGNAL) < 0;
  }));
  send_signal(child.pidfd(), SIGKILL);
  ASSERT_TRUE(notes.wait_for(2));
  EXPECT_EQ(notes.all()[0], "child 0 killed by SIGKILL");
}

TEST_F(SupervisorTest, LC7_PagesAreTrimmedOnceAfterTheyWereUsed) {
  supervisor.start();
  supervisor.poke_trim();
  supervisor.poke_trim();
  ASSERT_TRUE(notes.wait_for(1));
  supervisor.stop();
  EXPECT_EQ(notes.all(), Strings{"trim"});
}

TEST_F(SupervisorTest, StopEndsTheThreadWhateverIsWatched) {
  testing::ChildProcess child([]() -> int {
    for (;;) pause();
  });
  watch(child, 0);
  supervisor.start();
  supervisor.stop();
  supervisor.stop();
  EXPECT_TRUE(notes.all().empty());
}

}  // namespace
}  // namespace simpler
