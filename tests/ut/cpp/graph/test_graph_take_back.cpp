// Tasks that sub workers have not begun, given to others; and who is to blame for a poisoned one.
#include <gtest/gtest.h>

#include "graph_driver.h"

namespace simpler::graph {
namespace {

Config two_subs(std::uint32_t depth) {
  Config config;
  config.chips = 1;
  config.sub_workers = 2;
  config.sub_depth = depth;
  return config;
}

TEST(GraphTakeBack, ATaskThatWasNotBegunGoesToAnIdleSubWorker) {
  GraphDriver graph(two_subs(4));
  std::vector<TaskId> tasks;
  for (int i = 0; i < 4; ++i) tasks.push_back(graph.sub());
  EXPECT_EQ(graph.graph.sub_backlog(), 2U);
  EXPECT_EQ(graph.sent[2].worker, 1U);
  graph.ok(tasks[1]);
  graph.ok(tasks[3]);
  EXPECT_EQ(graph.graph.outstanding(2), 0U);
  graph.sent.clear();
  EXPECT_TRUE(graph.graph.take_back(tasks[2]));
  graph.take();
  ASSERT_EQ(graph.sent.size(), 1U);
  EXPECT_EQ(graph.sent[0].task, tasks[2]);
  EXPECT_EQ(graph.sent[0].worker, 2U);
  EXPECT_EQ(graph.graph.outstanding(1), 2U) << "its entry there is still to be passed over";
  graph.graph.passed_over(1);
  EXPECT_EQ(graph.graph.outstanding(1), 1U);
  EXPECT_EQ(graph.graph.sub_backlog(), 0U);
  graph.ok(tasks[2]);
  graph.ok(tasks[0]);
  graph.expect_empty();
}

TEST(GraphTakeBack, OnlyASingleTaskOfASubWorkerThatIsUnderWayIsTakenBack) {
  GraphDriver graph(two_subs(4));
  const TaskId on_chip = graph.task(0);
  const TaskId group = graph.sub(2);
  const TaskId ended = graph.sub();
  graph.ok(ended);
  for (const TaskId task : {on_chip, group, ended, TaskId{}})
    EXPECT_FALSE(graph.graph.take_back(task));
}

TEST(GraphTakeBack, TheBacklogOfALostSubWorkerIsGone) {
  GraphDriver graph(two_subs(4));
  for (int i = 0; i < 6; ++i) graph.sub();
  EXPECT_EQ(graph.graph.sub_backlog(), 4U);
  graph.graph.worker_lost(1);
  graph.take();
  EXPECT_EQ(graph.graph.sub_backlog(), 2U);
  graph.graph.passed_over(1);
  EXPECT_EQ(graph.graph.outstanding(1), 0U);
}

TaskId cause_of(const ActionLog& log, TaskId task) {
  for (const Action& action : log.actions()) {
    if (action.kind == ActionKind::kTaskEnded && action.task() == task) return action.cause();
  }
  ADD_FAILURE() << "it has not ended";
  return {};
}

TEST(GraphCauses, TG3_APoisonedTaskNamesWhoFailedAboveIt) {
  GraphDriver graph(two_chips());
  const TaskId first = graph.task(0, {writes(0, 8)});
  const TaskId other = graph.task(1, {writes(64, 72)});
  const TaskId below = graph.task(1, {reads(0, 8), writes(8, 16)});
  const TaskId deeper = graph.task(0, {reads(8, 16)});
  const TaskId below_other = graph.task(0, {reads(64, 72)});
  graph.graph.finished(first, 0, Report::kFailed);
  EXPECT_EQ(cause_of(graph.graph.log(), below), first);
  EXPECT_EQ(cause_of(graph.graph.log(), deeper), first);
  graph.take();
  graph.graph.finished(other, 0, Report::kFailed);
  EXPECT_EQ(cause_of(graph.graph.log(), below_other), other);
  graph.take();
  const TaskId late = [&] {
    const std::uint32_t chip = 0;
    const std::vector<Access> bytes = {reads(8, 16)};
    Spec spec;
    spec.targets = {&chip, 1};
    spec.accesses = bytes;
    return graph.graph.submit(graph.run, {}, spec).task;
  }();
  EXPECT_EQ(cause_of(graph.graph.log(), late), first) << "also when submitted after the failure";
}

TEST(GraphCauses, TG3_AGroupIsTheCauseWhenAMemberFailed) {
  GraphDriver graph(two_chips());
  const TaskId group = graph.group({0, 1}, {writes(0, 8)});
  const TaskId below = graph.task(1, {reads(0, 8)});
  graph.graph.finished(group, 0, Report::kFailed);
  graph.graph.finished(group, 1, Report::kOk);
  graph.graph.finished(below, 0, Report::kSkipped);
  EXPECT_EQ(cause_of(graph.graph.log(), below), group);
}

TEST(GraphCauses, ACancellationIsNobodysFailure) {
  GraphDriver graph(two_chips());
  const TaskId held = graph.task(0, {writes(0, 8)});
  const TaskId waiting = graph.task(1, {reads(0, 8)});
  graph.graph.cancel_run(graph.run);
  EXPECT_EQ(graph.outcome_of(waiting), std::nullopt);
  EXPECT_EQ(cause_of(graph.graph.log(), waiting).generation, 0U) << "names nothing";
  graph.take();
  graph.skip(held);
}

}  // namespace
}  // namespace simpler::graph
