// TG-5: a group is one node on several workers; nothing deadlocks and nothing starves.
#include <set>

#include "graph/graph_driver.h"

namespace simpler::graph {
namespace {

Config narrow(std::uint32_t chips) {
  Config config;
  config.chips = chips;
  config.ring_depth = 1;
  return config;
}

TEST(GraphGroups, TG5_AGroupIsSentToAllItsChipsInOneStepOrToNone) {
  GraphDriver graph(narrow(2));
  const TaskId busy = graph.task(1);
  const TaskId group = graph.group({0, 1});
  EXPECT_EQ(graph.take_sent(), Tasks{busy});
  graph.ok(busy);
  EXPECT_EQ(graph.take_sent(), (Tasks{group, group}));
}

TEST(GraphGroups, TG5_AGroupEndsWhenAllMembersHaveEnded) {
  GraphDriver graph(narrow(2));
  const TaskId group = graph.group({0, 1}, {writes(0, 10)});
  const TaskId after = graph.task(0, {reads(0, 10)});
  graph.ok(group, 0);
  EXPECT_FALSE(graph.ok(group, 0));
  EXPECT_EQ(graph.outcome_of(group), std::nullopt);
  EXPECT_EQ(graph.take_sent(), (Tasks{group, group}));
  graph.ok(group, 1);
  EXPECT_EQ(graph.outcome_of(group), Outcome::kOk);
  EXPECT_EQ(graph.take_sent(), Tasks{after});
}

TEST(GraphGroups, TG5_AGroupWaitsForTheEndOfAProducerOnOneOfItsChips) {
  Config config = narrow(2);
  config.ring_depth = 8;
  GraphDriver graph(config);
  const TaskId producer = graph.task(0, {writes(0, 10)});
  const TaskId group = graph.group({0, 1}, {reads(0, 10)});
  EXPECT_EQ(graph.take_sent(), Tasks{producer});
  graph.ok(producer);
  EXPECT_EQ(graph.take_sent(), (Tasks{group, group}));
}

TEST(GraphGroups, TG5_WithSendAheadEveryMemberNamesEveryMemberOfItsProducer) {
  Config config = narrow(2);
  config.ring_depth = 8;
  config.send_ahead = true;
  GraphDriver graph(config);
  const TaskId first = graph.group({0, 1}, {writes(0, 10)});
  const TaskId second = graph.group({1, 0}, {writes(0, 10)});
  ASSERT_EQ(graph.sent.size(), 4U);
  EXPECT_EQ(graph.entry_of(second, 0)->producers.size(), 2U);
  EXPECT_EQ(graph.entry_of(second, 1)->producers.size(), 2U);
  for (const TaskId group : {first, second}) {
    graph.ok(group, 0);
    graph.ok(group, 1);
  }
  EXPECT_EQ(graph.outcome_of(second), Outcome::kOk);
}

TEST(GraphGroups, TG5_TheOutcomeOfAGroupIsItsFirstFailure) {
  GraphDriver graph(narrow(3));
  const TaskId group = graph.group({0, 1, 2});
  graph.skip(group, 0);
  graph.fail(group, 2);
  graph.ok(group, 1);
  EXPECT_EQ(graph.outcome_of(group), Outcome::kFailed);
}

TEST(GraphGroups, TG5_GroupsOverTheSameChipsInAnyOrderNeverDeadlock) {
  GraphDriver graph(narrow(3));
  for (int i = 0; i < 20; ++i) {
    graph.group({0, 1, 2});
    graph.group({2, 0});
    graph.group({1, 2});
    graph.task(i % 3);
  }
  graph.graph.seal_run(graph.run);
  graph.end_all();
  EXPECT_NE(graph.result_of(graph.run), nullptr);
  graph.expect_empty();
}

TEST(GraphGroups, TG5_SinglesSubmittedLaterDoNotOvertakeAGroup) {
  GraphDriver graph(narrow(2));
  const TaskId busy = graph.task(1);
  const TaskId group = graph.group({0, 1});
  const TaskId later = graph.task(0);
  EXPECT_EQ(graph.take_sent(), Tasks{busy});
  graph.ok(busy);
  EXPECT_EQ(graph.take_sent(), (Tasks{group, group}));
  graph.ok(group, 0);
  EXPECT_EQ(graph.take_sent(), Tasks{later});
}

TEST(GraphGroups, TG5_AnEndlessStreamOfSinglesDoesNotStarveAGroup) {
  GraphDriver graph(narrow(2));
  std::vector<TaskId> busy = {graph.task(0), graph.task(1)};
  const TaskId group = graph.group({0, 1});
  graph.take_sent();
  int rounds = 0;
  for (; graph.entry_of(group) == nullptr && rounds < 10; ++rounds) {
    graph.task(0);
    graph.task(1);
    graph.ok(busy[rounds % 2]);
  }
  EXPECT_LE(rounds, 2);
}

TEST(GraphGroups, TG5_AnEndlessStreamOfGroupsDoesNotStarveASingle) {
  GraphDriver graph(narrow(2));
  TaskId running = graph.group({0, 1});
  graph.group({0, 1});
  const TaskId single = graph.task(1);
  int rounds = 0;
  for (; graph.entry_of(single) == nullptr && rounds < 10; ++rounds) {
    graph.group({0, 1});
    graph.take_sent();
    graph.ok(running, 0);
    graph.ok(running, 1);
    if (!graph.sent.empty()) running = graph.sent.front().task;
  }
  EXPECT_LE(rounds, 3);
}

TEST(GraphGroups, TG5_SinglesSubmittedBeforeAGroupGoFirst) {
  GraphDriver graph(narrow(2));
  const Tasks before = {graph.task(0), graph.task(0), graph.task(1)};
  const TaskId group = graph.group({0, 1});
  graph.take_sent();
  graph.ok(before[2]);
  EXPECT_EQ(graph.take_sent(), Tasks{});
  graph.ok(before[0]);
  EXPECT_EQ(graph.take_sent(), Tasks{before[1]});
  graph.ok(before[1]);
  EXPECT_EQ(graph.take_sent(), (Tasks{group, group}));
}

TEST(GraphGroups, TG5_WhatWaitedBehindAGroupGoesWithItWhereThereIsRoom) {
  Config config = narrow(2);
  config.ring_depth = 2;
  GraphDriver graph(config);
  const Tasks busy = {graph.task(1), graph.task(1)};
  const TaskId group = graph.group({0, 1});
  const Tasks behind = {graph.task(0), graph.task(0)};
  graph.take_sent();
  graph.ok(busy[0]);
  EXPECT_EQ(graph.take_sent(), (Tasks{group, group, behind[0]}));
}

TEST(GraphGroups, TG5_AGroupThatWasCancelledLetsTheOthersPass) {
  GraphDriver graph(narrow(2));
  const TaskId busy = graph.task(1);
  const RunId first = graph.run;
  const RunId other = graph.run = graph.graph.open_run();
  const TaskId group = graph.group({0, 1});
  graph.run = first;
  const TaskId later = graph.task(0);
  EXPECT_EQ(graph.take_sent(), Tasks{busy});
  graph.graph.cancel_run(other);
  graph.take();
  EXPECT_EQ(graph.outcome_of(group), Outcome::kCancelled);
  EXPECT_EQ(graph.take_sent(), Tasks{later});
}

TEST(GraphGroups, TG5_ASubGroupTakesAsManyDifferentSubWorkersOrWaits) {
  Config config = narrow(1);
  config.sub_workers = 3;
  config.sub_depth = 1;
  GraphDriver graph(config);
  const TaskId single = graph.sub();
  const TaskId group = graph.sub(3);
  const TaskId later = graph.sub();
  EXPECT_EQ(graph.take_sent(), Tasks{single});
  graph.ok(single);
  std::set<std::uint32_t> workers;
  for (const Sent& entry : graph.sent) workers.insert(entry.worker);
  EXPECT_EQ(workers, (std::set<std::uint32_t>{1, 2, 3}));
  EXPECT_EQ(graph.take_sent(), (Tasks{group, group, group}));
  graph.ok(group, 1);
  EXPECT_EQ(graph.take_sent(), Tasks{later});
}

}  // namespace
}  // namespace simpler::graph
