#include "hierarchical/workers/replies.h"

#include <new>
#include <string>

#include "hierarchical/base/error.h"

namespace simpler {

std::span<const std::byte> take_reply(ChildProcess& child, int slot) {
  try {
    const ReplyView reply = child.control.read_reply(slot);
    switch (reply.status) {
      case ReplyStatus::kOk:
        return reply.bytes;
      case ReplyStatus::kFailure: {
        // A private copy first: the child could change the bytes while they are decoded.
        const std::vector<std::byte> wire(reply.bytes.begin(), reply.bytes.end());
        throw CallError(child.index, decode_failure(wire));
      }
      case ReplyStatus::kNoReplySpace:
        throw CallError(CallError::Kind::kBackPressure, child.index,
                        "the reply arena of " + child.describe() +
                            " stayed full until the deadline; enlarge max_control_payload");
      case ReplyStatus::kTooLarge:
        throw CallError(
            child.index,
            RemoteFailure{"ValueError", "the reply exceeds max_control_payload", "", false});
    }
    throw Error(ErrorCode::kProtocol, "unknown reply status");
  } catch (const Error& error) {
    child.control.release(slot);
    throw CallError(CallError::Kind::kProtocol, child.index,
                    child.describe() + ": " + error.what());
  } catch (...) {
    child.control.release(slot);
    throw;
  }
}

std::vector<std::byte> take_reply_copy(ChildProcess& child, int slot) {
  const std::span<const std::byte> reply = take_reply(child, slot);
  std::vector<std::byte> bytes;
  try {
    bytes.assign(reply.begin(), reply.end());
  } catch (const std::bad_alloc&) {
    child.control.release(slot);
    throw CallError(child.index, RemoteFailure{"MemoryError",
                                               "no memory for a reply of " +
                                                   std::to_string(reply.size()) + " bytes",
                                               "", false});
  }
  child.control.release(slot);
  return bytes;
}

}  // namespace simpler
