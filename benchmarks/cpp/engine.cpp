// The task engine over two real chip processes that run an empty native kernel: time a task, and of
// it the parent's processor time, which spinning is part of.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <vector>

#include "hierarchical/ipc/task_codec.h"
#include "hierarchical/sched/task_engine.h"
#include "hierarchical/workers/child_loop.h"
#include "hierarchical/workers/native_kernel.h"
#include "hierarchical/workers/worker_manager.h"

namespace simpler {
namespace {

int do_nothing(const simpler_kernel_args*) { return 0; }

class Chip : public ChildHandler {
 public:
  void control(const ChildRequest&, ReplyWriter& reply) noexcept override {
    reply.write(ReplyStatus::kOk, {});
  }
  void task(std::uint32_t, std::span<const std::byte> args, ReplyWriter& reply) noexcept override {
    const KernelOutcome outcome = call_native_kernel(do_nothing, args, 0);
    reply.write(outcome.code == 0 ? ReplyStatus::kOk : ReplyStatus::kFailure, {});
  }
  void replied() noexcept override {}
};

class Tree : public TreeListener {
 public:
  Tree() : manager_(options(), *this) {
    manager_.start(
        [](const ChildContext& context) {
          Chip chip;
          ChildLoop loop(context.memory.header(), context.child.block, context.memory.payload(),
                         context.memory.space(context.child.index), context.child.seat,
                         context.spin_ns, chip);
          loop.run();
          return 0;
        },
        {}, {}, Deadline::after_seconds(60), [] { return nullptr; });
    engine_ = std::make_unique<TaskEngine>(
        TaskEngineConfig{}, manager_.memory().header(),
        std::vector<ChildProcess*>{&manager_.child(0), &manager_.child(1)});
  }
  ~Tree() override {
    engine_->close();
    manager_.stop(Deadline::after_seconds(5));
  }

  // `count` tasks without results: task i on chip chip_of(i), each after the one before if chained.
  void run(std::size_t count, const std::function<std::uint32_t(std::size_t)>& chip_of,
           bool is_chained) {
    const EngineRunId run = engine_->open_run();
    std::uint32_t target = 0;
    const graph::Access access{0, graph::Mode::kWrite, 0, 8};
    TaskDesc desc;
    desc.spec.targets = {&target, 1};
    if (is_chained) desc.spec.accesses = {&access, 1};
    desc.args = args_;
    engine_->submit_many(
        run, {}, count,
        [&](std::size_t i) -> const TaskDesc& {
          target = chip_of(i);
          return desc;
        },
        Deadline::never(), nullptr);
    finish(run);
  }
  // As many runs of one task each, from opening to its result.
  void run_singles(std::size_t count) {
    const std::uint32_t target = 0;
    TaskDesc desc;
    desc.spec.targets = {&target, 1};
    desc.args = args_;
    desc.is_kept = true;
    for (std::size_t i = 0; i < count; ++i) {
      const EngineRunId run = engine_->open_run();
      const SubmittedTask task = engine_->submit(run, {}, desc, Deadline::never(), nullptr);
      engine_->wait_task(task, Deadline::never(), nullptr);
      engine_->take_result(task);
      finish(run);
    }
  }

 private:
  static TreeOptions options() {
    TreeOptions made;
    made.device_ids = {0, 1};
    made.max_payload = std::size_t{1} << 20;
    made.heap_bytes = 4096;
    return made;
  }
  void finish(EngineRunId run) {
    engine_->seal_run(run);
    engine_->wait_run(run, Deadline::never(), nullptr);
    engine_->take_run(run);
  }
  void child_died(int worker, const std::string& how) override {
    engine_->worker_lost(worker, how);
  }
  void child_logged(int, std::vector<std::byte>) override {}
  std::string name_of_request(ControlOp, std::uint32_t) override { return {}; }
  std::string name_of_task(std::uint32_t) override { return {}; }

  WorkerManager manager_;
  std::unique_ptr<TaskEngine> engine_;
  std::vector<std::byte> args_ = encode_task(std::vector<TaskItem>{std::int64_t{3}});
};

double processor_ns() {
  timespec spent{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &spent);
  return static_cast<double>(spent.tv_sec) * 1e9 + static_cast<double>(spent.tv_nsec);
}

void measure(const char* what, std::size_t count, const std::function<void()>& work) {
  constexpr int kRounds = 9;
  work();
  std::vector<double> ns;
  const double before = processor_ns();
  for (int round = 0; round < kRounds; ++round) {
    const Nanoseconds start = monotonic_now();
    work();
    ns.push_back(static_cast<double>(monotonic_now() - start) / static_cast<double>(count));
  }
  const double parent = (processor_ns() - before) / kRounds / static_cast<double>(count);
  std::sort(ns.begin(), ns.end());
  std::printf("%-44s %8.0f ns a task (%.0f to %.0f), parent %.0f ns\n", what, ns[kRounds / 2],
              ns.front(), ns.back(), parent);
}

}  // namespace
}  // namespace simpler

int main() {
  simpler::Tree tree;
  simpler::measure("independent, two chips, 100,000", 100'000, [&] {
    tree.run(100'000, [](std::size_t i) { return static_cast<std::uint32_t>(i % 2); }, false);
  });
  simpler::measure("independent, one chip, 100,000", 100'000,
                   [&] { tree.run(100'000, [](std::size_t) { return 0U; }, false); });
  simpler::measure("chain on one chip, 10,000", 10'000,
                   [&] { tree.run(10'000, [](std::size_t) { return 0U; }, true); });
  simpler::measure("chain alternating between two chips, 10,000", 10'000, [&] {
    tree.run(10'000, [](std::size_t i) { return static_cast<std::uint32_t>(i % 2); }, true);
  });
  simpler::measure("one run with one task, submit to result", 10'000,
                   [&] { tree.run_singles(10'000); });
  return 0;
}
