// The task graph: tasks with byte ranges go in, what to send where comes out. Pure: no threads, no
// clock, no system calls; the same calls in the same order give the same actions.
//
// Thread safety: one thread at a time. Fork: plain memory, copied like any other.
// Failure: a mistake of the caller throws Error{kInvalidArgument} and changes nothing. Ids that are
// used up are never a mistake where an event is reported: late news is ignored.
//
// Order (TG-1). A task comes after the last writer of the bytes it reads or writes, after all
// readers since of the bytes it writes, and after its explicit `deps`. Earlier means submitted
// earlier, whatever the run.
//
// Sending (TG-2). A task is ready once all it comes after has ended, or is ahead of it where it
// goes: a single on one chip may follow singles already in that chip's ring; with `send_ahead` a
// task of chips may follow whatever tasks of chips have been sent anywhere. All rings together are
// then filled in one order that respects every edge, and a group takes its place in all its rings
// at once: the entry sent first of those not ended waits for nothing, so heads never wait in a
// circle.
//
// Ready tasks go by (priority, submission), for each chip and for the sub workers together. A group
// queues at each of its places and goes when it is first at all of them and each has room (TG-5).
// What is behind it on a queue waits, what is before it goes first, so neither starves: the first
// of all queued tasks in that order is first in each of its queues and waits only for room, which
// sent tasks make by ending. Only a stream of higher priorities holds a task back for ever, as
// asked.
//
// Failure (TG-3). Whatever comes after a task that did not succeed, by any kind of edge (RAW, WAW,
// WAR or explicit) and in the same run, is poisoned, also when submitted after the failure: the
// result depends on which tasks fail, not on when. A consumer in another run is only ordered. A
// task that ends without having run still stands for what it would have waited for: later tasks on
// its bytes wait until everything before it has ended.
//
// Memory (TG-4). At most `capacity` tasks are unfinished. A task that did not succeed is kept,
// small, until its run is done. Nothing else grows with the number of tasks of a run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "hierarchical/graph/action.h"
#include "hierarchical/graph/ids.h"
#include "hierarchical/graph/range_map.h"
#include "hierarchical/graph/ready_queue.h"
#include "hierarchical/graph/records.h"
#include "hierarchical/graph/slab.h"
#include "hierarchical/graph/spec.h"

namespace simpler::graph {

// Workers 0..chips-1 are chips, the sub workers follow.
struct Config {
  std::uint32_t chips = 1;
  std::uint32_t sub_workers = 0;
  std::uint32_t ring_depth = 64;  // tasks sent to a chip and not ended
  std::uint32_t sub_depth = 2;    // the same for a sub worker
  std::uint32_t regions = 1;
  std::uint32_t capacity = 1 << 16;
  bool send_ahead = false;  // an entry in a chip's ring may wait for entries of other chips
};

enum class Report : std::uint8_t { kOk, kFailed, kSkipped };

struct Submitted {
  bool is_full = false;  // nothing happened: try again when tasks have ended
  TaskId task;
};

class TaskGraph {
 public:
  explicit TaskGraph(const Config& config);

  RunId open_run(std::int16_t priority = 0);
  // Nothing more will be submitted: the run is done when its tasks have ended.
  void seal_run(RunId run);
  // Ends what has not been sent, recalls what has; later submissions end at once. Does not seal.
  void cancel_run(RunId run);

  ScopeId open_scope(RunId run);
  void close_scope(ScopeId scope);
  BufferId open_buffer();
  // Its owner lets go. No later task may name it.
  void release_buffer(BufferId buffer);

  // `scope` may be ScopeId{}.
  Submitted submit(RunId run, ScopeId scope, const Spec& spec);

  // One member of a sent task has ended. False when that is no news: the task or member has ended
  // already, as when its worker was declared lost before.
  bool finished(TaskId task, std::uint32_t member, Report report);
  // A single task that a sub worker has been sent goes back among the ready ones, since the worker
  // has not begun it and never will. Its place there is taken until passed_over(). False when it is
  // not such a task, or has ended.
  bool take_back(TaskId task);
  [[nodiscard]] bool can_take_back(TaskId task) noexcept;
  void passed_over(std::uint32_t worker);
  // What was sent there, what is bound for it, and what needs more sub workers than are left,
  // fails; but for `not_begun`, single tasks of a sub worker, which others do.
  void worker_lost(std::uint32_t worker, std::span<const TaskId> not_begun = {});
  // The worker has come back, with an empty ring.
  void worker_back(std::uint32_t worker);

  // Calls each(TaskId) once for every task that it comes directly after and that has not ended:
  // right after submit() the arrows that lead to it.
  template <typename Each>
  void each_producer(TaskId task, Each each) const {
    for (std::uint32_t edge = tasks_[task.slot].first_in; edge != kNone;
         edge = edges_[edge].next_in) {
      each(tasks_.id_of(edges_[edge].producer));
    }
  }

  // Whether something waits for the end of a task that has been sent, or for a buffer that it
  // keeps.
  [[nodiscard]] bool is_awaited(TaskId task) const noexcept;
  // Whether ready tasks wait for room at a worker.
  [[nodiscard]] bool has_ready(std::uint32_t worker) const noexcept {
    return !queues_[worker < config_.chips ? worker : config_.chips].empty();
  }

  // What happened since clear(). Valid until the next call of any other member.
  [[nodiscard]] const ActionLog& log() const noexcept { return log_; }
  void clear() noexcept { log_.clear(); }

