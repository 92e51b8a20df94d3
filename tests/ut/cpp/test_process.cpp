#include "hierarchical/os/process.h"

#include <sched.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <thread>

#include <gtest/gtest.h>

#include "child_process.h"
#include "hierarchical/base/error.h"

namespace simpler {
namespace {

using testing::ChildProcess;
using testing::thread_state;
using testing::wait_until;
using testing::watchdog;

// Sleeps until the other end of the socket pair is closed.
int sleep_until_closed(const Descriptor& end) {
  char byte = 0;
  return read(end.get(), &byte, 1) == 0 ? 0 : 1;
}

TEST(Process, ExitCodesAreDescribed) {
  EXPECT_EQ(ChildProcess([] { return 3; }).finish_and_describe(), "exited with code 3");
  EXPECT_EQ(ChildProcess([] { return 0; }).finish_and_describe(), "exited with code 0");
}

TEST(Process, EachDeathHasItsOwnDescription) {
  const auto died_of = [](int signal) {
    return ChildProcess([signal] {
             raise(signal);
             return 0;
           })
        .finish_and_describe();
  };
  EXPECT_EQ(died_of(SIGSEGV), "killed by SIGSEGV (segmentation fault)");
  EXPECT_EQ(died_of(SIGKILL), "killed by SIGKILL");
  EXPECT_EQ(died_of(SIGTERM), "killed by SIGTERM (terminated)");
  EXPECT_EQ(died_of(SIGBUS), "killed by SIGBUS (bus error)");
  EXPECT_EQ(died_of(SIGRTMIN), "killed by SIGRTMIN");
  EXPECT_EQ(died_of(SIGRTMIN + 3), "killed by SIGRTMIN+3");
  EXPECT_EQ(ChildProcess([]() -> int { std::abort(); }).finish_and_describe(),
            "killed by SIGABRT (aborted)");
}

TEST(Process, DescriptionsThatNeedNoProcess) {
  using Kind = ExitStatus::Kind;
  EXPECT_EQ(describe_exit({Kind::kSignalled, SIGSEGV, true}),
            "killed by SIGSEGV (segmentation fault), core dumped");
  EXPECT_EQ(describe_exit({Kind::kSignalled, 33, false}), "killed by signal 33");
  EXPECT_EQ(describe_exit({Kind::kTakenByAnotherWaiter, 0, false}),
            "ended; exit status taken by another waiter");
  EXPECT_EQ(describe_exit({}), "ended; exit status unknown");
}

TEST(Process, HowAnEndedProcessEndedIsToldUntilItIsReaped) {
  ChildProcess killed([]() -> int {
    for (;;) pause();
  });
  EXPECT_FALSE(exiting_status(killed.pidfd(), killed.pid()).has_value());  // it lives
  send_signal(killed.pidfd(), SIGTERM);
  ASSERT_TRUE(wait_process_end(killed.pidfd(), watchdog()));
  const ExitStatus terminated{ExitStatus::Kind::kSignalled, SIGTERM, false};
  EXPECT_EQ(exiting_status(killed.pidfd(), killed.pid()), terminated);
  killed.finish();
  EXPECT_FALSE(exiting_status(killed.pidfd(), killed.pid()).has_value());

  ChildProcess left([] { return 9; });
  ASSERT_TRUE(wait_process_end(left.pidfd(), watchdog()));
  const ExitStatus exited{ExitStatus::Kind::kExited, 9, false};
  EXPECT_EQ(exiting_status(left.pidfd(), left.pid()), exited);

  ChildProcess clean([] { return 0; });  // the kernel shows 0 also where it does not tell
  ASSERT_TRUE(wait_process_end(clean.pidfd(), watchdog()));
  EXPECT_FALSE(exiting_status(clean.pidfd(), clean.pid()).has_value());
}

TEST(Process, CP3_AProgramThatIgnoresSigchldStillLearnsOfTheEnd) {
  struct sigaction ignore{};
  struct sigaction before{};
  ignore.sa_handler = SIG_IGN;
  sigaction(SIGCHLD, &ignore, &before);
  auto [ours, theirs] = make_socket_pair();
  {
    ChildProcess child([&ours = ours, &theirs = theirs] {
      ours.reset();
      return sleep_until_closed(theirs);
    });
    ours.reset();
    EXPECT_EQ(child.finish_and_describe(), "ended; exit status taken by another waiter");
  }
  sigaction(SIGCHLD, &before, nullptr);
}

TEST(Process, CP3_AStatusTakenByWaitpidIsSaidToBeTaken) {
  ChildProcess child([] { return 3; });
  int status = 0;
  EXPECT_EQ(waitpid(child.pid(), &status, 0), child.pid());
  EXPECT_EQ(child.finish_and_describe(), "ended; exit status taken by another waiter");
}

TEST(Process, WaitingForALivingProcessEndsAtTheDeadline) {
  auto [ours, theirs] = make_socket_pair();
  ChildProcess child([&ours = ours, &theirs = theirs] {
    ours.reset();
    return sleep_until_closed(theirs);
  });
  EXPECT_FALSE(wait_process_end(child.pidfd(), Deadline::at(0)));
  EXPECT_FALSE(wait_process_end(child.pidfd(), Deadline::after_seconds(0.001)));
  ours.reset();
  EXPECT_EQ(child.finish_and_describe(), "exited with code 0");
}

TEST(Process, SignalHandlersDoNotEndTheWaitForAProcess) {
  static std::atomic<int> handled;
  handled = 0;
  struct sigaction count{};
  struct sigaction before{};
  count.sa_handler = [](int) { ++handled; };
  sigaction(SIGUSR1, &count, &before);
  auto [ours, theirs] = make_socket_pair();
  ChildProcess child([&ours = ours, &theirs = theirs] {
    ours.reset();
    return sleep_until_closed(theirs);
  });
  std::atomic<pid_t> waiting{0};
  std::atomic<bool> returned{false};
  bool ended = false;
  std::thread waiter([&] {
    waiting = gettid();
    ended = wait_process_end(child.pidfd(), watchdog());
    returned = true;
  });
  // Each is sent to a sleeper only: under ThreadSanitizer a thread that signals reach just before
  // it falls asleep can sleep with every signal blocked.
  const auto asleep = [&] { return returned || (waiting != 0 && thread_state(waiting) == 'S'); };
  bool all_handled = true;
  for (int sent = 1; sent <= 100 && all_handled; ++sent) {
    EXPECT_TRUE(wait_until(asleep));
    pthread_kill(waiter.native_handle(), SIGUSR1);
    all_handled = wait_until([&returned, sent] { return returned || handled >= sent; });
  }
  EXPECT_TRUE(all_handled);
  EXPECT_FALSE(returned) << "a signal ended the wait";
  ours.reset();
  waiter.join();
  EXPECT_TRUE(ended);
  sigaction(SIGUSR1, &before, nullptr);
}

TEST(Process, SignalsReachOnlyALivingProcess) {
  auto [ours, theirs] = make_socket_pair();
  ChildProcess child([&ours = ours, &theirs = theirs] {
    ours.reset();
    return sleep_until_closed(theirs);
  });
  EXPECT_TRUE(send_signal(child.pidfd(), SIGKILL));
  EXPECT_EQ(child.finish_and_describe(), "killed by SIGKILL");
  EXPECT_FALSE(send_signal(child.pidfd(), SIGKILL));
  EXPECT_EQ(open_pidfd(child.pid()), std::nullopt);
}

TEST(Process, TheChildIsBornWithEverySignalBlockedAndTheParentKeepsItsMask) {
  sigset_t before, after;
  pthread_sigmask(SIG_SETMASK, nullptr, &before);
  const pid_t pid = fork_process();
  if (pid == 0) {
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, nullptr, &mask);
    _exit(sigismember(&mask, SIGTERM) == 1 && sigismember(&mask, SIGINT) == 1 ? 0 : 1);
  }
  pthread_sigmask(SIG_SETMASK, nullptr, &after);
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_EQ(status, 0);
  for (int signal = 1; signal < NSIG; ++signal)
    EXPECT_EQ(sigismember(&before, signal), sigismember(&after, signal));
}

TEST(Process, LC4_TheChildsSignalsAndTimersStartAfresh) {
  struct sigaction handler{};
  struct sigaction before{};
  handler.sa_handler = [](int) {};
  sigaction(SIGTERM, &handler, &before);
  ChildProcess child([] {
    const itimerval hour{{3600, 0}, {3600, 0}};
    for (const auto timer : {ITIMER_REAL, ITIMER_VIRTUAL, ITIMER_PROF})
      setitimer(timer, &hour, nullptr);
    reset_child_signals();
    for (const auto timer : {ITIMER_REAL, ITIMER_VIRTUAL, ITIMER_PROF}) {
      itimerval now{};
      getitimer(timer, &now);
      if (now.it_value.tv_sec != 0 || now.it_value.tv_usec != 0) return 1;
    }
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, nullptr, &mask);
    for (int signal = 1; signal < NSIG; ++signal) {
      struct sigaction now{};
      if (sigismember(&mask, signal) == 1) return 2;
      if (sigaction(signal, nullptr, &now) != 0) continue;
      const bool ignored = signal == SIGINT || signal == SIGPIPE || signal == SIGXFSZ;
      if (now.sa_handler != (ignored ? SIG_IGN : SIG_DFL)) return 3;
    }
    raise(SIGINT);
    return 0;
  });
  EXPECT_EQ(child.finish_and_describe(), "exited with code 0");
  sigaction(SIGTERM, &before, nullptr);
}

TEST(Process, ThisPlatformWillDo) { EXPECT_NO_THROW(require_platform()); }

TEST(Process, UsableCoresFollowTheAffinityMask) {
  EXPECT_GE(usable_cores(), 1);
  ChildProcess child([] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(static_cast<unsigned>(sched_getcpu()), &one);
    if (sched_setaffinity(0, sizeof one, &one) != 0) return -1;
    return usable_cores();
  });
  EXPECT_EQ(child.finish_and_describe(), "exited with code 1");
}

}  // namespace
}  // namespace simpler
