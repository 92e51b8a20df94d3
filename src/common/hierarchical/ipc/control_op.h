// The only register of control codes; simpler.ControlOp in Python is generated from it.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace simpler {

// X(name, code): codes are on the wire, so they are never reused.
#define SIMPLER_CONTROL_OPS(X)                                                    \
  X(PING, 1)      /* empty reply, from any idle thread of the child, no GIL */    \
  X(ECHO, 2)      /* the payload comes back, likewise */                          \
  X(START, 3)     /* posted before the fork; the child opens its device */        \
  X(STOP, 4)      /* orderly end: on_close handlers, then the device is closed */ \
  X(EXTENSION, 5) /* arg: the extension's id */                                   \
  X(MALLOC, 6)                                                                    \
  X(FREE, 7)                                                                      \
  X(COMMITTED, 8)                                                                 \
  X(COPY_IN, 9)                                                                   \
  X(COPY_OUT, 10)                                                                 \
  X(COPY_PEER, 11)                                                                \
  X(REGISTER, 12)         /* a callable that came after init() */                 \
  X(TRANSFER, 13)         /* arg: the provider's id; lasts as long as it does */  \
  X(TRANSFER_CONTROL, 14) /* arg: the provider's id; cancel, confirm, reset */

enum class ControlOp : std::uint16_t {
#define SIMPLER_X(name, code) name = code,
  SIMPLER_CONTROL_OPS(SIMPLER_X)
#undef SIMPLER_X
};

struct ControlOpName {
  ControlOp op;
  std::string_view name;
};

inline constexpr auto kControlOps = std::to_array<ControlOpName>({
#define SIMPLER_X(name, code) {ControlOp::name, #name},
    SIMPLER_CONTROL_OPS(SIMPLER_X)
#undef SIMPLER_X
});

// "?" for a code that is not registered.
constexpr std::string_view control_op_name(std::uint16_t code) noexcept {
  for (const ControlOpName& entry : kControlOps) {
    if (static_cast<std::uint16_t>(entry.op) == code) return entry.name;
  }
  return "?";
}

}  // namespace simpler
