// How an exception of a child travels: type name, message, traceback text.
//
// Wire form (little endian): u32 magic, u32 flags (bit 0: cut), three u32 lengths, the three byte
// strings. The strings are UTF-8 with whatever bytes the child produced; the reader must not trust
// them.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace simpler {

struct RemoteFailure {
  std::string type_name;
  std::string message;
  std::string traceback;
  bool cut = false;  // longer than kMaxFailureBytes, so message or traceback lost its tail
  bool operator==(const RemoteFailure&) const = default;
};

inline constexpr std::size_t kMaxFailureBytes = std::size_t{1} << 20;  // CP-5
inline constexpr std::size_t kLeastFailureBytes = 128;  // the header and the three marks of a cut

// At most `max_bytes` long in all: the traceback's head goes first, then the message's tail, last
// the type name's; what was cut says so inside the text ("... [12345 bytes cut]"). Cuts never split
// a UTF-8 sequence. Throws Error{kInvalidArgument} for a `max_bytes` below kLeastFailureBytes or
// beyond 32 bits.
std::vector<std::byte> encode_failure(const RemoteFailure& failure,
                                      std::size_t max_bytes = kMaxFailureBytes);

// Throws Error{kProtocol} on anything that is not exactly one encoded failure.
RemoteFailure decode_failure(std::span<const std::byte> wire);

}  // namespace simpler
