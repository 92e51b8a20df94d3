// Storage by index that is reused and never shrinks, so that a steady state allocates nothing.
//
// References are valid until the next allocate().
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "hierarchical/graph/ids.h"

namespace simpler::graph {

template <typename T>
class Slab {
 public:
  // An item with the value it had when it was released, or a new one.
  std::uint32_t allocate() {
    if (free_.empty()) {
      items_.emplace_back();
      return static_cast<std::uint32_t>(items_.size() - 1);
    }
    const std::uint32_t index = free_.back();
    free_.pop_back();
    return index;
  }
  void release(std::uint32_t index) { free_.push_back(index); }

  T& operator[](std::uint32_t index) noexcept { return items_[index]; }
  const T& operator[](std::uint32_t index) const noexcept { return items_[index]; }

  void reserve(std::size_t items) {
    items_.reserve(items);
    free_.reserve(items);
  }
  // Slots that exist, in use or not.
  [[nodiscard]] std::uint32_t slots() const noexcept {
    return static_cast<std::uint32_t>(items_.size());
  }
  [[nodiscard]] std::size_t in_use() const noexcept { return items_.size() - free_.size(); }

 private:
  std::vector<T> items_;
  std::vector<std::uint32_t> free_;
};

// A slab whose items are named by an Id. T has a member `std::uint32_t generation = 0`.
template <typename T>
class Table {
 public:
  // An item in its default state.
  std::uint32_t allocate() {
    const std::uint32_t slot = slab_.allocate();
    const std::uint32_t generation = slab_[slot].generation + 1;
    slab_[slot] = T{};
    slab_[slot].generation = generation;
    return slot;
  }
  void release(std::uint32_t slot) {
    ++slab_[slot].generation;
    slab_.release(slot);
  }

  T& operator[](std::uint32_t slot) noexcept { return slab_[slot]; }
  const T& operator[](std::uint32_t slot) const noexcept { return slab_[slot]; }

  // nullptr when `id` names nothing (any more).
  T* find(Id<T> id) noexcept {
    if (id.slot >= slab_.slots() || (id.generation & 1) == 0) return nullptr;
    T& item = slab_[id.slot];
    return item.generation == id.generation ? &item : nullptr;
  }
  [[nodiscard]] Id<T> id_of(std::uint32_t slot) const noexcept {
    return {slot, slab_[slot].generation};
  }
  [[nodiscard]] bool is_used(std::uint32_t slot) const noexcept {
    return (slab_[slot].generation & 1) != 0;
  }

  void reserve(std::size_t items) { slab_.reserve(items); }
  [[nodiscard]] std::uint32_t slots() const noexcept { return slab_.slots(); }
  [[nodiscard]] std::size_t in_use() const noexcept { return slab_.in_use(); }

 private:
  Slab<T> slab_;
};

}  // namespace simpler::graph
