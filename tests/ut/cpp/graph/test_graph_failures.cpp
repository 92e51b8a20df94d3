// TG-3, cancelling and lost workers: what ends how, and what still waits for what.
#include "graph/graph_driver.h"

namespace simpler::graph {
namespace {

Config three_chips() {
  Config config;
  config.chips = 3;
  return config;
}

TEST(GraphFailures, TG3_EverythingDownstreamIsPoisonedByAnyKindOfEdge) {
  GraphDriver graph(three_chips());
  const TaskId bad = graph.task(0, {reads(0, 10), writes(10, 20)});
  const TaskId overwrites_what_it_read = graph.task(1, {writes(0, 10)});
  const TaskId reads_what_it_wrote = graph.task(1, {reads(10, 20)});
  const TaskId explicit_only = graph.task(2, {}, {bad});
  const TaskId second_degree = graph.task(2, {}, {explicit_only});
  const TaskId beside = graph.task(2, {writes(30, 40)});
  graph.fail(bad);
  for (const TaskId task :
       {overwrites_what_it_read, reads_what_it_wrote, explicit_only, second_degree}) {
    EXPECT_EQ(graph.outcome_of(task), Outcome::kPoisoned);
  }
  EXPECT_EQ(graph.take_sent(), (Tasks{bad, beside}));
  graph.ok(beside);
  graph.graph.seal_run(graph.run);
  graph.take();
  const RunResult* result = graph.result_of(graph.run);
  ASSERT_NE(result, nullptr);
  EXPECT_EQ(result->cause, bad);
  EXPECT_EQ(result->failed, 1U);
  EXPECT_EQ(result->poisoned, 4U);
  EXPECT_EQ(result->tasks, 6U);
  graph.expect_empty();
}

TEST(GraphFailures, TG3_WhatIsSubmittedAfterTheFailureIsPoisonedJustTheSame) {
  GraphDriver graph(three_chips());
  const TaskId bad = graph.task(0, {reads(0, 10), writes(10, 20)});
  graph.fail(bad);
  EXPECT_EQ(graph.outcome_of(graph.task(1, {reads(15, 16)})), Outcome::kPoisoned);
  EXPECT_EQ(graph.outcome_of(graph.task(1, {writes(0, 5)})), Outcome::kPoisoned);
  EXPECT_EQ(graph.outcome_of(graph.task(1, {}, {bad})), Outcome::kPoisoned);
  EXPECT_EQ(graph.outcome_of(graph.task(1, {reads(5, 10)})), std::nullopt);
}

TEST(GraphFailures, TG3_AnotherRunIsOnlyOrdered) {
  GraphDriver graph(three_chips());
  const TaskId bad = graph.task(0, {writes(0, 10)});
  graph.run = graph.graph.open_run();
  const TaskId other = graph.task(1, {reads(0, 10)});
  EXPECT_EQ(graph.take_sent(), Tasks{bad});
  graph.fail(bad);
  EXPECT_EQ(graph.take_sent(), Tasks{other});
  const TaskId later = graph.task(1, {writes(0, 10)}, {bad});
  EXPECT_EQ(graph.take_sent(), Tasks{later});
}

TEST(GraphFailures, TG3_TheFirstCauseIsKept) {
  GraphDriver graph(three_chips());
  const TaskId first = graph.task(0);
  const TaskId second = graph.task(1);
  graph.graph.seal_run(graph.run);
  graph.fail(second);
  graph.fail(first);
  ASSERT_EQ(graph.results.size(), 1U);
  EXPECT_EQ(graph.results[0].cause, second);
  EXPECT_EQ(graph.results[0].failed, 2U);
}

TEST(GraphFailures, TG3_AFollowerAlreadyInTheRingIsSkippedByTheChip) {
  GraphDriver graph(three_chips());
  const TaskId bad = graph.task(0, {writes(0, 10)});
  const TaskId follower = graph.task(0, {writes(0, 10)});
  const TaskId behind = graph.task(1, {reads(0, 10)});
  graph.fail(bad);
  EXPECT_EQ(graph.outcome_of(follower), std::nullopt);
  EXPECT_EQ(graph.outcome_of(behind), std::nullopt);
  graph.skip(follower);
  EXPECT_EQ(graph.outcome_of(follower), Outcome::kPoisoned);
  EXPECT_EQ(graph.outcome_of(behind), Outcome::kPoisoned);
}

TEST(GraphFailures, ATaskThatNeverRanStillHoldsOffOtherRunsUntilWhatIsBeforeItHasEnded) {
  GraphDriver graph(three_chips());
  const TaskId running = graph.task(0, {writes(0, 10)});
  const RunId second = graph.run = graph.graph.open_run();
  const TaskId cancelled = graph.task(1, {writes(0, 10)});
  graph.graph.cancel_run(second);
  graph.graph.seal_run(second);
  graph.take();
  EXPECT_EQ(graph.outcome_of(cancelled), Outcome::kCancelled);
  EXPECT_NE(graph.result_of(second), nullptr);
  graph.run = graph.graph.open_run();
  const TaskId third = graph.task(2, {writes(0, 10)});
  EXPECT_EQ(graph.take_sent(), Tasks{running});
  graph.ok(running);
  EXPECT_EQ(graph.take_sent(), Tasks{third});
  graph.ok(third);
  graph.expect_empty();
}

TEST(GraphFailures, CancellingEndsWhatIsNotSentAndRecallsWhatIs) {
  Config config = three_chips();
  config.ring_depth = 2;
  GraphDriver graph(config);
  const TaskId running = graph.task(0);
  const TaskId sent = graph.task(0);
  const TaskId queued = graph.task(0);
  const TaskId waiting = graph.task(1, {}, {queued});
  graph.graph.cancel_run(graph.run);
  graph.graph.cancel_run(graph.run);
  graph.take();
  EXPECT_EQ(graph.outcome_of(queued), Outcome::kCancelled);
  EXPECT_EQ(graph.outcome_of(waiting), Outcome::kCancelled);
  ASSERT_EQ(graph.recalled.size(), 2U);
  EXPECT_EQ(graph.recalled[1].task, sent);
  EXPECT_EQ(graph.recalled[1].worker, 0U);
  EXPECT_EQ(graph.outcome_of(graph.task(2)), Outcome::kCancelled);
  graph.ok(running);
  graph.graph.seal_run(graph.run);
  graph.skip(sent);
  const RunResult* result = graph.result_of(graph.run);
  ASSERT_NE(result, nullptr);
  EXPECT_TRUE(result->was_cancelled);
  EXPECT_EQ(result->cancelled, 4U);
  EXPECT_EQ(result->tasks, 5U);
  EXPECT_EQ(result->cause, TaskId{});
  graph.expect_empty();
}

TEST(GraphFailures, ALostWorkerFailsWhatItOwedAndWhatIsBoundForIt) {
  Config config = three_chips();
  config.ring_depth = 1;
  GraphDriver graph(config);
  const TaskId owed = graph.task(0, {writes(0, 10)});
  const TaskId bound = graph.task(0);
  const TaskId downstream = graph.task(1, {reads(0, 10)});
  const TaskId elsewhere = graph.task(1);
  graph.graph.worker_lost(0);
  graph.graph.worker_lost(0);
  graph.take();
  EXPECT_EQ(graph.outcome_of(owed), Outcome::kLost);
  EXPECT_EQ(graph.outcome_of(bound), Outcome::kLost);
  EXPECT_EQ(graph.outcome_of(downstream), Outcome::kPoisoned);
  EXPECT_FALSE(graph.ok(owed));
  EXPECT_EQ(graph.outcome_of(graph.task(0)), Outcome::kLost);
  EXPECT_EQ(graph.outcome_of(graph.group({0, 2})), Outcome::kLost);
  graph.graph.worker_back(0);
  graph.take_sent();
  const TaskId again = graph.task(0);
  EXPECT_EQ(graph.take_sent(), Tasks{again});
  graph.ok(again);
  graph.ok(elsewhere);
  graph.graph.seal_run(graph.run);
  graph.take();
  EXPECT_EQ(graph.result_of(graph.run)->cause, owed);
  EXPECT_EQ(graph.result_of(graph.run)->failed, 4U);
  graph.expect_empty();
}

TEST(GraphFailures, TheCauseOfALossIsTheEarliestSubmissionWhateverItsSlot) {
  GraphDriver graph(three_chips());
  const Tasks gone = {graph.task(1), graph.task(1)};
  for (const TaskId task : gone) graph.ok(task);
  const TaskId earlier = graph.task(0);
  const TaskId later = graph.task(0);
  ASSERT_GT(earlier.slot, later.slot);
  graph.graph.seal_run(graph.run);
  graph.graph.worker_lost(0);
  graph.take();
  ASSERT_EQ(graph.results.size(), 1U);
  EXPECT_EQ(graph.results[0].cause, earlier);
}

TEST(GraphFailures, AGroupWithALostMemberEndsWhenTheOthersHave) {
  GraphDriver graph(three_chips());
  const TaskId group = graph.group({0, 1});
  graph.graph.worker_lost(1);
  graph.take();
  EXPECT_EQ(graph.outcome_of(group), std::nullopt);
  graph.ok(group, 0);
  EXPECT_EQ(graph.outcome_of(group), Outcome::kLost);
}

TEST(GraphFailures, TG3_TheConsumersOfAGroupNeedNotWaitForItsOtherMembersToBePoisoned) {
  Config config = three_chips();
  config.send_ahead = true;
  config.ring_depth = 1;
  GraphDriver graph(config);
  const TaskId group = graph.group({0, 1}, {writes(0, 10)});
  const TaskId queued = graph.task(0, {reads(0, 10)});
  graph.fail(group, 1);
  EXPECT_EQ(graph.outcome_of(group), std::nullopt);
  EXPECT_EQ(graph.outcome_of(queued), Outcome::kPoisoned);
  EXPECT_EQ(graph.outcome_of(graph.task(2, {reads(0, 10)})), Outcome::kPoisoned);
  graph.ok(group, 0);
  EXPECT_EQ(graph.outcome_of(group), Outcome::kFailed);
}

TEST(GraphFailures, SubTasksFailOnlyWhenTooFewSubWorkersAreLeft) {
  Config config = three_chips();
  config.sub_workers = 2;
  config.sub_depth = 1;
  GraphDriver graph(config);
  const TaskId first = graph.sub();
  const TaskId second = graph.sub();
  const TaskId queued = graph.sub();
  const TaskId pair = graph.sub(2);
  graph.graph.worker_lost(3);
  graph.take();
  EXPECT_EQ(graph.outcome_of(first), Outcome::kLost);
  EXPECT_EQ(graph.outcome_of(pair), Outcome::kLost);
  EXPECT_EQ(graph.outcome_of(queued), std::nullopt);
  graph.ok(second);
  EXPECT_EQ(graph.take_sent().back(), queued);
  graph.graph.worker_lost(4);
  graph.take();
  EXPECT_EQ(graph.outcome_of(queued), Outcome::kLost);
  EXPECT_EQ(graph.outcome_of(graph.sub()), Outcome::kLost);
  graph.graph.worker_back(4);
  const TaskId back = graph.sub();
  EXPECT_EQ(graph.take_sent(), Tasks{back});
}

TEST(GraphFailures, ATaskLostBehindALiveProducerIsPassedOnlyWhenThatHasEnded) {
  Config config = three_chips();
  config.send_ahead = true;
  GraphDriver graph(config);
  const TaskId producer = graph.task(0, {writes(0, 10)});
  const TaskId lost = graph.task(1, {writes(0, 10)});
  graph.run = graph.graph.open_run();
  const TaskId sent_ahead = graph.task(2, {writes(0, 10)});
  EXPECT_EQ(graph.take_sent(), (Tasks{producer, lost, sent_ahead}));
  graph.graph.worker_lost(1);
  graph.take();
  EXPECT_EQ(graph.outcome_of(lost), Outcome::kLost);
  EXPECT_EQ(graph.passed, Tasks{});
  graph.ok(producer);
  EXPECT_EQ(graph.passed, Tasks{lost});
}

TEST(GraphFailures, AFollowerQueuedBehindALostTaskWaitsForWhatThatWaitedFor) {
  Config config = three_chips();
  config.send_ahead = true;
  config.ring_depth = 1;
  GraphDriver graph(config);
  const TaskId producer = graph.task(0, {writes(0, 10)});
  const TaskId lost = graph.task(1, {writes(0, 10)});
  graph.run = graph.graph.open_run();
  const TaskId busy = graph.task(2);
  const TaskId follower = graph.task(2, {writes(0, 10)});
  EXPECT_EQ(graph.take_sent(), (Tasks{producer, lost, busy}));
  graph.graph.worker_lost(1);
  graph.ok(busy);
  EXPECT_EQ(graph.take_sent(), Tasks{});
  graph.ok(producer);
  EXPECT_EQ(graph.take_sent(), Tasks{follower});
  graph.ok(follower);
  EXPECT_EQ(graph.graph.unfinished_tasks(), 0U);
}

TEST(GraphFailures, ManyCancelledRunsBehindAStuckChipLeaveNothing) {
  Config config = three_chips();
  config.ring_depth = 1;
  GraphDriver graph(config);
  graph.task(0);
  for (int i = 0; i < 1000; ++i) {
    graph.run = graph.graph.open_run();
    graph.task(0);
    graph.graph.cancel_run(graph.run);
    graph.graph.seal_run(graph.run);
  }
  graph.end_all();
  EXPECT_EQ(graph.graph.unfinished_tasks(), 0U);
  EXPECT_EQ(graph.graph.task_records(), 0U);
  EXPECT_EQ(graph.results.size(), 1000U);
}

}  // namespace
}  // namespace simpler::graph
