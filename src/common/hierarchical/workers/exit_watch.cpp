#include "hierarchical/workers/exit_watch.h"

#include <system_error>

#include "hierarchical/os/thread.h"

namespace simpler {

namespace {

// Returns from sleep in a row that nothing explains: only a child that plays with its word causes
// them.
constexpr int kPatience = 1000;

}  // namespace

void ExitWatch::watch(const Child& child) {
  const std::lock_guard lock(mutex_);
  watched_.push_back({child});
}

void ExitWatch::start() {
  {
    const std::lock_guard lock(mutex_);
    if (quitting_.load(std::memory_order_seq_cst)) return;
    if (!thread_.joinable()) {
      try {
        thread_ = start_quiet_thread("simpler-exits", [this] { run(); });
      } catch (const std::system_error&) {
        return;  // no more threads may be: the pidfds tell
      }
      return;
    }
  }
  change();
}

bool ExitWatch::forget(int index) {
  const std::lock_guard telling(telling_);
  const std::lock_guard lock(mutex_);
  bool told = false;
  std::erase_if(watched_, [&](const Watched& watched) {
    if (watched.child.index != index) return false;
    told = told || watched.is_told;
    return true;
  });
  return told;
}

void ExitWatch::change() noexcept {
  changes_.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(changes_, 1);
}

void ExitWatch::quit() noexcept {
  if (!quitting_.exchange(true, std::memory_order_seq_cst)) change();
}

void ExitWatch::stop() {
  quit();
  std::thread ending;
  {
    const std::lock_guard lock(mutex_);
    ending = std::move(thread_);
  }
  if (ending.joinable()) ending.join();
}

// The words to sleep on, and the children whose word is no longer what it was.
std::vector<ExitWatch::Child> ExitWatch::look(std::vector<FutexExpectation>& words) {
  std::vector<Child> changed;
  const std::lock_guard lock(mutex_);
  words.assign(1, {&changes_, changes_.load(std::memory_order_seq_cst)});
  for (Watched& watched : watched_) {
    if (!watched.is_watched) continue;
    const LifeMark& life = *watched.child.life;
    if (watched.armed == 0) {
      watched.armed = watched.child.life->arm(watched.child.pid).value_or(0);
      if (watched.armed == 0 && !life.says_ended()) continue;  // not held yet
    }
    if (watched.armed != 0 && life.word().load(std::memory_order_seq_cst) == watched.armed) {
      if (words.size() <= kWatched) words.push_back({&life.word(), watched.armed});
      continue;
    }
    watched.is_watched = false;
    if (life.says_ended()) changed.push_back(watched.child);
  }
  return changed;
}

void ExitWatch::ask(const Child& child) {
  const std::lock_guard telling(telling_);
  const auto find = [&]() -> Watched* {  // REQUIRES: mutex_ held
    for (Watched& watched : watched_) {
      if (watched.child.index == child.index && watched.child.pid == child.pid) return &watched;
    }
    return nullptr;
  };
  {
    const std::lock_guard lock(mutex_);
    if (find() == nullptr) return;  // forgotten meanwhile
  }
  const bool told = tell_(child);
  const std::lock_guard lock(mutex_);
  find()->is_told = told;  // there still: forget() waits for telling_
}

// The kernel changes a word before it wakes anybody: this was not the kernel.
void ExitWatch::ignore_woken(const std::atomic<std::uint32_t>* word) {
  const std::lock_guard lock(mutex_);
  for (Watched& watched : watched_) {
    if (&watched.child.life->word() == word &&
        word->load(std::memory_order_seq_cst) == watched.armed)
      watched.is_watched = false;
  }
}

void ExitWatch::run() {
  ask_for_short_slices();
  std::vector<FutexExpectation> words;
  for (int surprises = 0; surprises < kPatience; ++surprises) {
    const std::vector<Child> changed = look(words);
    if (quitting_.load(std::memory_order_seq_cst)) return;
    for (const Child& child : changed) ask(child);
    if (!changed.empty()) surprises = 0;
    const FutexAny woken = futex_wait_any(words);
    if (woken.kind == FutexAny::Kind::kUnsupported) return;
    if (woken.kind != FutexAny::Kind::kWoken) continue;
    if (woken.position == 0) {
      surprises = 0;
    } else {
      ignore_woken(words[woken.position].word);
    }
  }
}

}  // namespace simpler
