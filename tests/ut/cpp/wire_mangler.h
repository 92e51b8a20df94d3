// Every way that a short wire can be damaged a little.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include <gtest/gtest.h>

#include "hierarchical/base/error.h"

namespace simpler::testing {

// Gives `decode` all truncations of `wire`, all single-bit and whole-byte flips and one extra byte,
// each in an allocation of its own size so that a sanitizer sees a read beyond it. Anything but
// success or Error{kProtocol} fails the test; so does success with bytes missing or added.
inline void expect_no_damage_gets_through(
    const std::vector<std::byte>& wire,
    const std::function<void(std::span<const std::byte>)>& decode) {
  const auto accepts = [&decode](const std::vector<std::byte>& damaged) {
    try {
      decode(damaged);
      return true;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kProtocol) << error.what();
      return false;
    }
  };
  EXPECT_TRUE(accepts(wire));
  for (std::size_t size = 0; size < wire.size(); ++size) {
    EXPECT_FALSE(accepts({wire.begin(), wire.begin() + static_cast<std::ptrdiff_t>(size)}))
        << size << " bytes";
  }
  std::vector<std::byte> longer = wire;
  longer.push_back(std::byte{0});
  EXPECT_FALSE(accepts(longer));
  for (std::size_t at = 0; at < wire.size(); ++at) {
    for (const unsigned mask : {0x01U, 0x02U, 0x04U, 0x08U, 0x10U, 0x20U, 0x40U, 0x80U, 0xFFU}) {
      std::vector<std::byte> flipped = wire;
      flipped[at] ^= static_cast<std::byte>(mask);
      accepts(flipped);
    }
  }
}

}  // namespace simpler::testing
