// Which tasks use which bytes: for each byte the last writer, and the readers since.
//
// Rules (TG-1): a read comes after the last writer; a write comes after the last writer and all
// readers since, and replaces them. Order is that of the calls. Ranges are cut where they overlap,
// so bytes that two ranges do not share order nothing. One exception keeps the cost flat: a read
// of a part of an interval with more than kManyReaders readers counts as a read of the whole.
//
// Memory: an interval lives as long as a task that was touched it is not forgotten; the size is
// bounded by the tasks remembered, not by the history.
// Complexity: O(1) for a range that starts where a recent one did, else O(log n) in the intervals
// of the region; plus the users found. Allocates nothing in a steady state.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "hierarchical/graph/ids.h"
#include "hierarchical/graph/slab.h"
#include "hierarchical/graph/spec.h"

namespace simpler::graph {

class RangeMap {
 public:
  static constexpr std::uint32_t kManyReaders = 64;

  explicit RangeMap(std::uint32_t regions) : regions_(regions) {}

  // Task `slot` makes `access`: appends to `found` the tasks that it comes after, some perhaps
  // repeatedly, and `slot` itself when its own ranges overlap.
  // REQUIRES: access.region < regions; begin <= end.
  void touch(std::uint32_t slot, const Access& access, std::vector<std::uint32_t>& found);
  // Nothing needs to come after `slot` any more; the slot may be used for another task.
  void forget(std::uint32_t slot);

  [[nodiscard]] std::uint32_t regions() const noexcept {
    return static_cast<std::uint32_t>(regions_.size());
  }
  [[nodiscard]] std::size_t interval_count() const noexcept { return interval_count_; }
  [[nodiscard]] std::size_t use_count() const noexcept { return uses_.in_use(); }

 private:
  struct Interval {
    std::uint64_t end = 0;
    std::uint32_t region = 0;
    std::uint32_t writer = kNone;   // a use
    std::uint32_t readers = kNone;  // the first of a list of uses
    std::uint32_t reader_count = 0;
  };
  using Map = std::map<std::uint64_t, Interval>;  // by the first byte; disjoint
  using Iterator = Map::iterator;

  // What one task does to one interval.
  struct Use {
    Iterator interval;
    std::uint32_t slot = kNone;
    std::uint32_t next_of_slot = kNone;
    std::uint32_t next = kNone;      // of the readers
    std::uint32_t previous = kNone;  // of the readers, or kReplaced
  };
  static constexpr std::uint32_t kReplaced = kNone - 1;

  struct Hint {
    std::uint64_t begin = 0;
    std::uint32_t region = kNone;
    Iterator interval;
  };

  Iterator first_overlap(const Access& access);
  void write(std::uint32_t slot, const Access& access, Iterator at,
             std::vector<std::uint32_t>& found);
  void read(std::uint32_t slot, const Access& access, Iterator at,
            std::vector<std::uint32_t>& found);
  void take_over(Iterator interval, std::vector<std::uint32_t>& found);
  void add_writer(Iterator interval, std::uint32_t slot);
  void add_reader(Iterator interval, std::uint32_t slot);
  std::uint32_t add_use(Iterator interval, std::uint32_t slot);
  Iterator insert(std::uint32_t region, Iterator before, std::uint64_t begin, std::uint64_t end);
  Iterator erase(Iterator interval);
  Iterator split(Iterator interval, std::uint64_t at);
  Hint& hint_of(std::uint32_t region, std::uint64_t begin) noexcept;

  std::vector<Map> regions_;
  std::vector<Map::node_type> spare_;  // nodes of erased intervals
  Slab<Use> uses_;
  std::vector<std::uint32_t> first_use_;  // by slot
  std::size_t interval_count_ = 0;
  std::array<Hint, 1024> hints_;  // of live intervals only
};

}  // namespace simpler::graph
