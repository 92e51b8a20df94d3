// What a child does all its life: wait without the GIL, answer control requests, run tasks in
// order.
//
// The main thread runs tasks and exclusive handlers one at a time (CP-10). Service threads run
// concurrent handlers, up to kConcurrentHandlers at once, beside them transfers, which wait for no
// handler, and answer PING and ECHO while the main thread is busy. A waiting handler runs when the
// running task ends, before the next; then a task gets its turn.
//
// Thread safety: run() on the child's main thread, once.
// Fork: constructed in the child. Service threads start there, on demand.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>

#include "hierarchical/ipc/control_op.h"
#include "hierarchical/ipc/layout.h"
#include "hierarchical/ipc/reply_arena.h"
#include "hierarchical/ipc/spin.h"

namespace simpler {

// Where a handler puts its answer: one call of reserve or write, any status.
class ReplyWriter {
 public:
  ReplyWriter(ReplyArena& arena, ReplyOwner owner, std::span<std::byte> inline_space,
              const Nanoseconds& deadline_ns)
      : arena_(arena), owner_(owner), inline_(inline_space), deadline_ns_(deadline_ns) {}

  // Space for `nbytes` of the reply, inline or in the arena; nullptr when there is none by the
  // deadline or ever, and then the reply says so by itself. May wait: hold no lock. Overwrites the
  // request.
  std::byte* reserve(ReplyStatus status, std::size_t nbytes);
  void write(ReplyStatus status, std::span<const std::byte> bytes);

  [[nodiscard]] std::uint64_t id() const noexcept { return owner_.id; }  // whose reply this is
  [[nodiscard]] ReplyStatus status() const noexcept { return status_; }
  [[nodiscard]] std::size_t nbytes() const noexcept { return nbytes_; }
  [[nodiscard]] std::uint64_t offset() const noexcept { return offset_; }

 private:
  ReplyArena& arena_;
  const ReplyOwner owner_;
  const std::span<std::byte> inline_;
  const Nanoseconds& deadline_ns_;  // not read until somebody has to wait
  ReplyStatus status_ = ReplyStatus::kOk;
  std::size_t nbytes_ = 0;
  std::uint64_t offset_ = kInline;
};

struct ChildRequest {
  ControlOp op;
  std::uint32_t arg;
  std::span<const std::byte> meta;  // both valid until the reply is reserved
  std::span<const std::byte> payload;
};

// Implemented by the language binding. No method may throw.
class ChildHandler {
 public:
  virtual ~ChildHandler() = default;
  // Any op but PING and ECHO. For Lane::kService on a service thread, else on the main thread.
  virtual void control(const ChildRequest& request, ReplyWriter& reply) noexcept = 0;
  // On the main thread. ReplyStatus::kFailure fails the task.
  virtual void task(std::uint32_t callable_id, std::span<const std::byte> args,
                    ReplyWriter& reply) noexcept = 0;
  // After a reply was published: a chance to let go of what the answer needed (the GIL).
  virtual void replied() noexcept = 0;
};

class ChildLoop {
 public:
  static constexpr int kConcurrentHandlers = 4;

  // `seat` is this child's bit of TreeHeader::spinners, or 0.
  ChildLoop(TreeHeader<>& tree, ChildBlock<>& block, const SharedRegion& payload,
            PayloadSpace space, std::uint64_t seat, Nanoseconds spin_bound, ChildHandler& handler);

  // Returns once STOP has been answered.
  void run();

  // Instead of run(), when the child could not get that far: answers START with an encoded failure.
  void fail_start(std::span<const std::byte> failure);

 private:
  void wait_for_work();
  void serve_any();  // answers what is posted for any lane
  void serve_control(int slot, Lane lane);
  void run_exclusive(int slot);
  void run_task(std::uint64_t seq);
  void set_busy();
  void publish(ControlSlot<>& slot, const ReplyWriter& reply);

  void serve_concurrent();  // body of a service thread
  int next_concurrent();    // REQUIRES: service_mutex_ held
  int take_concurrent(Lane& lane, bool& is_more_left);
  void end_handler();
  void start_service_thread();
  void try_start_service_thread() noexcept;

  TreeHeader<>& tree_;
  ChildBlock<>& block_;
  const SharedRegion& payload_;
  ChildHandler& handler_;
  ReplyArena arena_;
  AdaptiveSpin spin_;
  const std::uint64_t seat_wanted_;
  std::uint64_t seat_ = 0;       // held now; main thread
  std::uint32_t pending_ = 0;    // taken from the main bell, not yet served; main thread
  std::uint64_t completed_ = 0;  // main thread
  std::uint64_t failed_ = 0;     // ring_note_end of the entries up to completed_; main thread
  bool task_was_last_ = true;    // main thread
  bool stopped_ = false;         // main thread

  std::mutex service_mutex_;
  std::uint32_t service_pending_ = 0;  // guarded by service_mutex_
  std::atomic<int> service_threads_{0};
  std::atomic<int> service_idle_{0};
  std::atomic<int> handlers_{0};                 // concurrent ones that run
  std::atomic<bool> is_handler_waiting_{false};  // for one of them to end
};

}  // namespace simpler
