// One child of a tree with both ends in this process: its loop runs on a thread, its handlers are
// the test's own functions. ThreadSanitizer sees both sides.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "child_process.h"
#include "hierarchical/workers/child_loop.h"
#include "hierarchical/workers/child_process.h"
#include "hierarchical/workers/replies.h"

namespace simpler::testing {

inline std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}
inline std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Service threads end with the process, so what they look at must live as long.
template <typename Object, typename... Args>
Object& make_immortal(Args&&... args) {
  static auto* const objects = new std::vector<std::unique_ptr<Object>>;
  objects->push_back(std::make_unique<Object>(std::forward<Args>(args)...));
  return *objects->back();
}

// Closed until opened; waits end under the watchdog. A thread may still be on its way out of wait()
// when the gate is gone.
class Gate {
 public:
  void open() {
    const std::lock_guard lock(state_.mutex);
    state_.open = true;
    state_.changed.notify_all();
  }
  void wait() {
    State& state = state_;
    std::unique_lock lock(state.mutex);
    EXPECT_TRUE(
        state.changed.wait_for(lock, std::chrono::seconds(60), [&state] { return state.open; }));
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool open = false;
  };
  State& state_ = make_immortal<State>();
};

class Handlers : public ChildHandler {
 public:
  std::function<void(const ChildRequest&, ReplyWriter&)> on_control = echo;
  std::function<void(std::uint32_t, std::span<const std::byte>, ReplyWriter&)> on_task =
      [](std::uint32_t, std::span<const std::byte> args, ReplyWriter& reply) {
        reply.write(ReplyStatus::kOk, args);
      };
  std::atomic<int> replies{0};

  static void echo(const ChildRequest& request, ReplyWriter& reply) {
    reply.write(ReplyStatus::kOk, request.payload);
  }

  void control(const ChildRequest& request, ReplyWriter& reply) noexcept override {
    if (request.op == ControlOp::STOP) {  // comes when the test's own variables are gone
      reply.write(ReplyStatus::kOk, {});
    } else {
      on_control(request, reply);
    }
  }
  void task(std::uint32_t callable_id, std::span<const std::byte> args,
            ReplyWriter& reply) noexcept override {
    on_task(callable_id, args, reply);
  }
  void replied() noexcept override { replies.fetch_add(1); }
};

// A loop on a thread over the block of `child`, until stop().
class LoopThread {
 public:
  LoopThread(TreeMemory& memory, simpler::ChildProcess& child, Nanoseconds spin_ns,
             ChildHandler& handler)
      : child_(child),
        loop_(memory.header(), child.block, memory.payload(), memory.space(child.index), child.seat,
              spin_ns, handler) {}
  ~LoopThread() {
    if (thread_.joinable()) stop();
  }

  void start() {
    thread_ = std::thread([this] { loop_.run(); });
  }
  // Posts STOP, takes its answer and waits for the thread.
  void stop() {
    ControlRequest request;
    request.op = ControlOp::STOP;
    child_.control.fill(kLifecycleSlot, request, nullptr);
    child_.control.post(kLifecycleSlot, std::uint64_t{1} << 62);
    EXPECT_EQ(child_.control.wait_reply(kLifecycleSlot, watchdog(), nullptr), CallWait::kOk);
    child_.control.release(kLifecycleSlot);
    thread_.join();
  }
  ChildLoop& loop() { return loop_; }

 private:
  simpler::ChildProcess& child_;
  ChildLoop loop_;
  std::thread thread_;
};

struct InProcessChild {
  explicit InProcessChild(std::size_t max_payload = std::size_t{1} << 20,
                          Nanoseconds spin_ns = 20'000)
      : memory(1, max_payload, 4096, "test"),
        child(memory, 0, true, 7, spin_ns),
        main(memory, child, spin_ns, handlers) {
    memory.header().spin_limit = 2;
  }

  static ControlRequest request(Lane lane, std::string_view payload = {},
                                Deadline deadline = watchdog(), std::uint64_t hold = 0) {
    ControlRequest made;
    made.op = ControlOp::EXTENSION;
    made.lane = lane;
    made.payload = bytes_of(payload);
    made.deadline = deadline;
    made.hold = hold;
    return made;
  }

  // Posts and returns the slot; -1 when there is none.
  int post(const ControlRequest& request) {
    std::shared_ptr<StagedBlock> staged;
    if (request.nbytes() > kSlotInlineBytes) {
      EXPECT_EQ(child.arena.wait_stage(request.nbytes(), request.deadline, nullptr, staged),
                ArenaWait::kOk);
      std::byte* to = child.arena.at(staged->offset());
      if (!request.meta.empty()) std::memcpy(to, request.meta.data(), request.meta.size());
      std::memcpy(to + request.meta.size(), request.payload.data(), request.payload.size());
    }
    int slot = -1;
    if (child.control.wait_slot(request.deadline, nullptr, slot) != CallWait::kOk) return -1;
    child.control.fill(slot, request, std::move(staged));
    child.control.post(slot, next_id.fetch_add(1));
    return slot;
  }
  // Waits for the reply in `slot`. Throws CallError for an error.
  std::string finish(int slot) {
    EXPECT_EQ(child.control.wait_reply(slot, watchdog(), nullptr), CallWait::kOk);
    return text_of(take_reply_copy(child, slot));
  }
  std::string call(Lane lane, std::string_view payload = {}) {
    return finish(post(request(lane, payload)));
  }
  std::string call_builtin(ControlOp op, std::string_view payload = {}) {
    ControlRequest made = request(Lane::kAny, payload);
    made.op = op;
    return finish(post(made));
  }

  std::uint64_t publish(std::string_view args = {}, std::uint64_t after = 0,
                        std::uint32_t callable_id = 0) {
    std::uint64_t seq = 0;
    EXPECT_EQ(child.ring.publish(callable_id, bytes_of(args), after, watchdog(), nullptr, seq),
              TaskWait::kOk);
    return seq;
  }
  TaskOutcome outcome(std::uint64_t seq) {
    TaskOutcome out;
    EXPECT_EQ(child.ring.wait(seq, watchdog(), nullptr, out), TaskWait::kOk);
    return out;
  }

  TreeMemory memory;
  simpler::ChildProcess child;
  Handlers handlers;
  LoopThread main;
  std::atomic<std::uint64_t> next_id{1};
};

inline InProcessChild& make_child(std::size_t max_payload = std::size_t{1} << 20,
                                  Nanoseconds spin_ns = 20'000) {
  return make_immortal<InProcessChild>(max_payload, spin_ns);
}

// An interrupt that is pending once told so.
class FakeInterrupt : public Interrupt {
 public:
  bool pending() override { return pending_.load(); }
  void interrupt() { pending_.store(true); }

 private:
  std::atomic<bool> pending_{false};
};

}  // namespace simpler::testing