  [[nodiscard]] std::size_t unfinished_tasks() const noexcept { return unreleased_; }
  [[nodiscard]] std::size_t task_records() const noexcept { return tasks_.in_use(); }
  [[nodiscard]] std::size_t edges() const noexcept { return edges_.in_use(); }
  [[nodiscard]] std::size_t intervals() const noexcept { return ranges_.interval_count(); }
  [[nodiscard]] std::size_t range_uses() const noexcept { return ranges_.use_count(); }
  // How many tasks sub workers have been sent beside the one that each is at.
  [[nodiscard]] std::uint32_t sub_backlog() const noexcept { return sub_backlog_; }
  [[nodiscard]] std::uint32_t outstanding(std::uint32_t worker) const {
    return places_.at(worker).outstanding;
  }

 private:
  // Submission.
  void check(RunId run, ScopeId scope, const Spec& spec);
  void check_targets(const Spec& spec) const;
  std::uint32_t new_task(std::uint32_t run, std::uint32_t scope, const Spec& spec);
  void set_targets(std::uint32_t slot, const Spec& spec);
  void order(std::uint32_t slot, const Spec& spec);
  void order_after(std::uint32_t consumer, std::uint32_t producer);
  void add_edge(std::uint32_t producer, std::uint32_t consumer);
  void hold(std::uint32_t slot, std::span<const BufferId> buffers);
  void link_to_run(std::uint32_t slot);

  // Sending.
  [[nodiscard]] bool is_sent_enough(const Task& producer, const Task& consumer) const noexcept;
  [[nodiscard]] bool can_ever_start(const Task& task) const noexcept;
  [[nodiscard]] bool has_room(std::uint32_t worker) const noexcept;
  [[nodiscard]] std::uint32_t least_loaded_sub() const noexcept;
  [[nodiscard]] bool is_queued(const ReadyQueue::Entry& entry) const noexcept;
  const ReadyQueue::Entry* front(std::uint32_t queue);
  void make_ready(std::uint32_t slot);
  bool send_at_once(std::uint32_t slot);
  void touch_queue(std::uint32_t queue);
  void forget_queued(std::uint32_t slot);
  void pump();
  void pump_chip(std::uint32_t chip);
  void pump_subs();
  bool start_group(std::uint32_t slot);
  bool choose_subs(Group& group);
  void send(std::uint32_t slot);
  void enter_place(std::uint32_t worker);
  void vacate_place(std::uint32_t worker);
  void send_member(std::uint32_t slot, std::uint32_t member, std::uint32_t worker);
  void unblock_followers(std::uint32_t slot);
  template <typename Each>  // each(queue)
  void for_each_queue(const Task& task, Each each);
  template <typename Each>  // each(member, worker)
  void for_each_unfinished(const Task& task, Each each) const {
    if (task.group == kNone) {
      each(std::uint32_t{0}, task.worker);
      return;
    }
    const auto& members = groups_[task.group].members;
    for (std::uint32_t i = 0; i < members.size(); ++i) {
      if (!members[i].has_ended) each(i, members[i].worker);
    }
  }

  // Ending.
  bool end_member(std::uint32_t slot, std::uint32_t member, Outcome outcome, bool was_skipped);
  bool end_member_of_group(std::uint32_t slot, std::uint32_t member, Outcome outcome,
                           bool was_skipped);
  void leave_place(Task& task, std::uint32_t worker, Outcome outcome);
  [[nodiscard]] static Outcome outcome_of_skip(const Task& task) noexcept;
  void lose(std::uint32_t slot, std::uint32_t worker);
  void block_followers(std::uint32_t slot);
  void settle(std::uint32_t slot, Outcome outcome);
  void doom(std::uint32_t slot);
  void follow_up(std::uint32_t slot);
  static void count(RunResult& result, TaskId task, Outcome outcome);
  void leave_scope_and_buffers(Task& task);
  void finish_all();
  void finish_ended(std::uint32_t slot);
  void poison_consumers(std::uint32_t slot);
  void poison(Task& task, std::uint32_t by);
  [[nodiscard]] bool has_failed(const Task& task) const noexcept;
  void detach_from_producers(Task& task);
  void unlink_in(std::uint32_t edge);
  void release(std::uint32_t slot);
  void free_task(std::uint32_t slot);
  void unlink_from_run(std::uint32_t slot);
  void note_done(std::uint32_t run);
  void finish_run(std::uint32_t run);
  void close_if_empty(std::uint32_t scope);
  void close_if_idle(std::uint32_t buffer);

  Config config_;
  ActionLog log_;
  RangeMap ranges_;
  Table<Task> tasks_;
  Table<Run> runs_;
  Table<Scope> scopes_;
  Table<Buffer> buffers_;
  Slab<Edge> edges_;
  Slab<Hold> holds_;
  Slab<Group> groups_;
  std::vector<Place> places_;       // by worker
  std::vector<ReadyQueue> queues_;  // by chip, then one for all sub workers
  std::vector<std::uint32_t> touched_queues_;
  std::vector<char> is_touched_;          // by queue: in touched_queues_
  std::vector<std::uint32_t> ended_;      // settled, consequences to come
  std::vector<std::uint32_t> done_runs_;  // sealed and empty, to be told
  std::vector<std::uint32_t> found_;      // scratch of order()
  std::vector<std::uint32_t> chosen_;     // scratch of choose_subs() and worker_lost()
  std::uint64_t submissions_ = 0;
  std::size_t unreleased_ = 0;
  std::uint32_t subs_left_;
  std::uint32_t sub_backlog_ = 0;
};

}  // namespace simpler::graph
