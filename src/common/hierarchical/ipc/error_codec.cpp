#include "hierarchical/ipc/error_codec.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "hierarchical/base/error.h"

namespace simpler {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::uint32_t kFailureMagic = 0x4C494146;  // "FAIL"
constexpr std::uint32_t kFlagCut = 1;
constexpr std::size_t kMarkBytes = 36;  // the longest "... [N bytes cut]"

struct FailureHeader {
  std::uint32_t magic;
  std::uint32_t flags;
  std::uint32_t type_name_bytes;
  std::uint32_t message_bytes;
  std::uint32_t traceback_bytes;
};
static_assert(sizeof(FailureHeader) == 20);

bool continues_sequence(char c) { return (static_cast<unsigned char>(c) & 0xC0U) == 0x80U; }

// The nearest position at or before `position` (after, for +1) that is not inside a UTF-8 sequence;
// `position` itself where the bytes around it are not UTF-8 anyway.
std::size_t sequence_start(std::string_view text, std::size_t position, int direction) {
  std::size_t at = position;
  for (int step = 0; step < 4; ++step) {
    if (at == 0 || at >= text.size() || !continues_sequence(text[at])) return at;
    at = direction > 0 ? at + 1 : at - 1;
  }
  return position;
}

std::string mark(std::size_t cut_bytes) {
  return "... [" + std::to_string(cut_bytes) + " bytes cut]";
}

std::string keep_head(std::string_view text, std::size_t max_bytes) {
  if (text.size() <= max_bytes) return std::string(text);
  if (max_bytes < kMarkBytes)
    return std::string(text.substr(0, sequence_start(text, max_bytes, -1)));
  const std::size_t kept = sequence_start(text, max_bytes - kMarkBytes, -1);
  return std::string(text.substr(0, kept)) + mark(text.size() - kept);
}

std::string keep_tail(std::string_view text, std::size_t max_bytes) {
  if (text.size() <= max_bytes) return std::string(text);
  if (max_bytes < kMarkBytes)
    return std::string(text.substr(sequence_start(text, text.size() - max_bytes, +1)));
  const std::size_t first = sequence_start(text, text.size() - (max_bytes - kMarkBytes), +1);
  return mark(first) + std::string(text.substr(first));
}

RemoteFailure fit(const RemoteFailure& failure, std::size_t budget) {
  RemoteFailure fitted;
  fitted.cut = true;
  const std::size_t traceback_least = std::min({failure.traceback.size(), kMarkBytes, budget});
  const std::size_t message_least =
      std::min({failure.message.size(), kMarkBytes, budget - traceback_least});
  fitted.type_name = keep_head(failure.type_name, budget - traceback_least - message_least);
  budget -= fitted.type_name.size();
  fitted.message = keep_head(failure.message, budget - traceback_least);
  budget -= fitted.message.size();
  fitted.traceback = keep_tail(failure.traceback, budget);
  return fitted;
}

std::vector<std::byte> pack(const RemoteFailure& failure) {
  const FailureHeader header{kFailureMagic, failure.cut ? kFlagCut : 0,
                             static_cast<std::uint32_t>(failure.type_name.size()),
                             static_cast<std::uint32_t>(failure.message.size()),
                             static_cast<std::uint32_t>(failure.traceback.size())};
  std::vector<std::byte> wire(sizeof header + failure.type_name.size() + failure.message.size() +
                              failure.traceback.size());
  std::memcpy(wire.data(), &header, sizeof header);
  std::byte* to = wire.data() + sizeof header;
  for (const std::string* text : {&failure.type_name, &failure.message, &failure.traceback}) {
    if (!text->empty()) std::memcpy(to, text->data(), text->size());
    to += text->size();
  }
  return wire;
}

}  // namespace

std::vector<std::byte> encode_failure(const RemoteFailure& failure, std::size_t max_bytes) {
  if (max_bytes < kLeastFailureBytes || max_bytes > UINT32_MAX) {
    throw Error(ErrorCode::kInvalidArgument,
                "a failure cannot be encoded in " + std::to_string(max_bytes) + " bytes");
  }
  const std::size_t budget = max_bytes - sizeof(FailureHeader);
  const std::size_t needed =
      failure.type_name.size() + failure.message.size() + failure.traceback.size();
  return needed <= budget ? pack(failure) : pack(fit(failure, budget));
}

RemoteFailure decode_failure(std::span<const std::byte> wire) {
  FailureHeader header{};
  if (wire.size() < sizeof header)
    throw Error(ErrorCode::kProtocol, "an encoded failure is shorter than its header");
  std::memcpy(&header, wire.data(), sizeof header);
  const std::uint64_t needed = sizeof header + std::uint64_t{header.type_name_bytes} +
                               header.message_bytes + header.traceback_bytes;
  if (header.magic != kFailureMagic || (header.flags & ~kFlagCut) != 0 || needed != wire.size()) {
    throw Error(ErrorCode::kProtocol,
                "an encoded failure of " + std::to_string(wire.size()) + " bytes is malformed");
  }
  const char* from = reinterpret_cast<const char*>(wire.data()) + sizeof header;
  RemoteFailure failure;
  failure.type_name.assign(from, header.type_name_bytes);
  from += header.type_name_bytes;
  failure.message.assign(from, header.message_bytes);
  from += header.message_bytes;
  failure.traceback.assign(from, header.traceback_bytes);
  failure.cut = (header.flags & kFlagCut) != 0;
  return failure;
}

}  // namespace simpler
