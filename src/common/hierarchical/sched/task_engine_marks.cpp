// Which ends a driver has to hear of while it sleeps. Waking for each would cost the child a system
// call and a core's attention per task, and most ends change nothing: their followers are ahead in
// the same ring.
#include <algorithm>

#include "hierarchical/ipc/task_protocol.h"
#include "hierarchical/sched/task_engine.h"

namespace simpler {

// Returns once there is news, or it is time to look; true when interrupted.
bool TaskEngine::sleep_on_rings(Lock& lock, std::uint32_t attention_seen, Deadline until,
                                Interrupt* interrupt) {
  set_marks();
  are_marks_set_ = true;
  lock.unlock();
  const auto news = [this, attention_seen] {
    return attention_.load(std::memory_order_seq_cst) != attention_seen ||
           std::ranges::any_of(places_,
                               [](const Place& place) { return place.child->ring.has_news(); });
  };
  const Nanoseconds start = monotonic_now();
  const FutexResult how = tasks_sleep(tree_.tasks_ended, news, next_slice(until, interrupt));
  spin_.slept(monotonic_now() - start);
  const bool is_interrupted = (how == FutexResult::kTimedOut || how == FutexResult::kInterrupted) &&
                              interrupt != nullptr && interrupt->pending();
  lock.lock();
  are_marks_set_ = false;
  return is_interrupted;
}

void TaskEngine::set_marks() {
  const bool is_any_end =
      std::ranges::any_of(waiters_, [](const Waiter* waiter) { return waiter->wanted.is_any_end; });
  for (std::uint32_t worker = 0; worker < places_.size(); ++worker)
    places_[worker].child->ring.set_wake_at(is_any_end ? 0 : mark_of(worker));
}

// The first entry of a ring whose end somebody has to hear of: one that others wait for, the last
// of a run that is waited for, the last of all, or the one that leaves half the ring for ready
// tasks.
std::uint64_t TaskEngine::mark_of(std::uint32_t worker) {
  const Place& place = places_[worker];
  if (place.is_lost) return 0;  // a restart may be at work on its ring
  const TaskRingParentEnd& ring = place.child->ring;
  const std::uint64_t last = ring.next_seq() - 1;
  const std::uint64_t first = last + 1 - (kTaskSlots - ring.room());
  if (first > last) return 0;
  std::uint64_t mark = last;
  if (graph_.has_ready(worker)) {
    const std::uint64_t depth = place.child->is_chip ? kTaskSlots : config_.sub_depth;
    mark = std::max(first, last - std::min(last, depth / 2));
  }
  runs_ahead_.clear();
  for (std::uint64_t seq = last; seq >= first; --seq) {
    if (must_hear_of(place.sent[(seq - 1) % kTaskSlots])) mark = std::min(mark, seq);
  }
  return mark;
}

// Asked of the entries of a ring from the last to the first.
bool TaskEngine::must_hear_of(const SentEntry& entry) {
  if (entry.is_taken_back) return false;
  const EngineTask& task = tasks_[entry.task.slot];
  if (task.id != entry.task || task.has_ended) return false;
  if (graph_.is_awaited(entry.task)) return true;
  const bool is_last_of_run = std::ranges::find(runs_ahead_, task.run) == runs_ahead_.end();
  if (is_last_of_run) runs_ahead_.push_back(task.run);
  if (is_last_of_run && runs_[task.run].is_watched) return true;
  return std::ranges::any_of(waiters_, [&](const Waiter* waiter) {
    return waiter->wanted.task == entry.task || (is_last_of_run && waiter->wanted.run == task.run);
  });
}

// Something was added that the sleeping driver does not know to listen for.
void TaskEngine::recheck_marks() {
  if (!are_marks_set_) return;
  are_marks_set_ = false;
  call_attention();
}

}  // namespace simpler
