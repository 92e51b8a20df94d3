// Calls that nobody waits in: queued per child, posted as slots come free, ended as events.
//
// One thread takes events (the binding's dispatcher); it is also the one that posts what is queued,
// so that no call needs a thread of its own. The same queue of events carries log frames and
// deaths.
//
// Thread safety: all methods may be called from any thread; wait_events by one at a time.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "hierarchical/ipc/control_parent.h"
#include "hierarchical/workers/call_error.h"
#include "hierarchical/workers/worker_manager.h"

namespace simpler {

struct AsyncEvent {
  enum class Kind : std::uint8_t {
    kReply,
    kLog,
    kLogsLost,
    kDied,
    kEnded,
    kRunDone,
    kTurnCame,
    kBuffersIdle
  };
  Kind kind = Kind::kReply;
  int worker = -1;
  // kReply: the token; kEnded: the hold; kLogsLost: how many; kRunDone and kTurnCame: generation
  // and slot
  std::uint64_t number = 0;
  std::vector<std::byte> bytes;      // the reply, or the log frame
  std::string text;                  // kDied
  std::unique_ptr<CallError> error;  // kReply: why there is none
};

// Where the replies of one fail-fast broadcast go, instead of the events.
struct ReplySink {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<AsyncEvent> replies;  // guarded by mutex
  bool left = false;                // guarded by mutex: nobody reads any more
};

class AsyncCalls {
 public:
  static constexpr std::size_t kMaxQueued = 1024;  // per child
  // Log frames that nobody takes are dropped beyond this, and counted.
  static constexpr std::size_t kMaxLogBytes = std::size_t{64} << 20;

  explicit AsyncCalls(WorkerManager& manager)
      : manager_(manager), queues_(static_cast<std::size_t>(manager.size())) {}

  // Copies the request and returns its token at once. Throws CallError{kBackPressure}.
  std::uint64_t submit(int worker, const ControlRequest& request);
  // To every chip, in the same place of the order of broadcasts for each. With a sink the replies
  // go there.
  std::vector<std::uint64_t> submit_broadcast(const ControlRequest& request,
                                              std::span<const std::span<const std::byte>> metas,
                                              const std::shared_ptr<ReplySink>& sink = nullptr);
  // True when the call had not begun; then it never does and no event follows.
  bool cancel(std::uint64_t token);

  // Blocks until there are events; empty once finish() was called and all events were taken.
  std::vector<AsyncEvent> wait_events();
  void push(AsyncEvent event);
  // No more events come; wakes wait_events.
  void finish();

  [[nodiscard]] std::size_t queued(int worker);

  // Held while the requests of one broadcast are posted, so that every child sees two broadcasts in
  // the same order (CP-7). A broadcast that posts directly must find no queued one in front of it.
  std::mutex& order_mutex() noexcept { return order_mutex_; }
  ReleaseEvent<>& broadcasts_posted() noexcept { return broadcasts_posted_; }
  [[nodiscard]] bool broadcast_queued() const noexcept { return queued_broadcasts_.load() != 0; }

 private:
  struct Call {
    std::uint64_t token = 0;
    int worker = -1;
    ControlRequest request;  // its spans point into `bytes`
    std::vector<std::byte> bytes;
    int slot = -1;
    bool broadcast = false;
    std::shared_ptr<ReplySink> sink;
  };

  std::unique_ptr<Call> make_call(int worker, const ControlRequest& request,
                                  std::span<const std::byte> meta);
  void enqueue(std::unique_ptr<Call> call);       // REQUIRES: mutex_ held
  void check_room(int worker);                    // REQUIRES: mutex_ held
  bool try_post(Call& call);                      // REQUIRES: mutex_ held
  void post_queued();                             // REQUIRES: mutex_ held
  void end_posted(std::vector<AsyncEvent>& out);  // REQUIRES: mutex_ held
  bool end_one(Call& call, AsyncEvent& event);
  void deliver(const Call& call, AsyncEvent event, std::vector<AsyncEvent>& out);
  void expire_queue(int worker, std::vector<AsyncEvent>& out);  // REQUIRES: mutex_ held
  void reclaim(std::vector<AsyncEvent>& out);
  Deadline next_deadline();           // REQUIRES: mutex_ held
  void left_queue(const Call& call);  // REQUIRES: mutex_ held

  WorkerManager& manager_;
  std::mutex mutex_;
  std::vector<std::deque<std::unique_ptr<Call>>> queues_;  // guarded by mutex_
  std::map<std::uint64_t, std::unique_ptr<Call>> posted_;  // guarded by mutex_
  std::vector<AsyncEvent> events_;                         // guarded by mutex_
  std::size_t log_bytes_ = 0;                              // guarded by mutex_; of events_
  std::uint64_t logs_lost_ = 0;                            // guarded by mutex_
  std::uint64_t next_token_ = 1;                           // guarded by mutex_
  Deadline sleeping_until_ = Deadline::at(0);              // guarded by mutex_; of wait_events
  bool finished_ = false;                                  // guarded by mutex_
  std::mutex order_mutex_;
  std::atomic<int> queued_broadcasts_{0};  // entries of queues_ that belong to broadcasts
  ReleaseEvent<> broadcasts_posted_;
};

}  // namespace simpler
