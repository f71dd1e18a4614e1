// Products of bfloat16 on AMX's tiles: up to 16 rows of x with the 64 outputs of a panel, 32 inputs at
// a time. A row does not depend on its tile's other rows.

#pragma once

#include "lanes.h"

#if defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)
#define KVSERVE_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int kTileRows = 16, kTileInputs = 32, kTileOutputs = 16;
constexpr int kTileWidth = 4 * kTileOutputs;  // that of a panel

// Some rows with a panel [in / 2, 64, 2], and the sums [rows, 64] that come of them, or are added to
// (`adds`). Meanwhile memory is fetched from `ahead` on, `step` bytes for each tile of inputs.
struct TileProduct {
  const bf16 *x, *panel;
  float* sums;
  int64_t rows, in, x_stride;
  const char* ahead;
  int64_t step;
  bool adds;
};

#if defined(KVSERVE_TILES)

// Whether this process may use tiles: Linux is asked once.
inline bool tiles_allowed() {
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool allowed = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return allowed;
}

// Tile 0 has rows of x and 1 weights, 2 and 3 those of the inputs that fill no tile, 4 to 7 sums.
inline void begin_tiles(int64_t rows, int64_t in) {
  struct alignas(64) {
    uint8_t palette = 1, first = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  const int64_t left = in % kTileInputs ? in % kTileInputs : kTileInputs;
  for (int tile = 0; tile < 8; ++tile) {
    config.bytes[tile] = tile == 2 ? left * sizeof(bf16) : 64;
    config.rows[tile] = tile == 1 ? kTileInputs / 2 : tile == 3 ? left / 2 : rows;
  }
  __asm__ volatile("ldtilecfg %0" ::"m"(config));  // GCC's own forgets all but the first bytes
}

inline void end_tiles() { _tile_release(); }

// A macro, since tiles are named by constants.
#define KVSERVE_ADD_TILES(rows, weights, from)                       \
  _tile_loadd(rows, p.x + i, p.x_stride * sizeof(bf16));             \
  _tile_loadd(weights, from, kStride);                               \
  _tile_dpbf16ps(4, rows, weights);                                  \
  _tile_loadd(weights, from + 2 * kTileOutputs, kStride);            \
  _tile_dpbf16ps(5, rows, weights);                                  \
  _tile_loadd(weights, from + 4 * kTileOutputs, kStride);            \
  _tile_dpbf16ps(6, rows, weights);                                  \
  _tile_loadd(weights, from + 6 * kTileOutputs, kStride);            \
  _tile_dpbf16ps(7, rows, weights)

inline void multiply_tiles(TileProduct& p) {
  constexpr int64_t kStride = kTileWidth * sizeof(float);  // of sums, and of pairs of weights
  if (p.adds) {
    _tile_loadd(4, p.sums, kStride);
    _tile_loadd(5, p.sums + kTileOutputs, kStride);
    _tile_loadd(6, p.sums + 2 * kTileOutputs, kStride);
    _tile_loadd(7, p.sums + 3 * kTileOutputs, kStride);
  } else {
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
  }
  int64_t i = 0;
  for (; i + kTileInputs <= p.in; i += kTileInputs) {
    for (const char* end = p.ahead + p.step; p.ahead < end; p.ahead += 64)
      __builtin_prefetch(p.ahead, 0, 2);
    KVSERVE_ADD_TILES(0, 1, p.panel + i * kTileWidth);
  }
  if (i < p.in) {
    KVSERVE_ADD_TILES(2, 3, p.panel + i * kTileWidth);
  }
  _tile_stored(4, p.sums, kStride);
  _tile_stored(5, p.sums + kTileOutputs, kStride);
  _tile_stored(6, p.sums + 2 * kTileOutputs, kStride);
  _tile_stored(7, p.sums + 3 * kTileOutputs, kStride);
}

#undef KVSERVE_ADD_TILES

#else

inline bool tiles_allowed() { return false; }
inline void begin_tiles(int64_t, int64_t) {}
inline void end_tiles() {}
inline void multiply_tiles(TileProduct&) {}

#endif

}  // namespace
