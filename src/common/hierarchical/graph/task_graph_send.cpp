// From ready to sent: the queues, the groups and the order in which rings are filled.
#include <algorithm>

#include "hierarchical/graph/task_graph.h"

namespace simpler::graph {

bool TaskGraph::is_sent_enough(const Task& producer, const Task& consumer) const noexcept {
  if (producer.state != TaskState::kSent) return false;
  if (producer.kind != Kind::kNextLevel || consumer.kind != Kind::kNextLevel) return false;
  if (config_.send_ahead) return true;
  return producer.group == kNone && consumer.group == kNone && producer.worker == consumer.worker;
}

bool TaskGraph::can_ever_start(const Task& task) const noexcept {
  if (task.kind == Kind::kHost) return true;
  if (task.kind == Kind::kSub) {
    return (task.group == kNone ? 1 : groups_[task.group].members.size()) <= subs_left_;
  }
  if (task.group == kNone) return !places_[task.worker].is_lost;
  const auto& members = groups_[task.group].members;
  return std::none_of(members.begin(), members.end(),
                      [&](const Group::Member& member) { return places_[member.worker].is_lost; });
}

void TaskGraph::make_ready(std::uint32_t slot) {
  Task& task = tasks_[slot];
  task.state = TaskState::kReady;
  if (task.kind == Kind::kHost) {
    send(slot);
    return;
  }
  for_each_queue(task, [&](std::uint32_t queue) {
    queues_[queue].push({task.key, slot});
    touch_queue(queue);
  });
}

// A new task that is the only ready one for a place with room needs no queue.
bool TaskGraph::send_at_once(std::uint32_t slot) {
  Task& task = tasks_[slot];
  if (task.group != kNone) return false;
  if (task.kind == Kind::kNextLevel) {
    if (!queues_[task.worker].empty() || !has_room(task.worker)) return false;
  } else if (task.kind == Kind::kSub) {
    if (!queues_[config_.chips].empty()) return false;
    task.worker = least_loaded_sub();
    if (task.worker == kNone) return false;
  }
  send(slot);
  return true;
}

void TaskGraph::touch_queue(std::uint32_t queue) {
  if (is_touched_[queue] || queues_[queue].empty()) return;
  is_touched_[queue] = true;
  touched_queues_.push_back(queue);
}

// REQUIRES: the task was ready and is no longer.
void TaskGraph::forget_queued(std::uint32_t slot) {
  for_each_queue(tasks_[slot], [&](std::uint32_t queue) {
    queues_[queue].forget_one([&](const ReadyQueue::Entry& entry) { return is_queued(entry); });
    touch_queue(queue);
  });
}

bool TaskGraph::is_queued(const ReadyQueue::Entry& entry) const noexcept {
  const Task& task = tasks_[entry.slot];
  return task.state == TaskState::kReady && task.key == entry.key;
}

const ReadyQueue::Entry* TaskGraph::front(std::uint32_t queue) {
  return queues_[queue].front([&](const ReadyQueue::Entry& entry) { return is_queued(entry); });
}

void TaskGraph::pump() {
  while (!touched_queues_.empty()) {
    const std::uint32_t queue = touched_queues_.back();
    touched_queues_.pop_back();
    is_touched_[queue] = false;
    if (queue == config_.chips) {
      pump_subs();
    } else {
      pump_chip(queue);
    }
  }
}

void TaskGraph::pump_chip(std::uint32_t chip) {
  while (has_room(chip)) {
    const ReadyQueue::Entry* first = front(chip);
    if (first == nullptr) return;
    const std::uint32_t slot = first->slot;
    if (tasks_[slot].group != kNone) {
      if (!start_group(slot)) return;
    } else {
      queues_[chip].pop();
      send(slot);
    }
  }
}

void TaskGraph::pump_subs() {
  while (const ReadyQueue::Entry* first = front(config_.chips)) {
    const std::uint32_t slot = first->slot;
    Task& task = tasks_[slot];
    if (task.group != kNone) {
      if (!choose_subs(groups_[task.group])) return;
    } else {
      const std::uint32_t worker = least_loaded_sub();
      if (worker == kNone) return;
      task.worker = worker;
    }
    queues_[config_.chips].pop();
    send(slot);
  }
}

// Sends a group of chips when it is first at all of them and each has room.
bool TaskGraph::start_group(std::uint32_t slot) {
  const Group& group = groups_[tasks_[slot].group];
  for (const Group::Member& member : group.members) {
    if (!has_room(member.worker)) return false;
    const ReadyQueue::Entry* first = front(member.worker);
    if (first == nullptr || first->slot != slot) return false;
  }
  for (const Group::Member& member : group.members) {
    queues_[member.worker].pop();
    touch_queue(member.worker);
  }
  send(slot);
  return true;
}

std::uint32_t TaskGraph::least_loaded_sub() const noexcept {
  std::uint32_t best = kNone;
  std::uint32_t least = config_.sub_depth;
  for (std::uint32_t worker = config_.chips; worker < places_.size(); ++worker) {
    if (places_[worker].is_lost || places_[worker].outstanding >= least) continue;
    best = worker;
    least = places_[worker].outstanding;
    if (least == 0) break;
  }
  return best;
}

// The least loaded sub workers for all members, no two on one; false when too few have room.
bool TaskGraph::choose_subs(Group& group) {
  chosen_.clear();
  for (std::uint32_t worker = config_.chips; worker < places_.size(); ++worker) {
    if (has_room(worker)) chosen_.push_back(worker);
  }
  if (chosen_.size() < group.members.size()) return false;
  std::stable_sort(chosen_.begin(), chosen_.end(), [&](std::uint32_t a, std::uint32_t b) {
    return places_[a].outstanding < places_[b].outstanding;
  });
  for (std::size_t i = 0; i < group.members.size(); ++i) group.members[i].worker = chosen_[i];
  return true;
}

void TaskGraph::send(std::uint32_t slot) {
  Task& task = tasks_[slot];
  task.state = TaskState::kSent;
  if (task.group == kNone) {
    send_member(slot, 0, task.worker);
  } else {
    const auto& members = groups_[task.group].members;
    for (std::uint32_t i = 0; i < members.size(); ++i) send_member(slot, i, members[i].worker);
  }
  if (task.first_out != kNone) unblock_followers(slot);
}

bool TaskGraph::is_awaited(TaskId id) const noexcept {
  for (std::uint32_t edge = tasks_[id.slot].first_out; edge != kNone;
       edge = edges_[edge].next_out) {
    if (edges_[edge].consumer != kNone && edges_[edge].blocks) return true;
  }
  for (std::uint32_t hold = tasks_[id.slot].first_hold; hold != kNone; hold = holds_[hold].next) {
    if (buffers_[holds_[hold].buffer].is_released) return true;
  }
  return false;
}

void TaskGraph::enter_place(std::uint32_t worker) {
  if (++places_[worker].outstanding > 1 && worker >= config_.chips) ++sub_backlog_;
}

void TaskGraph::vacate_place(std::uint32_t worker) {
  if (places_[worker].outstanding-- > 1 && worker >= config_.chips) --sub_backlog_;
  touch_queue(std::min(worker, config_.chips));
}

bool TaskGraph::can_take_back(TaskId id) noexcept {
  const Task* task = tasks_.find(id);
  return task != nullptr && task->state == TaskState::kSent && task->kind == Kind::kSub &&
         task->group == kNone && !task->is_recalled;
}

bool TaskGraph::take_back(TaskId id) {
  if (!can_take_back(id)) return false;
  tasks_[id.slot].worker = kNone;
  make_ready(id.slot);
  finish_all();
  return true;
}

void TaskGraph::passed_over(std::uint32_t worker) {
  if (places_[worker].is_lost || places_[worker].outstanding == 0) return;
  vacate_place(worker);
  finish_all();
}

void TaskGraph::send_member(std::uint32_t slot, std::uint32_t member, std::uint32_t worker) {
  const Task& task = tasks_[slot];
  if (worker != kNone) enter_place(worker);
  Action& action = log_.add(ActionKind::kSend, tasks_.id_of(slot));
  action.member = member;
  action.worker = worker;
  for (std::uint32_t edge = task.first_in; edge != kNone; edge = edges_[edge].next_in) {
    const std::uint32_t from = edges_[edge].producer;
    const Task& producer = tasks_[from];
    const bool same_run = producer.run == task.run;
    for_each_unfinished(producer, [&](std::uint32_t its_member, std::uint32_t its_worker) {
      // The ring alone keeps the order of its own entries.
      if (!same_run && its_worker == worker) return;
      log_.add_producer(action, {tasks_.id_of(from), its_member, its_worker, same_run});
    });
  }
}

void TaskGraph::unblock_followers(std::uint32_t slot) {
  for (std::uint32_t edge = tasks_[slot].first_out; edge != kNone; edge = edges_[edge].next_out) {
    const std::uint32_t follower = edges_[edge].consumer;
    if (follower == kNone || !edges_[edge].blocks) continue;
    Task& later = tasks_[follower];
    if (!is_sent_enough(tasks_[slot], later)) continue;
    edges_[edge].blocks = false;
    if (--later.blockers == 0 && later.state == TaskState::kWaiting) make_ready(follower);
  }
}

bool TaskGraph::has_room(std::uint32_t worker) const noexcept {
  const Place& place = places_[worker];
  return !place.is_lost &&
         place.outstanding < (worker < config_.chips ? config_.ring_depth : config_.sub_depth);
}

template <typename Each>
void TaskGraph::for_each_queue(const Task& task, Each each) {
  if (task.kind == Kind::kSub) {
    each(config_.chips);
  } else if (task.group == kNone) {
    each(task.worker);
  } else {
    for (const Group::Member& member : groups_[task.group].members) each(member.worker);
  }
}

}  // namespace simpler::graph
