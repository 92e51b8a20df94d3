// TG-6, scopes, buffers and memory: what is told when, and what is left.
#include "graph/graph_driver.h"
#include "hierarchical/base/error.h"

namespace simpler::graph {
namespace {

TEST(GraphRuns, ARunIsDoneOnceSealedAndEmptyAndTellsOnce) {
  GraphDriver graph(two_chips());
  const TaskId task = graph.task(0);
  graph.ok(task);
  EXPECT_EQ(graph.result_of(graph.run), nullptr);
  graph.graph.seal_run(graph.run);
  graph.take();
  ASSERT_EQ(graph.results.size(), 1U);
  EXPECT_EQ(graph.results[0].tasks, 1U);
  EXPECT_EQ(graph.results[0].cause, TaskId{});
  EXPECT_THROW(graph.graph.seal_run(graph.run), Error);
  graph.expect_empty();
}

TEST(GraphRuns, ASealedRunTakesNoMoreTasks) {
  GraphDriver graph(two_chips());
  const TaskId task = graph.task(0);
  graph.graph.seal_run(graph.run);
  EXPECT_THROW(graph.task(0), Error);
  graph.ok(task);
  EXPECT_EQ(graph.results.size(), 1U);
}

TEST(GraphRuns, TG6_RunsOverlapAndEachIsDoneOnItsOwn) {
  GraphDriver graph(two_chips());
  const RunId first = graph.run;
  const TaskId slow = graph.task(0);
  graph.run = graph.graph.open_run();
  const TaskId quick = graph.task(1);
  graph.graph.seal_run(first);
  graph.graph.seal_run(graph.run);
  graph.ok(quick);
  EXPECT_NE(graph.result_of(graph.run), nullptr);
  EXPECT_EQ(graph.result_of(first), nullptr);
  graph.ok(slow);
  EXPECT_NE(graph.result_of(first), nullptr);
}

TEST(GraphRuns, ThePriorityOfTheRunIsThatOfItsTasks) {
  Config config = two_chips();
  config.ring_depth = 1;
  GraphDriver graph(config);
  const TaskId sent = graph.task(0);
  const TaskId usual = graph.task(0);
  graph.run = graph.graph.open_run(3);
  const TaskId urgent = graph.task(0);
  graph.take_sent();
  graph.ok(sent);
  graph.ok(urgent);
  EXPECT_EQ(graph.take_sent(), (Tasks{urgent, usual}));
}

TEST(GraphRuns, AScopeIsEmptyWhenItIsClosedAndItsTasksHaveEnded) {
  GraphDriver graph(two_chips());
  const ScopeId outer = graph.scope = graph.graph.open_scope(graph.run);
  const TaskId slow = graph.task(0);
  const ScopeId inner = graph.scope = graph.graph.open_scope(graph.run);
  const TaskId quick = graph.task(1);
  graph.graph.close_scope(inner);
  graph.ok(quick);
  EXPECT_EQ(graph.empty_scopes, std::vector<ScopeId>{inner});
  graph.ok(slow);
  EXPECT_EQ(graph.empty_scopes.size(), 1U);
  graph.graph.close_scope(outer);
  graph.take();
  EXPECT_EQ(graph.empty_scopes, (std::vector<ScopeId>{inner, outer}));
  EXPECT_THROW(graph.graph.close_scope(outer), Error);
}

TEST(GraphRuns, ABufferIsIdleWhenReleasedAndTheLastTaskNamingItHasEnded) {
  GraphDriver graph(two_chips());
  const std::vector<std::uint32_t> chip = {0};
  const std::vector<BufferId> buffers = {graph.graph.open_buffer(), graph.graph.open_buffer()};
  Spec spec;
  spec.targets = chip;
  spec.buffers = buffers;
  const TaskId first = graph.submit(spec);
  spec.buffers = std::span(buffers).first(1);
  const TaskId second = graph.submit(spec);
  for (const BufferId buffer : buffers) graph.graph.release_buffer(buffer);
  EXPECT_THROW(graph.submit(spec), Error);
  EXPECT_THROW(graph.graph.release_buffer(buffers[0]), Error);
  graph.ok(first);
  EXPECT_EQ(graph.idle_buffers, std::vector<BufferId>{buffers[1]});
  graph.ok(second);
  EXPECT_EQ(graph.idle_buffers, (std::vector<BufferId>{buffers[1], buffers[0]}));
  const BufferId unused = graph.graph.open_buffer();
  graph.graph.release_buffer(unused);
  graph.take();
  EXPECT_EQ(graph.idle_buffers.back(), unused);
}

TEST(GraphRuns, AnEndThatIsReportedTwiceIsNoNews) {
  GraphDriver graph(two_chips());
  const TaskId task = graph.task(0);
  EXPECT_FALSE(graph.ok(task, 1));
  EXPECT_TRUE(graph.ok(task));
  EXPECT_FALSE(graph.ok(task));
  EXPECT_FALSE(graph.ok(TaskId{}));
  EXPECT_FALSE(graph.ok(TaskId{99, 1}));
}

TEST(GraphRuns, TG4_MemoryIsBoundedByWhatIsUnfinishedNotByTheHistory) {
  GraphDriver graph(two_chips());
  for (std::uint64_t i = 0; i < 10'000; ++i) {
    const TaskId task =
        graph.task(i % 2, {writes(i * 64, i * 64 + 64), reads(i * 16, i * 32), writes(0, 8)});
    if (i % 50 == 49) graph.end_all();
    graph.sent.clear();
    graph.ended.clear();
    EXPECT_LE(graph.graph.task_records(), 50U);
    EXPECT_LE(graph.graph.intervals(), 50U * 7);
    EXPECT_NE(task, TaskId{});
  }
  graph.end_all();
  graph.expect_empty();
}

TEST(GraphRuns, ManyReadersOfAWholeAndOfItsPartsCostNoMoreThanThemselves) {
  Config config = two_chips();
  config.ring_depth = 10'000;
  GraphDriver graph(config);
  for (int i = 0; i < 1000; ++i) graph.task(0, {reads(0, 1 << 20)});
  for (std::uint64_t i = 0; i < 1000; ++i) graph.task(1, {reads(i * 1000, i * 1000 + 999)});
  EXPECT_LE(graph.graph.range_uses(), 2000U + 3 * RangeMap::kManyReaders * RangeMap::kManyReaders);
  graph.take_sent();
  const TaskId writer = graph.task(0, {writes(500, 501)});
  EXPECT_EQ(graph.take_sent(), Tasks{});
  for (const auto& [task, member] : std::exchange(graph.rings, {})) graph.ok(task, member);
  EXPECT_EQ(graph.take_sent(), Tasks{writer});
}

TEST(GraphRuns, AChainOfAMillionEndsWithoutRecursion) {
  Config config = two_chips();
  config.capacity = 1 << 20;
  GraphDriver graph(config);
  const TaskId first = graph.task(0, {writes(0, 8)});
  for (int i = 0; i < 1'000'000; ++i) {
    const std::uint32_t chip = 1;
    const std::vector<Access> bytes = {writes(0, 8)};
    Spec spec;
    spec.targets = {&chip, 1};
    spec.accesses = bytes;
    graph.graph.submit(graph.run, {}, spec);
  }
  graph.graph.seal_run(graph.run);
  graph.fail(first);
  ASSERT_EQ(graph.results.size(), 1U);
  EXPECT_EQ(graph.results[0].poisoned, 1'000'000U);
  EXPECT_EQ(graph.results[0].failed, 1U);
  graph.expect_empty();
}

}  // namespace
}  // namespace simpler::graph
