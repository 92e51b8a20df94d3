// A tree of real processes whose handlers are C++ and do what they are told.
#pragma once

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "hierarchical/workers/worker_manager.h"
#include "in_process_child.h"

namespace simpler::testing {

// A promised time, longer on a slow machine (SIMPLER_TEST_TIME_SCALE).
inline double scaled(double seconds) {
  const char* const scale = std::getenv("SIMPLER_TEST_TIME_SCALE");
  return scale == nullptr ? seconds : seconds * std::strtod(scale, nullptr);
}

inline constexpr double kShutdownBudgetS = 1.0;

inline bool no_child_is_left() { return waitpid(-1, nullptr, WNOHANG) == -1 && errno == ECHILD; }

[[noreturn]] inline void stay_for_ever() {
  for (;;) pause();
}

enum class Order : std::uint32_t {
  kPid,
  kExit,
  kAbort,
  kSegfault,
  kKillItself,
  kStay,
  kStayAndIgnoreSigterm,
  kLog,
  kScribbleOnLog,
  kLogForEver,
};

class ForkedTree : public TreeListener {
 public:
  using OnStart = std::function<void(const ChildContext&, ReplyWriter&)>;

  explicit ForkedTree(int chips)
      : owned_(std::make_unique<WorkerManager>(options(chips), *this)), manager(*owned_) {}

  std::vector<std::vector<std::byte>> start(Deadline deadline = watchdog()) {
    return manager.start([this](const ChildContext& context) { return run_child(context); }, hooks,
                         {}, deadline, [] { return nullptr; });
  }
  int post(int worker, Order order) {
    simpler::ChildProcess& child = manager.child(worker);
    ControlRequest request;
    request.op = ControlOp::EXTENSION;
    request.arg = static_cast<std::uint32_t>(order);
    int slot = -1;
    if (child.control.wait_slot(watchdog(), nullptr, slot) != CallWait::kOk)
      throw manager.gone_error(worker);
    child.control.fill(slot, request, nullptr);
    child.control.post(slot, manager.next_request_id());
    return slot;
  }
  std::string call(int worker, Order order) {
    const int slot = post(worker, order);
    simpler::ChildProcess& child = manager.child(worker);
    if (child.control.wait_reply(slot, watchdog(), nullptr) != CallWait::kOk)
      throw manager.gone_error(worker);
    return text_of(take_reply_copy(child, slot));
  }
  std::vector<std::string> deaths() {
    const std::lock_guard lock(mutex_);
    return deaths_;
  }
  std::vector<std::string> frames() {
    const std::lock_guard lock(mutex_);
    return frames_;
  }

  OnStart on_start;  // writes nothing: START is answered with the child's name
  ForkHooks hooks;

 private:
  static TreeOptions options(int chips) {
    TreeOptions made;
    for (int i = 0; i < chips; ++i) made.device_ids.push_back(i + 10);
    made.max_payload = std::size_t{1} << 16;
    made.heap_bytes = 4096;
    return made;
  }

  class ChildSide : public ChildHandler {
   public:
    ChildSide(const ChildContext& context, const OnStart& on_start)
        : context_(context), on_start_(on_start) {}

    void control(const ChildRequest& request, ReplyWriter& reply) noexcept override {
      if (request.op == ControlOp::EXTENSION) {
        const std::string answer = obey(static_cast<Order>(request.arg));
        reply.write(ReplyStatus::kOk, bytes_of(answer));
      } else if (request.op == ControlOp::START) {
        reply.write(ReplyStatus::kOk,
                    bytes_of("ready " + std::to_string(context_.child.index) + " generation " +
                             std::to_string(context_.generation)));
        if (on_start_) on_start_(context_, reply);
      }
    }
    void task(std::uint32_t, std::span<const std::byte>, ReplyWriter&) noexcept override {
      stay_for_ever();
    }
    void replied() noexcept override {}

   private:
    std::string obey(Order order) {
      const int log = context_.log_socket;
      switch (order) {
        case Order::kPid:
          return std::to_string(getpid());
        case Order::kExit:
          _exit(3);
        case Order::kAbort:
          std::abort();
        case Order::kSegfault:
          raise(SIGSEGV);
          break;
        case Order::kKillItself:
          raise(SIGKILL);
          break;
        case Order::kStayAndIgnoreSigterm:
          signal(SIGTERM, SIG_IGN);
          stay_for_ever();
        case Order::kStay:
          stay_for_ever();
        case Order::kLog:
          for (const std::string& text :
               {std::string(), std::string("short"), std::string(300'000, 'l')}) {
            send_frame(log, bytes_of(text));
          }
          break;
        case Order::kScribbleOnLog: {
          const std::string garbage(1000, '\xff');
          [[maybe_unused]] const ssize_t written = write(log, garbage.data(), garbage.size());
          break;
        }
        case Order::kLogForEver:
          while (send_frame(log, bytes_of("again and again"))) {
          }
      }
      return "";
    }

    const ChildContext& context_;
    const OnStart& on_start_;
  };

  int run_child(const ChildContext& context) {
    const rlimit no_core{0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    ChildSide handler(context, on_start);
    ChildLoop loop(context.memory.header(), context.child.block, context.memory.payload(),
                   context.memory.space(context.child.index), context.child.seat, context.spin_ns,
                   handler);
    loop.run();
    exit_now(0);  // the service threads still use the loop
  }

  void child_died(int, const std::string& how) override {
    const std::lock_guard lock(mutex_);
    deaths_.push_back(how);
  }
  void child_logged(int, std::vector<std::byte> frame) override {
    const std::lock_guard lock(mutex_);
    if (frames_.size() < 1000) frames_.push_back(text_of(frame));
  }
  std::string name_of_request(ControlOp, std::uint32_t arg) override {
    return "request " + std::to_string(arg);
  }
  std::string name_of_task(std::uint32_t callable_id) override {
    return "task " + std::to_string(callable_id);
  }

  std::mutex mutex_;
  std::vector<std::string> deaths_;  // guarded by mutex_
  std::vector<std::string> frames_;  // guarded by mutex_
  // Last: ends before the lists that its threads fill. On the heap: ThreadSanitizer takes the
  // mutexes of one tree on the stack for those of the next at the same address.
  std::unique_ptr<WorkerManager> owned_;

 public:
  WorkerManager& manager;
};

}  // namespace simpler::testing
