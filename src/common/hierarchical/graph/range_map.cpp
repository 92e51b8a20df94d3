#include "hierarchical/graph/range_map.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace simpler::graph {

void RangeMap::touch(std::uint32_t slot, const Access& access, std::vector<std::uint32_t>& found) {
  if (access.begin == access.end) return;
  if (slot >= first_use_.size()) first_use_.resize(slot + std::size_t{1}, kNone);
  const Iterator at = first_overlap(access);
  if (access.mode == Mode::kWrite) {
    write(slot, access, at, found);
  } else {
    read(slot, access, at, found);
  }
}

void RangeMap::forget(std::uint32_t slot) {
  if (slot >= first_use_.size()) return;
  std::uint32_t index = std::exchange(first_use_[slot], kNone);
  while (index != kNone) {
    const Use use = uses_[index];
    uses_.release(index);
    if (use.previous != kReplaced) {
      Interval& interval = use.interval->second;
      if (interval.writer == index) {
        interval.writer = kNone;
      } else {
        --interval.reader_count;
        if (use.next != kNone) uses_[use.next].previous = use.previous;
        if (use.previous != kNone) {
          uses_[use.previous].next = use.next;
        } else {
          interval.readers = use.next;
        }
      }
      if (interval.writer == kNone && interval.readers == kNone) erase(use.interval);
    }
    index = use.next_of_slot;
  }
}

RangeMap::Iterator RangeMap::first_overlap(const Access& access) {
  const Hint& hint = hint_of(access.region, access.begin);
  if (hint.region == access.region && hint.begin == access.begin) return hint.interval;
  Map& map = regions_[access.region];
  if (map.empty() || std::prev(map.end())->second.end <= access.begin) return map.end();
  const Iterator after = map.upper_bound(access.begin);
  if (after == map.begin()) return after;
  const Iterator before = std::prev(after);
  return before->second.end > access.begin ? before : after;
}

void RangeMap::write(std::uint32_t slot, const Access& access, Iterator at,
                     std::vector<std::uint32_t>& found) {
  const Map& map = regions_[access.region];
  if (at != map.end() && at->first == access.begin && at->second.end == access.end) {
    take_over(at, found);
    add_writer(at, slot);
    return;
  }
  if (at != map.end() && at->first < access.begin) at = split(at, access.begin);
  while (at != map.end() && at->first < access.end) {
    if (at->second.end > access.end) split(at, access.end);
    take_over(at, found);
    at = erase(at);
  }
  add_writer(insert(access.region, at, access.begin, access.end), slot);
}

void RangeMap::read(std::uint32_t slot, const Access& access, Iterator at,
                    std::vector<std::uint32_t>& found) {
  const Map& map = regions_[access.region];
  std::uint64_t done = access.begin;
  while (done < access.end) {
    if (at == map.end() || at->first > done) {
      const std::uint64_t gap_end = at == map.end() ? access.end : std::min(access.end, at->first);
      add_reader(insert(access.region, at, done, gap_end), slot);
      done = gap_end;
      continue;
    }
    const bool may_split = at->second.reader_count <= kManyReaders;
    if (at->first < done && may_split) at = split(at, done);
    if (at->second.end > access.end && may_split) split(at, access.end);
    if (at->second.writer != kNone) found.push_back(uses_[at->second.writer].slot);
    add_reader(at, slot);
    done = at->second.end;
    ++at;
  }
}

// Finds all users of `interval` and leaves it without any.
void RangeMap::take_over(Iterator interval, std::vector<std::uint32_t>& found) {
  Interval& bytes = interval->second;
  if (bytes.writer != kNone) {
    Use& use = uses_[bytes.writer];
    use.previous = kReplaced;
    found.push_back(use.slot);
  }
  for (std::uint32_t index = bytes.readers; index != kNone; index = uses_[index].next) {
    uses_[index].previous = kReplaced;
    found.push_back(uses_[index].slot);
  }
  bytes.writer = bytes.readers = kNone;
  bytes.reader_count = 0;
}

void RangeMap::add_writer(Iterator interval, std::uint32_t slot) {
  interval->second.writer = add_use(interval, slot);
}

void RangeMap::add_reader(Iterator interval, std::uint32_t slot) {
  const std::uint32_t index = add_use(interval, slot);
  Interval& bytes = interval->second;
  uses_[index].next = bytes.readers;
  if (bytes.readers != kNone) uses_[bytes.readers].previous = index;
  bytes.readers = index;
  ++bytes.reader_count;
}

std::uint32_t RangeMap::add_use(Iterator interval, std::uint32_t slot) {
  const std::uint32_t index = uses_.allocate();
  uses_[index] = {interval, slot, first_use_[slot], kNone, kNone};
  first_use_[slot] = index;
  return index;
}

RangeMap::Iterator RangeMap::insert(std::uint32_t region, Iterator before, std::uint64_t begin,
                                    std::uint64_t end) {
  Map& map = regions_[region];
  Iterator interval;
  if (spare_.empty()) {
    interval = map.emplace_hint(before, begin, Interval{end, region});
  } else {
    Map::node_type node = std::move(spare_.back());
    spare_.pop_back();
    node.key() = begin;
    node.mapped() = Interval{end, region};
    interval = map.insert(before, std::move(node));
  }
  hint_of(region, begin) = {begin, region, interval};
  ++interval_count_;
  return interval;
}

RangeMap::Iterator RangeMap::erase(Iterator interval) {
  const std::uint32_t region = interval->second.region;
  Hint& hint = hint_of(region, interval->first);
  if (hint.region == region && hint.begin == interval->first) hint.region = kNone;
  const Iterator after = std::next(interval);
  spare_.push_back(regions_[region].extract(interval));
  --interval_count_;
  return after;
}

// Cuts `interval` at a byte inside it and returns the part from there on, with the same users.
RangeMap::Iterator RangeMap::split(Iterator interval, std::uint64_t at) {
  const Iterator right =
      insert(interval->second.region, std::next(interval), at, interval->second.end);
  interval->second.end = at;
  if (interval->second.writer != kNone) add_writer(right, uses_[interval->second.writer].slot);
  for (std::uint32_t index = interval->second.readers; index != kNone; index = uses_[index].next) {
    add_reader(right, uses_[index].slot);
  }
  return right;
}

RangeMap::Hint& RangeMap::hint_of(std::uint32_t region, std::uint64_t begin) noexcept {
  // Fibonacci hashing: the high bits of the product depend on all bits of the key.
  const std::uint64_t product = (begin + (std::uint64_t{region} << 52)) * 0x9e3779b97f4a7c15U;
  return hints_[product >> 54];
}

}  // namespace simpler::graph
