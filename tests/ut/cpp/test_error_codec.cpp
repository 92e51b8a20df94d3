#include "hierarchical/ipc/error_codec.h"

#include <string>

#include <gtest/gtest.h>

#include "hierarchical/base/error.h"
#include "wire_mangler.h"

namespace simpler {
namespace {

std::string repeat(const std::string& text, std::size_t count) {
  std::string out;
  for (std::size_t i = 0; i < count; ++i) out += text;
  return out;
}

bool is_utf8(const std::string& text) {
  for (std::size_t at = 0; at < text.size();) {
    const auto lead = static_cast<unsigned char>(text[at]);
    const std::size_t length = lead < 0x80    ? 1
                               : lead >= 0xF0 ? 4
                               : lead >= 0xE0 ? 3
                               : lead >= 0xC0 ? 2
                                              : 0;
    if (length == 0 || at + length > text.size()) return false;
    for (std::size_t i = 1; i < length; ++i) {
      if ((static_cast<unsigned char>(text[at + i]) & 0xC0U) != 0x80U) return false;
    }
    at += length;
  }
  return true;
}

TEST(ErrorCodec, CP5_AFailureArrivesWhole) {
  const RemoteFailure failure{"ValueError", std::string(10'240, 'm') + std::string("\0\xff", 2),
                              "Traceback ...", false};
  EXPECT_EQ(decode_failure(encode_failure(failure)), failure);
  EXPECT_EQ(decode_failure(encode_failure({})), RemoteFailure{});
}

TEST(ErrorCodec, CP5_ExactlyTheLimitIsNotCut) {
  RemoteFailure failure{"E", "message", "", false};
  failure.traceback.assign(kMaxFailureBytes - encode_failure(failure).size(), 't');
  EXPECT_EQ(encode_failure(failure).size(), kMaxFailureBytes);
  EXPECT_EQ(decode_failure(encode_failure(failure)), failure);
  failure.traceback += 't';
  EXPECT_TRUE(decode_failure(encode_failure(failure)).cut);
}

TEST(ErrorCodec, CP5_TheTracebacksHeadGoesFirst) {
  const RemoteFailure failure{"ValueError", "the message", std::string(5'000, 'h') + "the end",
                              false};
  const RemoteFailure got = decode_failure(encode_failure(failure, 1'000));
  EXPECT_TRUE(got.cut);
  EXPECT_EQ(got.type_name, "ValueError");
  EXPECT_EQ(got.message, "the message");
  EXPECT_TRUE(got.traceback.starts_with("... [")) << got.traceback;
  EXPECT_TRUE(got.traceback.ends_with("the end"));
  const std::size_t kept = got.traceback.size() - got.traceback.find(']') - 1;
  EXPECT_NE(
      got.traceback.find("[" + std::to_string(failure.traceback.size() - kept) + " bytes cut]"),
      std::string::npos);
}

TEST(ErrorCodec, CP5_ThenTheMessagesTail) {
  const RemoteFailure failure{"ValueError", "the start" + std::string(5'000, 'm'),
                              std::string(5'000, 't'), false};
  const std::vector<std::byte> wire = encode_failure(failure, 1'000);
  const RemoteFailure got = decode_failure(wire);
  EXPECT_LE(wire.size(), 1'000U);
  EXPECT_GE(wire.size(), 900U);
  EXPECT_TRUE(got.message.starts_with("the start"));
  EXPECT_TRUE(got.message.ends_with(" bytes cut]"));
  EXPECT_GE(got.message.size(), 850U);
  EXPECT_TRUE(got.traceback.starts_with("... [49")) << got.traceback;
}

TEST(ErrorCodec, CP5_CutsNeverSplitASequence) {
  for (std::size_t shift = 0; shift < 8; ++shift) {
    const std::string text =
        std::string(shift, 'a') + repeat("\xE2\x82\xAC\xF0\x9F\x99\x82\xC3\xA9", 400);
    for (const std::size_t limit : {300U, 301U, 302U, 303U, 5'000U}) {
      const RemoteFailure got = decode_failure(encode_failure({"E", text, text, false}, limit));
      EXPECT_TRUE(got.cut);
      EXPECT_TRUE(is_utf8(got.message)) << shift << ' ' << limit;
      EXPECT_TRUE(is_utf8(got.traceback)) << shift << ' ' << limit;
    }
  }
}

TEST(ErrorCodec, BytesThatAreNoTextAreCutAnyhow) {
  const std::string bytes(3'000, '\x80');
  const std::vector<std::byte> wire =
      encode_failure({bytes, bytes, bytes, false}, kLeastFailureBytes);
  EXPECT_LE(wire.size(), kLeastFailureBytes);
  const RemoteFailure got = decode_failure(wire);
  for (const std::string* text : {&got.type_name, &got.message, &got.traceback}) {
    EXPECT_NE(text->find("bytes cut]"), std::string::npos) << *text;
  }
}

TEST(ErrorCodec, TooLittleRoomIsTheCallersMistake) {
  EXPECT_THROW(encode_failure({}, kLeastFailureBytes - 1), Error);
}

TEST(ErrorCodec, DamagedWiresNeverDecodeBeyondTheirBytes) {
  testing::expect_no_damage_gets_through(
      encode_failure({"ValueError", "bad", "Traceback", true}),
      [](std::span<const std::byte> wire) { decode_failure(wire); });
}

}  // namespace
}  // namespace simpler
