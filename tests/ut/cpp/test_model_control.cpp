// The control slot's protocol in every interleaving: callers that give up, lanes, and a child that
// dies.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "model/control_ends.h"

namespace simpler::model {
namespace {

void tell(const Verdict& verdict) {
  testing::Test::RecordProperty("executions", static_cast<int>(verdict.executions));
}

const Deadline kSoon = Deadline::at(0);

template <typename Moves = SoundMoves>
std::shared_ptr<ControlWorld<ModelAtom, Moves>> make_world() {
  auto world = std::make_shared<ControlWorld<ModelAtom, Moves>>();
  world->slots[0].state.label("slot 0");
  world->slots[0].waiter.label("slot 0's waiter");
  world->slots[1].state.label("slot 1");
  world->slots[1].waiter.label("slot 1's waiter");
  world->main_bell.pending.label("main bell");
  world->main_bell.sleepers.label("main bell's sleepers");
  world->service_bell.pending.label("service bell");
  world->service_bell.sleepers.label("service bell's sleepers");
  world->released.count.label("released");
  world->dead.label("dead");
  return world;
}

// One call that may give up, whatever becomes of it, then one that is to be answered.
template <typename Moves>
void call_twice(Scenario& scenario) {
  auto world = make_world<Moves>();
  scenario.thread("caller", [world] {
    const Outcome first = world->call(0, 1, kSoon);
    if (first == Outcome::kAbandoned) world->reclaim(0);
    world->check_ran_once_iff(1, first);
    check(world->late == (first == Outcome::kAbandoned ? 1U : 0U), "CP-1: a late reply is counted");
    const Outcome second = world->call(0, 2, Deadline::never());
    check(second == Outcome::kReplied, "the slot works after a call that gave up");
    world->check_ran_once_iff(2, second);
    world->check_ran_once_iff(1, first);
  });
  scenario.daemon("child", [world] { world->serve_all(Lane::kMain); });
  scenario.finally([world] { world->check_all_idle(); });
}

template <typename Moves>
void call_until_death(Scenario& scenario, Deadline deadline, std::uint64_t calls) {
  auto world = make_world<Moves>();
  scenario.thread("caller", [world, deadline, calls] {
    Outcome last = Outcome::kReplied;
    for (std::uint64_t id = 1; id <= calls; ++id) {
      const bool was_gone = last == Outcome::kPeerGone;
      last = world->call(0, id, deadline);
      if (was_gone) check(last == Outcome::kPeerGone, "CP-4: a death is sticky");
      if (last == Outcome::kAbandoned) world->reclaim(0);
      world->check_ran_once_iff(id, last);
    }
  });
  const int child = scenario.mortal("child", [world] { world->serve_all(Lane::kMain); });
  scenario.daemon("reaper", [world, child] {
    join(child);
    world->reap();
  });
  scenario.finally([world] { world->check_all_idle(); });
}

TEST(ControlModel, CP1_LateReplyNeverAnswersTheNextCall) {
  const Verdict verdict =
      explore({.preemptions = at_most(3), .timeouts = 1}, call_twice<SoundMoves>);
  EXPECT_TRUE(verdict.good()) << verdict.report;
  tell(verdict);
}

TEST(ControlModel, CP1_HoldsWithSignalsSpuriousWakeUpsAndBufferedStores) {
  const Verdict verdict = explore({.preemptions = at_most(2),
                                   .timeouts = 1,
                                   .spurious = 1,
                                   .signals = 1,
                                   .store_buffers = true},
                                  call_twice<SoundMoves>);
  EXPECT_TRUE(verdict.good()) << verdict.report;
  tell(verdict);
}

TEST(ControlModel, CP3_DeathWakesTheWaiterAtAnyMoment) {
  const Verdict verdict =
      explore({.preemptions = at_most(2), .store_buffers = true},
              [](Scenario& s) { call_until_death<SoundMoves>(s, Deadline::never(), 1); });
  EXPECT_TRUE(verdict.good()) << verdict.report;
  tell(verdict);
}

TEST(ControlModel, CP4_DeathIsStickyForTheCallAfterIt) {
  const Verdict verdict =
      explore({.preemptions = at_most(1), .store_buffers = true},
              [](Scenario& s) { call_until_death<SoundMoves>(s, Deadline::never(), 2); });
  EXPECT_TRUE(verdict.good()) << verdict.report;
  tell(verdict);
}

TEST(ControlModel, CP3_DeathAndTimeOutMeet) {
  const Verdict verdict = explore({.preemptions = at_most(2), .timeouts = 1},
                                  [](Scenario& s) { call_until_death<SoundMoves>(s, kSoon, 1); });
  EXPECT_TRUE(verdict.good()) << verdict.report;
  tell(verdict);
}

TEST(ControlModel, CP6_TwoCallersOfOneChildGetTheirOwnReplies) {
  const auto setup = [](Scenario& scenario) {
    auto world = make_world<>();
    world->used = 2;
    for (std::size_t i = 0; i < 2; ++i) {
      scenario.thread("caller " + std::to_string(i), [world, i] {
        const Outcome outcome = world->call(i, i + 1, kSoon);
        if (outcome == Outcome::kAbandoned) world->reclaim(i);
        world->check_ran_once_iff(i + 1, outcome);
      });
    }
    scenario.daemon("child", [world] { world->serve_all(Lane::kMain); });
    scenario.finally([world] { world->check_all_idle(); });
  };
  const Verdict verdict = explore({.preemptions = at_most(2), .timeouts = 1}, setup);
  EXPECT_TRUE(verdict.good()) << verdict.report;
  tell(verdict);
}

// A slot's bit in one bell outlives the request, which was withdrawn; the slot is posted again for
// the other lane.
template <typename Moves>
void change_lanes(Scenario& scenario) {
  auto world = make_world<Moves>();
  scenario.thread("caller", [world] {
    const Outcome first = world->call(0, 1, kSoon, Lane::kService);
    if (first == Outcome::kAbandoned) world->reclaim(0);
    check(world->call(0, 2, Deadline::never(), Lane::kMain) == Outcome::kReplied,
          "the second call is answered");
    world->check_ran_once_iff(1, first);
  });
  scenario.daemon("main thread", [world] { world->serve_all(Lane::kMain); });
  scenario.daemon("service thread", [world] { world->serve_all(Lane::kService); });
}

TEST(ControlModel, CP10_StaleBellBitNeverCrossesLanes) {
  const Verdict verdict =
      explore({.preemptions = at_most(2), .timeouts = 1}, change_lanes<SoundMoves>);
  EXPECT_TRUE(verdict.good()) << verdict.report;
  tell(verdict);
}

TEST(ControlModel, RequestForAnyLaneRunsOnceThoughBothAreRung) {
  const auto setup = [](Scenario& scenario) {
    auto world = make_world<>();
    scenario.thread("caller", [world] {
      for (std::uint64_t id = 1; id <= 2; ++id) {
        check(world->call(0, id, Deadline::never(), Lane::kAny) == Outcome::kReplied,
              "it is answered");
        world->check_ran_once_iff(id, Outcome::kReplied);
      }
    });
    scenario.daemon("main thread", [world] { world->serve_all(Lane::kMain); });
    scenario.daemon("service thread", [world] { world->serve_all(Lane::kService); });
  };
  const Verdict verdict = explore({.preemptions = at_most(1), .store_buffers = true}, setup);
  EXPECT_TRUE(verdict.good()) << verdict.report;
  tell(verdict);
}

// The poster rings the service threads only when the main thread says it is busy; that one says so,
// then looks once more for requests of any lane, and is not heard of again.
void post_beside_busy_main(Scenario& scenario, std::memory_order busy_order) {
  auto world = make_world<>();
  auto busy = std::make_shared<ModelAtom<std::uint32_t>>(0);
  busy->label("main_busy");
  scenario.thread("caller", [world, busy] {
    world->fill(0, 1, Lane::kAny);
    slot_post(world->slots[0]);
    bell_ring(world->main_bell, 1U);
    if (busy->load(std::memory_order_seq_cst) != 0) bell_ring(world->service_bell, 1U);
    check(world->await(0, 1, Deadline::never()) == Outcome::kReplied, "it is answered");
  });
  scenario.thread("main thread", [world, busy, busy_order] {
    busy->store(1, busy_order);
    if (is_posted(world->slots[0].state.load(std::memory_order_seq_cst)))
      world->serve(0, Lane::kAny);
  });
  scenario.daemon("service thread", [world] { world->serve_all(Lane::kService); });
}

TEST(ControlModel, RequestForAnyLaneNeverWaitsBehindABusyMainThread) {
  const Verdict verdict =
      explore({.preemptions = at_most(3), .store_buffers = true},
              [](Scenario& s) { post_beside_busy_main(s, std::memory_order_seq_cst); });
  EXPECT_TRUE(verdict.good()) << verdict.report;
  tell(verdict);
}

TEST(ControlModelNotices, BusyFlagThatIsNotSequentiallyConsistent) {
  const auto setup = [](Scenario& s) { post_beside_busy_main(s, std::memory_order_release); };
  EXPECT_TRUE(explore({.preemptions = at_most(3)}, setup).good());
  EXPECT_EQ(explore({.store_buffers = true}, setup).failure, Failure::kDeadlock);
}

TEST(ControlModel, LongRandomSchedulesOfTwoCallersLanesAndADeathHold) {
  const auto setup = [](Scenario& scenario) {
    auto world = make_world<>();
    world->used = 2;
    for (std::size_t i = 0; i < 2; ++i) {
      scenario.thread("caller " + std::to_string(i), [world, i] {
        for (std::uint64_t call = 0; call < 5; ++call) {
          const Lane lane = (call + i) % 3 == 0 ? Lane::kAny : Lane::kMain;
          const std::uint64_t id = 1 + call * 2 + i;
          const Outcome outcome = world->call(i, id, kSoon, lane);
          if (outcome == Outcome::kAbandoned) world->reclaim(i);
          world->check_ran_once_iff(id, outcome);
        }
      });
    }
    const int child = scenario.mortal("child", [world] { world->serve_all(Lane::kMain); });
    scenario.daemon("reaper", [world, child] {
      join(child);
      world->reap();
    });
    scenario.finally([world] { world->check_all_idle(); });
  };
  const Verdict verdict = explore({.timeouts = 4,
                                   .spurious = 2,
                                   .signals = 2,
                                   .store_buffers = true,
                                   .random_runs = at_most_runs(50000),
                                   .seed = 7},
                                  setup);
  EXPECT_TRUE(verdict.good()) << verdict.report;
}

// Each of these is wrong in one place, and the explorer must say so.

struct PosterNeverLooksForDeath : SoundMoves {
  static constexpr bool kLooksForDeathAfterPost = false;
};

TEST(ControlModelNotices, PosterThatDoesNotLookForADeath) {
  const Verdict verdict = explore(
      {}, [](Scenario& s) { call_until_death<PosterNeverLooksForDeath>(s, Deadline::never(), 1); });
  EXPECT_EQ(verdict.failure, Failure::kDeadlock) << verdict.report;
}

struct FailsOnlyWhatIsDue : SoundMoves {
  template <typename Slot>
  static void fail(Slot& slot) {
    if (slot_refuse(slot) || slot_move(slot, SlotState::kRunning, SlotState::kPeerGone))
      futex_wake(slot.state, 1);
  }
};

TEST(ControlModelNotices, ReaperThatLeavesTheCallerOfAnUnheardReplyAsleep) {
  const Verdict verdict = explore(
      {}, [](Scenario& s) { call_until_death<FailsOnlyWhatIsDue>(s, Deadline::never(), 1); });
  EXPECT_EQ(verdict.failure, Failure::kDeadlock) << verdict.report;
}

struct PostsRelaxed : SoundMoves {
  template <typename Slot>
  static void post(Slot& slot) {
    slot.state.store(raw(posted_for(slot.lane)), std::memory_order_release);
  }
};

TEST(ControlModelNotices, PostThatPassesTheLookForADeath) {
  // The bell's read-modify-write would order it on x86, so the poster looks without having rung.
  const auto setup = [](Scenario& scenario) {
    auto world = make_world<PostsRelaxed>();
    scenario.thread("caller", [world] {
      world->fill(0, 1, Lane::kMain);
      PostsRelaxed::post(world->slots[0]);
      if (world->dead.load(std::memory_order_seq_cst) != 0) slot_fail(world->slots[0]);
      world->await(0, 1, Deadline::never());
    });
    scenario.thread("reaper", [world] { world->reap(); });
  };
  EXPECT_TRUE(explore({}, setup).good());
  const Verdict verdict = explore({.store_buffers = true}, setup);
  EXPECT_EQ(verdict.failure, Failure::kDeadlock) << verdict.report;
}

struct WithdrawsByStore : SoundMoves {
  template <typename Slot>
  static bool withdraw(Slot& slot) {
    if (!is_posted(slot.state.load(std::memory_order_seq_cst))) return false;
    slot.state.store(raw(SlotState::kIdle), std::memory_order_seq_cst);
    return true;
  }
};

TEST(ControlModelNotices, WithdrawalThatIsNotASwap) {
  const Verdict verdict = explore({.timeouts = 1}, call_twice<WithdrawsByStore>);
  EXPECT_EQ(verdict.failure, Failure::kCheck) << verdict.report;
}

struct ClaimsForAnyLane : SoundMoves {
  template <typename Slot>
  static bool claim(Slot& slot, Lane lane) {
    (void)lane;
    return slot_claim(slot, Lane::kMain) || slot_claim(slot, Lane::kService) ||
           slot_claim(slot, Lane::kTransfer);
  }
};

TEST(ControlModelNotices, ClaimThatDoesNotNameItsLane) {
  const Verdict verdict = explore({.timeouts = 1}, change_lanes<ClaimsForAnyLane>);
  EXPECT_EQ(verdict.failure, Failure::kCheck) << verdict.report;
}

struct FinishesByStore : SoundMoves {
  template <typename Slot>
  static bool finish(Slot& slot) {
    slot.state.store(raw(SlotState::kReplied), std::memory_order_seq_cst);
    if (slot.waiter.load(std::memory_order_seq_cst) != 0) futex_wake(slot.state, 1);
    return false;
  }
};

TEST(ControlModelNotices, FinishThatOverwritesAnAbandonment) {
  const Verdict verdict = explore({.timeouts = 1}, call_twice<FinishesByStore>);
  EXPECT_FALSE(verdict.good());
}

struct FinishesRelaxed : SoundMoves {
  template <typename Slot>
  static bool finish(Slot& slot) {
    std::uint32_t running = raw(SlotState::kRunning);
    if (!slot.state.compare_exchange_strong(running, raw(SlotState::kReplied),
                                            std::memory_order_relaxed)) {
      return slot_finish(slot);
    }
    if (slot.waiter.load(std::memory_order_seq_cst) != 0) futex_wake(slot.state, 1);
    return false;
  }
};

TEST(ControlModelNotices, ReplyThatIsNotPublished) {
  const Verdict verdict = explore({.timeouts = 1}, call_twice<FinishesRelaxed>);
  EXPECT_EQ(verdict.failure, Failure::kRace) << verdict.report;
}

struct AnnouncesTheWaiterLate : SoundMoves {
  template <typename Slot>
  static FutexResult sleep(Slot& slot, Deadline deadline) {
    const std::uint32_t state = slot.state.load(std::memory_order_seq_cst);
    if (!reply_is_due(state)) return FutexResult::kChanged;
    const FutexResult result = futex_wait(slot.state, state, deadline);
    slot.waiter.store(1, std::memory_order_seq_cst);
    return result;
  }
};

TEST(ControlModelNotices, WaiterThatAnnouncesItselfAfterSleeping) {
  const Verdict verdict = explore({}, [](Scenario& scenario) {
    auto world = make_world<AnnouncesTheWaiterLate>();
    scenario.thread("caller", [world] { world->call(0, 1, Deadline::never()); });
    scenario.daemon("child", [world] { world->serve_all(Lane::kMain); });
  });
  EXPECT_EQ(verdict.failure, Failure::kDeadlock) << verdict.report;
}

TEST(ControlModelNotices, ReportShowsTheScheduleByName) {
  const Verdict verdict = explore({.timeouts = 1}, call_twice<WithdrawsByStore>);
  EXPECT_NE(verdict.report.find("caller: times out"), std::string::npos) << verdict.report;
  EXPECT_NE(verdict.report.find("slot 0"), std::string::npos) << verdict.report;
}

}  // namespace
}  // namespace simpler::model
