// TG-1 and TG-2: what comes after what, and what may be sent before that has ended.
#include "graph/graph_driver.h"
#include "hierarchical/base/error.h"

namespace simpler::graph {
namespace {

Config three_chips() {
  Config config;
  config.chips = 3;
  config.regions = 2;
  return config;
}

TEST(GraphOrder, TG1_AReadWaitsForTheLastWriterOfAnyOfItsBytes) {
  GraphDriver graph(two_chips());
  const TaskId writer = graph.task(0, {writes(0, 100)});
  const TaskId reader = graph.task(1, {reads(99, 200)});
  const TaskId beside = graph.task(1, {reads(100, 200)});
  EXPECT_EQ(graph.take_sent(), (Tasks{writer, beside}));
  graph.ok(writer);
  EXPECT_EQ(graph.take_sent(), Tasks{reader});
}

TEST(GraphOrder, TG1_AWriteWaitsForAllReadersSinceTheLastWriter) {
  GraphDriver graph(three_chips());
  const TaskId first = graph.task(0, {reads(0, 50)});
  const TaskId second = graph.task(1, {reads(50, 100)});
  const TaskId writer = graph.task(2, {writes(40, 60)});
  EXPECT_EQ(graph.take_sent(), (Tasks{first, second}));
  graph.ok(first);
  EXPECT_EQ(graph.take_sent(), Tasks{});
  graph.ok(second);
  EXPECT_EQ(graph.take_sent(), Tasks{writer});
}

TEST(GraphOrder, TG1_AWriteWaitsForTheWriteBeforeIt) {
  GraphDriver graph(two_chips());
  const TaskId first = graph.task(0, {writes(0, 10)});
  const TaskId second = graph.task(1, {writes(5, 15)});
  EXPECT_EQ(graph.take_sent(), Tasks{first});
  graph.ok(first);
  EXPECT_EQ(graph.take_sent(), Tasks{second});
}

TEST(GraphOrder, TG1_ReadersOfTheSameBytesRunSideBySide) {
  GraphDriver graph(three_chips());
  const TaskId writer = graph.task(0, {writes(0, 10)});
  graph.ok(writer);
  graph.take_sent();
  const TaskId first = graph.task(1, {reads(0, 10)});
  const TaskId second = graph.task(2, {reads(0, 10)});
  EXPECT_EQ(graph.take_sent(), (Tasks{first, second}));
}

TEST(GraphOrder, TG1_AReadFollowsOnlyTheWriterOfItsPartOfAnOverwrittenRange) {
  GraphDriver graph(three_chips());
  const TaskId whole = graph.task(0, {writes(0, 100)});
  const TaskId part = graph.task(1, {writes(40, 60)});
  const TaskId left = graph.task(2, {reads(0, 40)});
  const TaskId middle = graph.task(2, {reads(40, 60)});
  graph.ok(whole);
  EXPECT_EQ(graph.take_sent(), (Tasks{whole, part, left}));
  graph.ok(part);
  EXPECT_EQ(graph.take_sent(), Tasks{middle});
}

TEST(GraphOrder, TG1_ANewTaskNamesOnceWhateverItDirectlyFollows) {
  GraphDriver graph(two_chips());
  const TaskId first = graph.task(0, {writes(0, 10)});
  const TaskId second = graph.task(0, {writes(20, 30)});
  const TaskId between = graph.task(0, {reads(0, 5), reads(25, 30)});
  const TaskId last = graph.task(0, {reads(0, 10), writes(20, 30)}, {first, between});
  const auto followed_by = [&](TaskId task) {
    Tasks found;
    graph.graph.each_producer(task, [&](TaskId producer) { found.push_back(producer); });
    std::ranges::sort(found, {}, &TaskId::slot);
    return found;
  };
  EXPECT_EQ(followed_by(first), Tasks{});
  EXPECT_EQ(followed_by(between), (Tasks{first, second})) << "though it was sent at once";
  EXPECT_EQ(followed_by(last), (Tasks{first, second, between}));
  graph.ok(first);
  graph.ok(second);
  EXPECT_EQ(followed_by(last), Tasks{between}) << "what has ended is not waited for";
}

TEST(GraphOrder, TG1_TheSameAddressesInAnotherRegionOrderNothing) {
  GraphDriver graph(two_chips());
  const TaskId here = graph.task(0, {writes(0, 10, 0)});
  const TaskId there = graph.task(1, {writes(0, 10, 1)});
  EXPECT_EQ(graph.take_sent(), (Tasks{here, there}));
}

TEST(GraphOrder, TG1_AnEmptyRangeTouchesNothing) {
  GraphDriver graph(two_chips());
  const TaskId writer = graph.task(0, {writes(0, 10)});
  const TaskId nothing = graph.task(1, {writes(5, 5)});
  EXPECT_EQ(graph.take_sent(), (Tasks{writer, nothing}));
  EXPECT_EQ(graph.graph.intervals(), 1U);
}

TEST(GraphOrder, TG1_ATaskThatReadsAndWritesItsOwnBytesDoesNotWaitForItself) {
  GraphDriver graph(two_chips());
  const TaskId both = graph.task(0, {reads(0, 10), writes(5, 15), reads(12, 20)});
  EXPECT_EQ(graph.take_sent(), Tasks{both});
  const TaskId next = graph.task(1, {writes(18, 19)});
  EXPECT_EQ(graph.take_sent(), Tasks{});
  graph.ok(both);
  EXPECT_EQ(graph.take_sent(), Tasks{next});
}

TEST(GraphOrder, TG1_AnExplicitEdgeNeedsNoBytes) {
  GraphDriver graph(two_chips());
  const TaskId first = graph.task(0);
  const TaskId second = graph.task(1, {}, {first, first});
  EXPECT_EQ(graph.take_sent(), Tasks{first});
  graph.ok(first);
  EXPECT_EQ(graph.take_sent(), Tasks{second});
}

TEST(GraphOrder, TG1_AnEdgeToATaskThatHasEndedIsSatisfied) {
  GraphDriver graph(two_chips());
  const TaskId first = graph.task(0);
  graph.ok(first);
  const TaskId reused = graph.task(0);
  EXPECT_EQ(reused.slot, first.slot);
  graph.take_sent();
  const TaskId second = graph.task(1, {}, {first, TaskId{}});
  EXPECT_EQ(graph.take_sent(), Tasks{second});
}

TEST(GraphOrder, TG2_AChainOnOneChipIsSentAtOnceAndNamesItsProducers) {
  GraphDriver graph(two_chips());
  const TaskId first = graph.task(0, {writes(0, 10)});
  const TaskId second = graph.task(0, {writes(0, 10)});
  const TaskId third = graph.task(0, {reads(0, 10)}, {first});
  ASSERT_EQ(graph.sent.size(), 3U);
  EXPECT_TRUE(graph.entry_of(first)->producers.empty());
  ASSERT_EQ(graph.entry_of(second)->producers.size(), 1U);
  const Producer producer = graph.entry_of(second)->producers[0];
  EXPECT_EQ(producer.task, first);
  EXPECT_EQ(producer.worker, 0U);
  EXPECT_TRUE(producer.must_succeed);
  EXPECT_EQ(graph.entry_of(third)->producers.size(), 2U);
}

TEST(GraphOrder, TG2_TheRingAloneOrdersTasksOfDifferentRuns) {
  GraphDriver graph(two_chips());
  graph.task(0, {writes(0, 10)});
  graph.run = graph.graph.open_run();
  const TaskId other = graph.task(0, {writes(0, 10)});
  ASSERT_NE(graph.entry_of(other), nullptr);
  EXPECT_TRUE(graph.entry_of(other)->producers.empty());
}

TEST(GraphOrder, TG2_ATaskBehindAFullRingHoldsBackWhatFollowsIt) {
  Config config = two_chips();
  config.ring_depth = 2;
  GraphDriver graph(config);
  Tasks chain;
  for (int i = 0; i < 4; ++i) chain.push_back(graph.task(0, {writes(0, 10)}));
  EXPECT_EQ(graph.take_sent(), (Tasks{chain[0], chain[1]}));
  graph.ok(chain[0]);
  EXPECT_EQ(graph.take_sent(), Tasks{chain[2]});
  graph.ok(chain[1]);
  EXPECT_EQ(graph.take_sent(), Tasks{chain[3]});
}

TEST(GraphOrder, TG2_WithSendAheadAnEntryMayWaitForAnotherChip) {
  Config config = two_chips();
  config.send_ahead = true;
  GraphDriver graph(config);
  const TaskId first = graph.task(0, {writes(0, 10)});
  const TaskId second = graph.task(1, {writes(0, 10)});
  graph.run = graph.graph.open_run();
  const TaskId other_run = graph.task(0, {reads(0, 10)});
  ASSERT_NE(graph.entry_of(second), nullptr);
  ASSERT_EQ(graph.entry_of(second)->producers.size(), 1U);
  EXPECT_EQ(graph.entry_of(second)->producers[0].worker, 0U);
  ASSERT_NE(graph.entry_of(other_run), nullptr);
  ASSERT_EQ(graph.entry_of(other_run)->producers.size(), 1U);
  EXPECT_EQ(graph.entry_of(other_run)->producers[0].task, second);
  EXPECT_FALSE(graph.entry_of(other_run)->producers[0].must_succeed);
  graph.ok(first);
  graph.ok(second);
  graph.ok(other_run);
}

TEST(GraphOrder, TG2_SendAheadNeverOvertakesAProducerThatIsNotSent) {
  Config config = two_chips();
  config.send_ahead = true;
  config.ring_depth = 1;
  GraphDriver graph(config);
  const TaskId busy = graph.task(0);
  const TaskId queued = graph.task(0, {writes(0, 10)});
  const TaskId after = graph.task(1, {reads(0, 10)});
  EXPECT_EQ(graph.take_sent(), Tasks{busy});
  graph.ok(busy);
  EXPECT_EQ(graph.take_sent(), (Tasks{queued, after}));
}

TEST(GraphOrder, TG2_PrioritiesReorderOnlyWhatIsNotSentAndNeverAnEdge) {
  Config config = two_chips();
  config.ring_depth = 1;
  GraphDriver graph(config);
  const TaskId sent = graph.task(0);
  const TaskId low = graph.task(0, {writes(0, 10)});
  graph.priority = 5;
  const TaskId high = graph.task(0);
  const TaskId highest_but_after_low = graph.task(0, {reads(0, 10)});
  graph.take_sent();
  for (const TaskId task : {sent, high, low, highest_but_after_low}) graph.ok(task);
  EXPECT_EQ(graph.take_sent(), (Tasks{high, low, highest_but_after_low}));
}

TEST(GraphOrder, ASubWorkerTaskWaitsForTheEndOfItsProducers) {
  Config config = two_chips();
  config.sub_workers = 2;
  config.send_ahead = true;
  GraphDriver graph(config);
  const TaskId chip = graph.task(0, {writes(0, 10)});
  const TaskId first = graph.sub(1, {reads(0, 10), writes(10, 20)});
  const TaskId second = graph.sub(1, {reads(10, 20)});
  EXPECT_EQ(graph.take_sent(), Tasks{chip});
  graph.ok(chip);
  EXPECT_EQ(graph.take_sent(), Tasks{first});
  graph.ok(first);
  EXPECT_EQ(graph.take_sent(), Tasks{second});
}

TEST(GraphOrder, SubWorkersAreFilledLeastLoadedFirst) {
  Config config;
  config.chips = 1;
  config.sub_workers = 3;
  config.sub_depth = 2;
  GraphDriver graph(config);
  for (int i = 0; i < 7; ++i) graph.sub();
  std::vector<std::uint32_t> workers;
  for (const Sent& entry : graph.sent) workers.push_back(entry.worker);
  EXPECT_EQ(workers, (std::vector<std::uint32_t>{1, 2, 3, 1, 2, 3}));
  graph.ok(graph.sent[4].task);
  EXPECT_EQ(graph.sent.back().worker, 2U);
}

TEST(GraphOrder, WorkOfTheHostIsOrderedLikeATask) {
  GraphDriver graph(two_chips());
  const TaskId before = graph.task(0, {writes(0, 10)});
  const std::vector<Access> bytes = {reads(0, 10)};
  Spec copy;
  copy.kind = Kind::kHost;
  copy.accesses = bytes;
  const TaskId host = graph.submit(copy);
  const TaskId after = graph.task(1, {writes(0, 10)});
  EXPECT_EQ(graph.take_sent(), Tasks{before});
  graph.ok(before);
  ASSERT_NE(graph.entry_of(host), nullptr);
  EXPECT_EQ(graph.entry_of(host)->worker, kNone);
  EXPECT_EQ(graph.take_sent(), Tasks{host});
  graph.ok(host);
  EXPECT_EQ(graph.take_sent(), Tasks{after});
}

TEST(GraphOrder, TG4_AFullTableRefusesUntilATaskHasEnded) {
  Config config = two_chips();
  config.capacity = 2;
  GraphDriver graph(config);
  const TaskId first = graph.task(0);
  graph.task(0);
  const std::vector<std::uint32_t> chip = {0};
  Spec spec;
  spec.targets = chip;
  EXPECT_TRUE(graph.graph.submit(graph.run, {}, spec).is_full);
  graph.ok(first);
  EXPECT_FALSE(graph.graph.submit(graph.run, {}, spec).is_full);
}

TEST(GraphOrder, AMistakeOfTheCallerIsRefusedAndChangesNothing) {
  GraphDriver graph(two_chips());
  EXPECT_THROW(graph.task(2), Error);
  EXPECT_THROW(graph.group({}), Error);
  EXPECT_THROW(graph.group({1, 1}), Error);
  EXPECT_THROW(graph.sub(), Error);
  EXPECT_THROW(graph.task(0, {reads(0, 1, 2)}), Error);
  EXPECT_THROW(graph.task(0, {reads(2, 1)}), Error);
  graph.scope = {7, 1};
  EXPECT_THROW(graph.task(0), Error);
  graph.scope = {};
  graph.run = {3, 1};
  EXPECT_THROW(graph.task(0), Error);
  graph.expect_empty();
}

}  // namespace
}  // namespace simpler::graph
