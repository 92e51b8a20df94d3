// Explorer: what an operation does to memory, sleepers and clocks. Included by explorer.h.
#pragma once

#include <algorithm>

#include "model/explorer.h"

namespace simpler::model {

inline std::string Explorer::name_of(const Cell& cell) {
  if (cell.name != nullptr) return cell.name;
  const auto known = std::find(seen_cells_.begin(), seen_cells_.end(), &cell);
  const auto index = known - seen_cells_.begin();
  if (known == seen_cells_.end()) seen_cells_.push_back(&cell);
  return "word" + std::to_string(index);
}

inline void Explorer::note(const std::string& text) {
  if (!tracing_) return;
  trace_.push_back((running_ < 0 ? std::string("finally") : self().name) + ": " + text);
}

inline void Explorer::release_from(Cell& cell, Thread& thread, bool keep) {
  if (!keep) cell.released = {};
  join_clock(cell.released, thread.clock);
  ++thread.clock[static_cast<std::size_t>(thread.id)];
}

inline std::uint64_t Explorer::load(const Cell& cell, std::memory_order order) {
  if (!in_thread()) return cell.value;
  point();
  settle(cell);
  Thread& thread = self();
  const auto own = std::find_if(thread.buffer.rbegin(), thread.buffer.rend(),
                                [&](const BufferedStore& store) { return store.cell == &cell; });
  if (own != thread.buffer.rend()) {
    if (tracing_) note("reads its own " + std::to_string(own->value) + " of " + name_of(cell));
    return own->value;
  }
  if (acquires(order)) join_clock(thread.clock, cell.released);
  if (tracing_) note("reads " + std::to_string(cell.value) + " from " + name_of(cell));
  return cell.value;
}

inline void Explorer::store(Cell& cell, std::uint64_t value, std::memory_order order) {
  if (!in_thread()) {
    cell.value = value;
    return;
  }
  point();
  settle(cell);
  Thread& thread = self();
  if (options_.store_buffers && order != std::memory_order_seq_cst) {
    BufferedStore buffered{&cell, value, {}, releases(order)};
    if (buffered.release) {
      buffered.released = thread.clock;
      ++thread.clock[static_cast<std::size_t>(thread.id)];
    }
    thread.buffer.push_back(buffered);
    if (tracing_) note("buffers " + std::to_string(value) + " for " + name_of(cell));
    return;
  }
  flush_all(thread);
  cell.value = value;
  cell.released = {};
  if (releases(order)) release_from(cell, thread, false);
  if (tracing_) note("writes " + std::to_string(value) + " to " + name_of(cell));
}

inline std::uint64_t Explorer::modify(Cell& cell, std::memory_order order, const char* what,
                                      const std::function<bool(std::uint64_t&)>& change) {
  if (!in_thread()) {
    const std::uint64_t before = cell.value;
    change(cell.value);
    return before;
  }
  point();
  settle(cell);
  Thread& thread = self();
  flush_all(thread);
  const std::uint64_t before = cell.value;
  const bool written = change(cell.value);
  if (acquires(order)) join_clock(thread.clock, cell.released);
  if (written && releases(order)) release_from(cell, thread, true);
  if (tracing_) {
    note(std::string(what) + (written ? " " : " leaves ") + name_of(cell) + ": " +
         std::to_string(before) +
         (written ? " becomes " + std::to_string(cell.value) : std::string()));
  }
  return before;
}

// Whoever comes to a word finds the stores that wait for it in other threads' buffers in memory, or
// not yet.
inline void Explorer::settle(const Cell& cell) {
  if (!options_.store_buffers) return;
  for (int id = 0; id < used_; ++id) {
    if (id == running_) continue;
    Thread& thread = at(id);
    const auto waiting =
        std::count_if(thread.buffer.begin(), thread.buffer.end(),
                      [&](const BufferedStore& store) { return store.cell == &cell; });
    for (int left = choose(static_cast<int>(waiting) + 1); left > 0; --left) {
      const auto first =
          std::find_if(thread.buffer.begin(), thread.buffer.end(),
                       [&](const BufferedStore& store) { return store.cell == &cell; });
      flush(thread, static_cast<std::size_t>(first - thread.buffer.begin()));
    }
  }
}

// A store goes to memory, after those it may not pass.
inline void Explorer::flush(Thread& thread, std::size_t entry) {
  while (entry > 0 && thread.buffer[entry].release) {
    flush(thread, 0);
    --entry;
  }
  const BufferedStore store = thread.buffer[entry];
  thread.buffer.erase(thread.buffer.begin() + static_cast<std::ptrdiff_t>(entry));
  store.cell->value = store.value;
  store.cell->released = store.released;
  if (tracing_)
    trace_.push_back(thread.name + "'s " + std::to_string(store.value) + " reaches " +
                     name_of(*store.cell));
}

inline void Explorer::flush_all(Thread& thread) {
  while (!thread.buffer.empty()) flush(thread, 0);
}

inline FutexResult Explorer::wait(const Cell& cell, std::uint64_t expected, bool has_deadline) {
  if (!in_thread()) return FutexResult::kWoken;
  point();
  settle(cell);
  Thread& thread = self();
  flush_all(thread);
  if (cell.value != expected) {
    if (tracing_)
      note("does not sleep on " + name_of(cell) + ", which holds " + std::to_string(cell.value));
    return FutexResult::kChanged;
  }
  if (tracing_) note("sleeps on " + name_of(cell));
  thread.state = State::kBlocked;
  thread.waits_on = &cell;
  thread.has_deadline = has_deadline;
  thread.result = FutexResult::kWoken;
  reschedule();
  thread.waits_on = nullptr;
  if (tracing_) note(thread.result == FutexResult::kTimedOut ? "times out" : "awakes");
  return thread.result;
}

inline void Explorer::wake(const Cell& cell, int count) {
  if (!in_thread()) return;
  point();
  flush_all(self());
  int woken = 0;
  for (; woken < count; ++woken) {
    std::array<int, kMaxThreads> asleep{};
    int found = 0;
    for (int id = 0; id < used_; ++id) {
      if (at(id).state == State::kBlocked && at(id).waits_on == &cell)
        asleep[static_cast<std::size_t>(found++)] = id;
    }
    if (found == 0) break;
    // With room for all of them the order says nothing.
    const int which = count - woken >= found ? 0 : choose(found);
    at(asleep[static_cast<std::size_t>(which)]).state = State::kReady;
  }
  if (tracing_) note("wakes " + std::to_string(woken) + " on " + name_of(cell));
}

inline void Explorer::join(int thread) {
  point();
  Thread& waiter = self();
  if (at(thread).state != State::kEnded) {
    waiter.joins = thread;
    waiter.state = State::kJoining;
    reschedule();
  }
  // The stores of an ended process are in memory before its parent hears of the end.
  flush_all(at(thread));
  join_clock(waiter.clock, at(thread).clock);
}

inline bool Explorer::weak_fails() {
  if (!in_thread() || weak_left_ == 0) return false;
  if (choose(2) == 0) return false;
  --weak_left_;
  return true;
}

inline void Explorer::access(GuardState& guard, bool writes, const char* name) {
  if (!in_thread()) return;
  Thread& thread = self();
  const auto id = static_cast<std::size_t>(thread.id);
  bool ordered = guard.writer < 0 || guard.writer == thread.id ||
                 guard.written_at <= thread.clock[static_cast<std::size_t>(guard.writer)];
  for (std::size_t i = 0; writes && i < guard.read_at.size(); ++i) {
    ordered = ordered && (i == id || guard.read_at[i] <= thread.clock[i]);
  }
  if (!ordered)
    fail(Failure::kRace, std::string("unordered ") + (writes ? "write to " : "read of ") + name);
  if (writes) {
    guard.writer = thread.id;
    guard.written_at = thread.clock[id];
  } else {
    guard.read_at[id] = thread.clock[id];
  }
}

}  // namespace simpler::model
