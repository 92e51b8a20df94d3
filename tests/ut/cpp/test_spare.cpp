// The spare as a real process, asked by the parent's real handle.
#include "hierarchical/workers/spare.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <memory>

#include "child_process.h"
#include "hierarchical/base/error.h"
#include "hierarchical/os/messages.h"
#include "hierarchical/os/poller.h"

namespace simpler {
namespace {

using testing::watchdog;

[[noreturn]] void stay_for_ever() {
  for (;;) pause();
}

class SpareTest : public ::testing::Test {
 protected:
  // What a replacement does is asked by its index.
  static constexpr int kStays = 0;
  static constexpr int kExitsWithFive = 1;
  static constexpr int kIsKilled = 2;
  static constexpr int kCannotBeForked = 3;
  static constexpr int kSaysItsGeneration = 4;

  static pid_t fork_replacement(int index, std::uint64_t generation, int log_socket) {
    if (index == kCannotBeForked) {
      errno = EAGAIN;
      throw Error(ErrorCode::kSystem, "fork");
    }
    const pid_t pid = fork_process();
    if (pid != 0) return pid;
    reset_child_signals();
    if (index == kExitsWithFive) _exit(5);
    if (index == kIsKilled) raise(SIGKILL);
    if (index == kSaysItsGeneration) {
      write_record(log_socket, std::as_bytes(std::span(&generation, 1)));
    }
    stay_for_ever();
  }

  // Forked before the spare: the spare kills it, too, when the parent is gone.
  testing::ChildProcess sibling{[]() -> int { stay_for_ever(); }};
  testing::ChildProcess parent{[]() -> int { stay_for_ever(); }};  // stands for this process
  SpareHandle handle;
  std::unique_ptr<testing::ChildProcess> spare;
  std::pair<Descriptor, Descriptor> log = make_socket_pair();

  SpareTest() {
    auto [request_ours, request_theirs] = make_socket_pair();
    auto [report_ours, report_theirs] = make_pipe();
    const int ours[] = {request_ours.get(), report_ours.get()};
    SpareDuties duties;
    duties.request_socket = request_theirs.get();
    duties.report_pipe = report_theirs.get();
    duties.parent_pidfd = parent.pidfd();
    duties.children = {sibling.pidfd()};
    duties.fork_child = fork_replacement;
    spare = std::make_unique<testing::ChildProcess>([&] {
      for (const int descriptor : ours) close(descriptor);
      return run_spare(duties);
    });
    handle.set(spare->pid(), open_pidfd(spare->pid()).value(), std::move(request_ours),
               std::move(report_ours));
    EXPECT_TRUE(handle.wait_ready(watchdog()));
  }

  ~SpareTest() override {  // it takes the replacements with it
    handle.dismiss();
    send_signal(spare->pidfd(), SIGCONT);
    spare->finish();
  }

  SpareHandle::Replacement replace(int index, std::uint64_t generation = 1) {
    return handle.fork_child(index, generation, log.second, watchdog());
  }
  SpareExitReport wait_report() {
    Poller poller;
    poller.add(handle.report_pipe());
    EXPECT_TRUE(poller.wait(watchdog()));
    return handle.read_report().value();
  }
  static ErrorCode code_of(const std::function<void()>& action) {
    try {
      action();
    } catch (const Error& error) {
      return error.code();
    }
    ADD_FAILURE() << "no error";
    return ErrorCode::kInvalidArgument;
  }
};

TEST_F(SpareTest, AReplacementGetsItsGenerationAndItsLogSocket) {
  const auto replacement = replace(kSaysItsGeneration, 17);
  std::uint64_t generation = 0;
  EXPECT_TRUE(read_record(log.first.get(), std::as_writable_bytes(std::span(&generation, 1))));
  EXPECT_EQ(generation, 17U);
  EXPECT_EQ(kill(replacement.pid, 0), 0);
}

TEST_F(SpareTest, CP3_TheExitsOfReplacementsAreReportedAsTheyWere) {
  const auto exits = replace(kExitsWithFive);
  const SpareExitReport exited = wait_report();
  EXPECT_EQ(exited.pid, exits.pid);
  EXPECT_EQ(describe_exit(exited.status), "exited with code 5");
  const auto dies = replace(kIsKilled);
  const SpareExitReport killed = wait_report();
  EXPECT_EQ(killed.pid, dies.pid);
  EXPECT_EQ(describe_exit(killed.status), "killed by SIGKILL");
}

TEST_F(SpareTest, AForkThatFailsIsSaidAndTheNextOneMayWork) {
  EXPECT_EQ(code_of([&] { replace(kCannotBeForked); }), ErrorCode::kSystem);
  EXPECT_GT(replace(kStays).pid, 0);
}

TEST_F(SpareTest, OnceTheSpareIsGoneEveryRequestSaysSo) {
  send_signal(spare->pidfd(), SIGKILL);
  spare->finish();
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(code_of([&] { replace(kStays); }), ErrorCode::kWorkerDied);
  }
  EXPECT_FALSE(handle.read_report());
}

TEST_F(SpareTest, AForkAfterItsTimeOutIsEndedBeforeTheNextRequest) {
  send_signal(spare->pidfd(), SIGSTOP);
  EXPECT_EQ(code_of([&] { handle.fork_child(kStays, 1, log.second, Deadline::at(0)); }),
            ErrorCode::kTimedOut);
  EXPECT_EQ(code_of([&] { handle.settle(Deadline::at(0)); }), ErrorCode::kTimedOut);
  send_signal(spare->pidfd(), SIGCONT);
  handle.settle(watchdog());
  const SpareExitReport late = wait_report();
  EXPECT_EQ(describe_exit(late.status), "killed by SIGKILL");
  EXPECT_NE(replace(kStays).pid, late.pid);
}

TEST_F(SpareTest, ACancelledHandleWaitsForNothing) {
  send_signal(spare->pidfd(), SIGSTOP);
  handle.cancel();
  EXPECT_EQ(code_of([&] { handle.fork_child(kStays, 1, log.second, Deadline::never()); }),
            ErrorCode::kTimedOut);
  send_signal(spare->pidfd(), SIGCONT);
}

TEST_F(SpareTest, LC3_WhenTheParentEndsTheSpareKillsWhoeverIsLeft) {
  const auto replacement = replace(kStays);
  send_signal(parent.pidfd(), SIGKILL);
  EXPECT_TRUE(wait_process_end(replacement.pidfd.get(), watchdog()));
  EXPECT_EQ(sibling.finish_and_describe(), "killed by SIGKILL");
  EXPECT_EQ(spare->finish_and_describe(), "exited with code 0");
}

TEST_F(SpareTest, LC2_ADismissedSpareLeavesWithAllItsChildren) {
  const auto replacement = replace(kStays);
  handle.dismiss();
  EXPECT_EQ(spare->finish_and_describe(), "exited with code 0");
  EXPECT_TRUE(wait_process_end(replacement.pidfd.get(), watchdog()));
  EXPECT_EQ(code_of([&] { replace(kStays); }), ErrorCode::kWorkerDied);
}

}  // namespace
}  // namespace simpler
