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

  // Levels of a vector's bytes: as many as there are fields, times width.
  void levels(const uint8_t* held, float* to) const {
    for (int j = 0; j < width; ++j) {
      if (bits != 3) {
        for (int f = 0; f < 8 / bits; ++f) to[f * width + j] = held[j] >> (bits * f) & ((1 << bits) - 1);
        continue;
      }
      const uint8_t a = held[j], b = held[width + j], c = held[2 * width + j];
      const uint8_t found[8] = {
          (uint8_t)(a & 7),      (uint8_t)(a >> 3 & 7), (uint8_t)(b & 7), (uint8_t)(b >> 3 & 7),
          (uint8_t)(c & 7),      (uint8_t)(c >> 3 & 7), (uint8_t)(a >> 6 | (c >> 5 & 4)),
          (uint8_t)(b >> 6 | (c >> 4 & 4))};
      for (int f = 0; f < 8; ++f) to[f * width + j] = found[f];
    }
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
inline float scale_of(uint8_t code) {
  const uint32_t bits = (uint32_t)(code / 16 - 8 + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return sixteenths()[code % 16] * power;
}
inline Lanes<16>::F scales_of(Lanes<16>::I codes) {
  typedef Lanes<16> X;
  const X::F table = X::load(sixteenths());
  return __builtin_shuffle(table, codes & 15) * (X::F)(((codes >> 4) - 8 + 127) << 23);
}

}  // namespace
