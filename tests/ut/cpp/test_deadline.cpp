#include "hierarchical/base/deadline.h"

#include <gtest/gtest.h>

#include <limits>

namespace simpler {
namespace {

Nanoseconds fake_now = 0;
Nanoseconds fake_clock() noexcept { return fake_now; }

class DeadlineOnAFakeClock : public ::testing::Test {
 protected:
  void SetUp() override {
    fake_now = 1'000;
    set_clock_for_testing(&fake_clock);
  }
  void TearDown() override { set_clock_for_testing(nullptr); }
};

TEST(Deadline, TheRealClockNeverGoesBack) {
  const Nanoseconds first = monotonic_now();
  EXPECT_GT(first, 0);
  EXPECT_GE(monotonic_now(), first);
}

TEST_F(DeadlineOnAFakeClock, PassesExactlyAtItsTime) {
  const Deadline deadline = Deadline::after_seconds(2e-6);
  EXPECT_EQ(deadline.ns(), 3'000);
  fake_now = 2'999;
  EXPECT_FALSE(deadline.passed());
  EXPECT_EQ(deadline.remaining_ns(), 1);
  fake_now = 3'000;
  EXPECT_TRUE(deadline.passed());
  EXPECT_EQ(deadline.remaining_ns(), 0);
  fake_now = 9'000;
  EXPECT_EQ(deadline.remaining_ns(), 0);
}

TEST_F(DeadlineOnAFakeClock, ZeroAndNegativeTimesHavePassedAlready) {
  EXPECT_TRUE(Deadline::after_seconds(0).passed());
  EXPECT_TRUE(Deadline::after_seconds(-1).passed());
  EXPECT_TRUE(Deadline::after_seconds(-std::numeric_limits<double>::infinity()).passed());
}

TEST_F(DeadlineOnAFakeClock, TimesBeyondTheClockSaturateToNever) {
  for (const double seconds :
       {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::max(), 1e10, 9.3e9}) {
    EXPECT_TRUE(Deadline::after_seconds(seconds).is_never()) << seconds;
  }
  EXPECT_FALSE(Deadline::after_seconds(9.2e9).is_never());
  fake_now = std::numeric_limits<Nanoseconds>::max() - 1'000;
  EXPECT_TRUE(Deadline::after_seconds(1).is_never());
  EXPECT_FALSE(Deadline::after_seconds(1e-7).is_never());
}

TEST_F(DeadlineOnAFakeClock, NeverDoesNotPassAndHasForeverLeft) {
  fake_now = std::numeric_limits<Nanoseconds>::max();
  EXPECT_FALSE(Deadline::never().passed());
  EXPECT_EQ(Deadline::never().remaining_ns(), Deadline::kForever);
}

TEST_F(DeadlineOnAFakeClock, AVeryOldClockDoesNotOverflowTheRest) {
  fake_now = std::numeric_limits<Nanoseconds>::min();
  EXPECT_EQ(Deadline::at(5).remaining_ns(), Deadline::kForever);
}

TEST(Deadline, TheEarlierOfTwoIsTheSmaller) {
  EXPECT_EQ(Deadline::at(3).earlier(Deadline::at(5)).ns(), 3);
  EXPECT_EQ(Deadline::never().earlier(Deadline::at(5)).ns(), 5);
}

}  // namespace
}  // namespace simpler
