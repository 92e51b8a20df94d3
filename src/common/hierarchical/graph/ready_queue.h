// The tasks that are ready for one place, the highest priority first, then the earliest submitted.
//
// Tasks mostly become ready in order, so pushing and popping are O(1) then, else O(log n).
// An entry whose task has gone is not looked for: forget_one() counts it, and it is left out when
// it comes to the front, or when half of the entries have gone.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace simpler::graph {

// Orders ready tasks, and names one of them: no two are equal. Smaller goes first.
using ReadyKey = std::uint64_t;

inline constexpr ReadyKey ready_key(std::int16_t priority, std::uint64_t submission) noexcept {
  const auto rank = static_cast<std::uint64_t>(INT16_MAX - std::int32_t{priority});
  return (rank << 48) | submission;  // 2^48 submissions: years
}

inline constexpr std::uint64_t submission_of(ReadyKey key) noexcept { return key << 16 >> 16; }

class ReadyQueue {
 public:
  struct Entry {
    ReadyKey key = 0;
    std::uint32_t slot = 0;
    friend bool operator>(const Entry& a, const Entry& b) noexcept { return a.key > b.key; }
  };

  void push(const Entry& entry) {
    if (in_order_.size() == begin_ || entry.key > in_order_.back().key) {
      in_order_.push_back(entry);
    } else {
      heap_.push_back(entry);
      std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
    }
  }
  [[nodiscard]] bool empty() const noexcept { return in_order_.size() == begin_ && heap_.empty(); }
  [[nodiscard]] std::size_t size() const noexcept {
    return in_order_.size() - begin_ + heap_.size();
  }

  // The first entry for which `is_current` holds; those before it are dropped. nullptr if none.
  template <typename IsCurrent>
  const Entry* front(IsCurrent is_current) {
    while (!empty()) {
      const Entry& first = is_heap_first() ? heap_.front() : in_order_[begin_];
      if (is_current(first)) return &first;
      pop();
      if (gone_ != 0) --gone_;
    }
    return nullptr;
  }

  // REQUIRES: !empty().
  void pop() {
    if (is_heap_first()) {
      std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
      heap_.pop_back();
    } else if (++begin_; begin_ == in_order_.size()) {
      in_order_.clear();
      begin_ = 0;
    } else if (begin_ >= kSlack && begin_ * 2 >= in_order_.size()) {
      in_order_.erase(in_order_.begin(), in_order_.begin() + static_cast<std::ptrdiff_t>(begin_));
      begin_ = 0;
    }
  }

  // The task of one entry has gone, so `is_current` does not hold for it any more.
  template <typename IsCurrent>
  void forget_one(IsCurrent is_current) {
    ++gone_;
    if (gone_ < kSlack || gone_ * 2 < size()) return;
    const auto is_gone = [&](const Entry& entry) { return !is_current(entry); };
    in_order_.erase(in_order_.begin(), in_order_.begin() + static_cast<std::ptrdiff_t>(begin_));
    begin_ = 0;
    std::erase_if(in_order_, is_gone);
    std::erase_if(heap_, is_gone);
    std::make_heap(heap_.begin(), heap_.end(), std::greater<>());
    gone_ = 0;
  }

 private:
  static constexpr std::size_t kSlack = 64;

  [[nodiscard]] bool is_heap_first() const noexcept {
    if (heap_.empty()) return false;
    return in_order_.size() == begin_ || in_order_[begin_] > heap_.front();
  }

  std::vector<Entry> in_order_;  // ascending, from begin_ on
  std::size_t begin_ = 0;
  std::vector<Entry> heap_;  // what came out of order
  std::size_t gone_ = 0;
};

}  // namespace simpler::graph
