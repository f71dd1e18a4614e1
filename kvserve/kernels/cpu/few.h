// The form of entries in few bits (few_bits.py): strips of bytes in tiles of 16 entries, and codes.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "lanes.h"

namespace {

// How the levels of a vector stand in its bytes.
struct Strips {
  int bits, count, width;  // strips, and bytes of each

  Strips(int bits, int dim)
      : bits(bits), count(bits == 3 ? 3 : 1), width((dim + 4 * fields(bits) - 1) / (4 * fields(bits)) * 4) {}

  static int fields(int bits) { return bits == 3 ? 8 : 8 / bits; }
  int bytes() const { return count * width; }

  // Where byte `byte` of entry `entry` is, from the first strip of the tile's keys (or values) on.
  int place(int byte, int entry, bool keys) const {
    const int strip = byte / width, at = byte % width;
    return strip * 16 * width + (keys ? at / 4 * 64 + entry * 4 + at % 4
                                      : entry / 4 * 4 * width + at * 4 + entry % 4);
  }
};

// 2 ** (j / 16).
struct Sixteenths {
  alignas(64) float of[16];
  Sixteenths() {
    for (int j = 0; j < 16; ++j) of[j] = (float)std::exp2(j / 16.0);
  }
};
inline const float* sixteenths() {
  static const Sixteenths table;
  return table.of;
}

// What codes stand for.
inline Lanes<16>::F scales_of(Lanes<16>::I codes) {
  typedef Lanes<16> X;
  const X::F table = X::load(sixteenths());
  return __builtin_shuffle(table, codes & 15) * (X::F)(((codes >> 4) - 8 + 127) << 23);
}

}  // namespace
