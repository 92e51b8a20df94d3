// std::atomic's part in a model: hand ModelAtom to a protocol as its Atom parameter.
//
// futex_wait and futex_wake on a ModelAtom are found by argument-dependent lookup.
#pragma once

#include <atomic>
#include <cstdint>

#include "hierarchical/os/futex.h"
#include "model/explorer.h"

namespace simpler::model {

template <typename T>
class ModelAtom {
  static_assert(std::is_integral_v<T>);

 public:
  ModelAtom() noexcept = default;
  explicit ModelAtom(T value) noexcept : cell_{static_cast<std::uint64_t>(value), {}, nullptr} {}
  ~ModelAtom() = default;
  ModelAtom(const ModelAtom&) = delete;
  ModelAtom& operator=(const ModelAtom&) = delete;

  // For reports; a string that lives as long.
  void label(const char* name) { cell_.name = name; }

  T load(std::memory_order order = std::memory_order_seq_cst) const {
    return active == nullptr ? static_cast<T>(cell_.value)
                             : static_cast<T>(active->load(cell_, order));
  }
  void store(T value, std::memory_order order = std::memory_order_seq_cst) {
    if (active == nullptr) {
      cell_.value = static_cast<std::uint64_t>(value);
    } else {
      active->store(cell_, static_cast<std::uint64_t>(value), order);
    }
  }
  T exchange(T value, std::memory_order order = std::memory_order_seq_cst) {
    return modify(order, "exchange of", [=](T) { return value; });
  }
  T fetch_add(T more, std::memory_order order = std::memory_order_seq_cst) {
    return modify(order, "add to", [=](T old) { return static_cast<T>(old + more); });
  }
  T fetch_sub(T less, std::memory_order order = std::memory_order_seq_cst) {
    return modify(order, "subtract from", [=](T old) { return static_cast<T>(old - less); });
  }
  T fetch_or(T bits, std::memory_order order = std::memory_order_seq_cst) {
    return modify(order, "or into", [=](T old) { return static_cast<T>(old | bits); });
  }
  T fetch_and(T bits, std::memory_order order = std::memory_order_seq_cst) {
    return modify(order, "and into", [=](T old) { return static_cast<T>(old & bits); });
  }
  bool compare_exchange_strong(T& expected, T desired,
                               std::memory_order order = std::memory_order_seq_cst) {
    const T before =
        static_cast<T>(active->modify(cell_, order, "swap of", [&](std::uint64_t& value) {
          if (static_cast<T>(value) != expected) return false;
          value = static_cast<std::uint64_t>(desired);
          return true;
        }));
    if (before == expected) return true;
    expected = before;
    return false;
  }
  bool compare_exchange_strong(T& expected, T desired, std::memory_order success,
                               std::memory_order failure) {
    (void)failure;  // never stronger than `success` in these protocols
    return compare_exchange_strong(expected, desired, success);
  }
  bool compare_exchange_weak(T& expected, T desired,
                             std::memory_order order = std::memory_order_seq_cst) {
    if (active->weak_fails()) {
      expected = load(std::memory_order_relaxed);
      return false;
    }
    return compare_exchange_strong(expected, desired, order);
  }
  bool compare_exchange_weak(T& expected, T desired, std::memory_order success,
                             std::memory_order failure) {
    (void)failure;
    return compare_exchange_weak(expected, desired, success);
  }

  friend FutexResult futex_wait(const ModelAtom& word, T expected, Deadline deadline) {
    return active->wait(word.cell_, static_cast<std::uint64_t>(expected), !deadline.is_never());
  }
  friend void futex_wake(const ModelAtom& word, int count) { active->wake(word.cell_, count); }

 private:
  template <typename Change>
  T modify(std::memory_order order, const char* what, Change change) {
    return static_cast<T>(active->modify(cell_, order, what, [&](std::uint64_t& value) {
      value = static_cast<std::uint64_t>(change(static_cast<T>(value)));
      return true;
    }));
  }

  Cell cell_;
};

// Stands for plain memory: the test says when the thread that runs reads or writes it. With real
// threads this does nothing, ThreadSanitizer watches the memory itself.
class Guarded {
 public:
  explicit Guarded(const char* name = "plain memory") : name_(name) {}
  void read() {
    if (active != nullptr) active->access(state_, false, name_);
  }
  void write() {
    if (active != nullptr) active->access(state_, true, name_);
  }

 private:
  GuardState state_;
  const char* name_;
};

}  // namespace simpler::model
