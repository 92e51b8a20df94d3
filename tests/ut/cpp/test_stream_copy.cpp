#include "hierarchical/base/stream_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace simpler {
namespace {

std::vector<std::byte> pattern(std::size_t nbytes, unsigned seed) {
  std::vector<std::byte> made(nbytes);
  for (std::size_t i = 0; i < nbytes; ++i)
    made[i] = static_cast<std::byte>((i * 131 + i / 251 + seed) & 0xFF);
  return made;
}

TEST(StreamCopy, EveryAlignmentAndLengthCopiesThatAndNothingElse) {
  const std::vector<std::byte> source = pattern(700, 1);
  for (const std::size_t whole : {std::size_t{0}, kStreamBytes}) {
    for (std::size_t to = 0; to < 20; ++to) {
      for (std::size_t from = 0; from < 20; from += 3) {
        for (const std::size_t nbytes : {0, 1, 15, 127, 128, 129, 143, 191, 192, 500, 640}) {
          std::vector<std::byte> target = pattern(700, 2);
          std::vector<std::byte> expected = target;
          std::copy_n(source.begin() + static_cast<std::ptrdiff_t>(from), nbytes,
                      expected.begin() + static_cast<std::ptrdiff_t>(to));
          stream_copy(target.data() + to, source.data() + from, nbytes, whole);
          ASSERT_EQ(target, expected) << to << " " << from << " " << nbytes << " " << whole;
        }
      }
    }
  }
}

TEST(StreamCopy, OverlappingRangesMoveAsMemmoveDoes) {
  for (const std::ptrdiff_t shift : {-64, -17, 0, 1, 200}) {
    std::vector<std::byte> bytes = pattern(2000, 3);
    std::vector<std::byte> expected = bytes;
    const std::vector<std::byte> before = bytes;
    std::copy_n(before.begin() + 500, 1000, expected.begin() + 500 + shift);
    stream_copy(bytes.data() + 500 + shift, bytes.data() + 500, 1000, kStreamBytes);
    EXPECT_EQ(bytes, expected) << shift;
  }
}

TEST(StreamCopy, ALargeCopyIsWhole) {
  const std::vector<std::byte> source = pattern(kStreamBytes + 333, 4);
  std::vector<std::byte> target(source.size());
  stream_copy(target.data(), source.data(), source.size(), source.size());
  EXPECT_TRUE(target == source);
}

}  // namespace
}  // namespace simpler
