// Panels: kWidth outputs of a weight side by side, and what products with them have in common.

#pragma once

#include "lanes.h"
#include "tiles.h"

namespace {

constexpr int kVectors = kMaxLanes == 16 ? 4 : 2;  // of a panel's row
constexpr int kWidth = kVectors * kMaxLanes;
static_assert(kMaxLanes < 16 || kWidth == kTileWidth, "tiles multiply panels of this width");

typedef Lanes<kMaxLanes> X;
typedef X::F F;
typedef X::U U;

// bfloat16 is taken two numbers a lane.
inline F weights_at(const float* at) { return X::load(at); }
inline U weights_at(const bf16* at) {
  U pairs;
  std::memcpy(&pairs, at, sizeof pairs);
  return pairs;
}
inline F in_all_lanes(const float* at) { return F{} + *at; }
inline U in_all_lanes(const bf16* at) {
  uint32_t pair;
  std::memcpy(&pair, at, sizeof pair);
  return U{} + pair;
}
inline F add_product(F sum, F weights, F x) { return sum + weights * x; }
inline F add_product(F sum, U weights, U x) {
#if defined(__AVX512BF16__)
  return (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)x);
#else
  sum += (F)(weights << 16) * (F)(x << 16);
  return sum + (F)(weights & 0xffff0000u) * (F)(x & 0xffff0000u);
#endif
}

}  // namespace
