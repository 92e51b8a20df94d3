// Spin seats in every interleaving: the limit holds whoever comes when.
#include <gtest/gtest.h>

#include <memory>

#include "hierarchical/ipc/spin.h"
#include "model/atom.h"

namespace simpler::model {
namespace {

struct SeatWorld {
  TreeHeader<ModelAtom> tree;
  std::uint32_t seated = 0;  // observed, no part of the protocol
};

template <typename Sit>
void sit_and_leave(Scenario& scenario, std::uint32_t limit, Sit sit) {
  auto world = std::make_shared<SeatWorld>();
  world->tree.spin_limit = limit;
  world->tree.spinners.label("spinners");
  for (std::uint64_t i = 0; i < 3; ++i) {
    scenario.thread("spinner " + std::to_string(i), [world, sit, i] {
      for (int round = 0; round < 2; ++round) {
        const std::uint64_t seat = sit(world->tree, i == 0 ? std::uint64_t{1} : kCallerSeats);
        if (seat == 0) continue;
        check(++world->seated <= world->tree.spin_limit, "CP-11: no more spinners than the limit");
        world->tree.spinners.load(std::memory_order_relaxed);  // time passes
        --world->seated;
        spin_leave(world->tree, seat);
      }
    });
  }
  scenario.finally([world] { check(world->tree.spinners.load() == 0, "every seat is left"); });
}

const auto kSit = [](TreeHeader<ModelAtom>& tree, std::uint64_t wanted) {
  return spin_sit(tree, wanted);
};

TEST(SpinModel, CP11_SpinnersNeverExceedTheLimit) {
  for (const std::uint32_t limit : {0U, 1U, 2U}) {
    const Verdict verdict = explore({.preemptions = at_most(3), .weak_fails = 1},
                                    [&](Scenario& s) { sit_and_leave(s, limit, kSit); });
    EXPECT_TRUE(verdict.good()) << verdict.report;
  }
}

TEST(SpinModel, CP11_SeatOfADeadChildIsFreeAgainOnceTheParentClearsIt) {
  const auto setup = [](Scenario& scenario) {
    auto world = std::make_shared<SeatWorld>();
    world->tree.spin_limit = 1;
    const int child =
        scenario.mortal("child", [world] { spin_leave(world->tree, spin_sit(world->tree, 1)); });
    scenario.daemon("reaper", [world, child] {
      join(child);
      spin_leave(world->tree, 1);
      check(spin_sit(world->tree, kCallerSeats) != 0, "the seat is free");
    });
  };
  const Verdict verdict = explore({.preemptions = 2}, setup);
  EXPECT_TRUE(verdict.good()) << verdict.report;
}

TEST(SpinModelNotices, SeatTakenWithoutASwap) {
  const auto sit = [](TreeHeader<ModelAtom>& tree, std::uint64_t wanted) {
    const std::uint64_t taken = tree.spinners.load();
    const std::uint64_t free = wanted & ~taken;
    if (free == 0 || static_cast<std::uint32_t>(std::popcount(taken)) >= tree.spin_limit)
      return std::uint64_t{0};
    const std::uint64_t seat = free & (~free + 1);
    tree.spinners.fetch_or(seat);
    return seat;
  };
  const Verdict verdict = explore({}, [&](Scenario& s) { sit_and_leave(s, 1, sit); });
  EXPECT_EQ(verdict.failure, Failure::kCheck) << verdict.report;
}

}  // namespace
}  // namespace simpler::model
