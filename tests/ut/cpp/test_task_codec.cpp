#include "hierarchical/ipc/task_codec.h"

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include <gtest/gtest.h>

#include "hierarchical/base/error.h"
#include "simpler/kernel.h"
#include "wire_mangler.h"

namespace simpler {
namespace {

TensorArg matrix() { return {0x1000, 96, {2, 3, 4}, {48, 16, 4}, SIMPLER_FLOAT32, SIMPLER_INOUT}; }

ErrorCode code_of(const std::vector<TaskItem>& items) {
  try {
    encode_task(items);
  } catch (const Error& error) {
    return error.code();
  }
  ADD_FAILURE() << "was encoded";
  return ErrorCode::kSystem;
}

TEST(TaskCodec, ItemsComeBackInOrder) {
  const TensorArg scalar_tensor{0xFFFF'FFFF'FFFF'F000, 4, {}, {}, SIMPLER_INT32, SIMPLER_IN};
  const TensorArg backwards{0x2000, 8, {8}, {-1}, SIMPLER_UINT8, SIMPLER_NO_DEP};
  const std::vector<TaskItem> items{
      matrix(), true,  std::int64_t{-7}, scalar_tensor,
      2.5,      false, backwards,        std::numeric_limits<std::int64_t>::min()};
  const std::vector<std::byte> wire = encode_task(items);
  EXPECT_EQ(decode_task(wire), items);
  EXPECT_EQ(wire.size() % 8, 0U);
}

TEST(TaskCodec, NoItemsAreATaskToo) { EXPECT_TRUE(decode_task(encode_task({})).empty()); }

TEST(TaskCodec, DoublesKeepEveryBit) {
  const double strange = std::bit_cast<double>(0x7FF8'0000'DEAD'BEEFULL);
  for (const double value : {strange, -0.0, std::numeric_limits<double>::infinity(), 5e-324}) {
    const std::vector<TaskItem> got = decode_task(encode_task(std::vector<TaskItem>{value}));
    EXPECT_EQ(std::bit_cast<std::uint64_t>(std::get<double>(got[0])),
              std::bit_cast<std::uint64_t>(value));
  }
}

TEST(TaskCodec, TheLimitsAreReachedButNotPassed) {
  TensorArg deep = matrix();
  deep.shape.assign(kMaxDims, 1);
  deep.strides.assign(kMaxDims, 4);
  EXPECT_EQ(decode_task(encode_task(std::vector<TaskItem>{deep})), std::vector<TaskItem>{deep});
  deep.shape.push_back(1);
  deep.strides.push_back(4);
  EXPECT_EQ(code_of({deep}), ErrorCode::kInvalidArgument);
  std::vector<TaskItem> many(kMaxTaskItems, true);
  EXPECT_EQ(decode_task(encode_task(many)).size(), kMaxTaskItems);
  many.emplace_back(false);
  EXPECT_EQ(code_of(many), ErrorCode::kInvalidArgument);
}

TEST(TaskCodec, TensorsThatMakeNoSenseAreNotEncoded) {
  const auto refused = [](void (*spoil)(TensorArg&)) {
    TensorArg tensor = matrix();
    spoil(tensor);
    return code_of({tensor}) == ErrorCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused([](TensorArg& t) { t.strides.pop_back(); }));
  EXPECT_TRUE(refused([](TensorArg& t) { t.shape[1] = -1; }));
  EXPECT_TRUE(refused([](TensorArg& t) { t.nbytes = -1; }));
  EXPECT_TRUE(refused([](TensorArg& t) { t.address = UINT64_MAX; }));
  EXPECT_TRUE(refused([](TensorArg& t) { t.dtype = 17; }));
  EXPECT_TRUE(refused([](TensorArg& t) { t.tag = 0; }));
}

TEST(TaskCodec, DamagedWiresNeverDecodeBeyondTheirBytes) {
  const std::vector<TaskItem> items{matrix(), true, std::int64_t{1}, 0.5};
  testing::expect_no_damage_gets_through(
      encode_task(items), [](std::span<const std::byte> wire) { decode_task(wire); });
}

TEST(TaskCodec, RandomBytesAfterAValidHeaderNeverCrash) {
  std::mt19937 random(7);
  const std::vector<TaskItem> items{matrix(), 0.5};
  const std::vector<std::byte> valid = encode_task(items);
  for (int round = 0; round < 20'000; ++round) {
    std::vector<std::byte> wire = valid;
    for (int change = 0; change < 4; ++change)
      wire[8 + random() % (wire.size() - 8)] = static_cast<std::byte>(random());
    try {
      decode_task(wire);
    } catch (const Error& error) {
      ASSERT_EQ(error.code(), ErrorCode::kProtocol);
    }
  }
}

}  // namespace
}  // namespace simpler
