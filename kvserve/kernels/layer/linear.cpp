// Products with weights that lie in panels: a few rows of x with kWidth outputs at a time.
//
// A panel is read front to back while the sums of its outputs stay in registers. Memory that is read
// once, in order, is fetched by the CPU itself, and faster than it can be told to; where a panel is
// read several times, the panel after it is fetched meanwhile. Each sum is formed by one thread in
// the order of the inputs, so that neither threads nor the other rows change a bit of it. bfloat16 is
// multiplied by AMX where a CPU has it, whatever the number of rows. Experts' weights lie one behind
// the other, and each multiplies its own rows of x.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "panels.h"

// What the launcher passes; it mirrors these fields. Strides are in elements.
extern "C" struct Linear {
  const void* x;       // [tokens, in], rows x_stride apart
  const void* panels;  // float32 [P, in, kWidth], bfloat16 [P, in / 2, kWidth, 2], P * kWidth >= out
  const void* bias;    // [out] or null
  void* y;             // [tokens, out], dense
  const int32_t* ends; // [experts], which rows of x are each expert's; null: one weight for all
  int64_t tokens, in, out, x_stride;
  int64_t experts, is_bf16, num_threads;
};

// Rows of a table that lies in panels. What one output has of a panel's row is 4 bytes of either type.
extern "C" struct TakeRows {
  const uint32_t* panels;  // [P, units, kWidth]
  const int64_t* places;   // [count]
  uint32_t* out;           // [count, units]
  int64_t* fault;          // the place that was refused
  int64_t count, rows, units, num_threads;
};

namespace {

constexpr int kRows = 6;                    // of x at once: kRows * kVectors sums
constexpr int64_t kRowsBytes = 512 * 1024;  // of x that a second-level cache holds beside a panel
constexpr int64_t kRowsBytesWithTiles = 1024 * 1024;  // in that of a CPU with AMX

// Some rows of x with one panel.
template <typename T>
struct Tile {
  const T *x, *panel, *bias;
  T* y;
  int64_t columns;    // outputs of the panel
  const char* ahead;  // what to fetch if anything, `step` bytes further with each row of the panel
  int64_t step;
};

template <typename T, int R, bool Fetches>
void multiply_rows(const Linear& c, Tile<T> t) {
  constexpr int kEach = sizeof(float) / sizeof(T);
  const auto count = [&](int v) {
    return std::clamp<int64_t>(t.columns - v * kMaxLanes, 0, kMaxLanes);
  };
  F sums[R][kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const F start = t.bias ? X::load(t.bias + v * kMaxLanes, count(v)) : F{};
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[r][v] = start;
  }
  for (int64_t i = 0; i < c.in; i += kEach) {
    decltype(weights_at(t.panel)) weights[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      weights[v] = weights_at(t.panel + v * kMaxLanes * kEach);
      if (Fetches) __builtin_prefetch(t.ahead + v * t.step / kVectors, 0, 2);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const auto value = in_all_lanes(t.x + r * c.x_stride + i);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[r][v] = add_product(sums[r][v], weights[v], value);
    }
    t.panel += kWidth * kEach;
    t.ahead += t.step;
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      X::store(t.y + r * c.out + v * kMaxLanes, sums[r][v], count(v));
}

template <bool Fetches, typename T, int R = kRows>
void multiply_rows(int64_t rows, const Linear& c, const Tile<T>& tile) {
  if constexpr (R > 1)
    if (rows < R) return multiply_rows<Fetches, T, R - 1>(rows, c, tile);
  multiply_rows<T, R, Fetches>(c, tile);
}

template <typename T>
inline bool on_tiles() {
  return sizeof(T) == sizeof(bf16) && tiles_allowed();
}

// The outputs of one panel for tokens first to last, on tiles.
inline void multiply_panel_on_tiles(const Linear& c, int64_t panel, int64_t first, int64_t last) {
  const int64_t at = panel * kWidth, columns = std::min<int64_t>(kWidth, c.out - at);
  const bf16* bias = c.bias ? static_cast<const bf16*>(c.bias) + at : nullptr;
  alignas(64) float sums[kTileRows * kWidth];
  TileProduct p{};
  p.panel = static_cast<const bf16*>(c.panels) + panel * c.in * kWidth;
  p.sums = sums, p.in = c.in, p.x_stride = c.x_stride;
  p.ahead = reinterpret_cast<const char*>(p.panel + c.in * kWidth);
  // Each tile of rows and of inputs fetches its part of the next panel.
  const int64_t turns = (last - first + kTileRows - 1) / kTileRows;
  p.step = turns > 1 ? kTileInputs * kWidth * sizeof(bf16) / turns / 64 * 64 : 0;
  for (int64_t row = first, configured = 0; row < last; row += kTileRows) {
    p.rows = std::min<int64_t>(kTileRows, last - row);
    if (p.rows != configured) begin_tiles(configured = p.rows, c.in);
    p.x = static_cast<const bf16*>(c.x) + row * c.x_stride;
    multiply_tiles(p);
    bf16* y = static_cast<bf16*>(c.y) + row * c.out + at;
    for (int64_t v = 0; v < columns; v += kMaxLanes) {
      const int64_t count = std::min<int64_t>(kMaxLanes, columns - v);
      const F start = bias ? X::load(bias + v, count) : F{};
      for (int64_t r = 0; r < p.rows; ++r)
        X::store(y + r * c.out + v, start + X::load(sums + r * kWidth + v), count);
    }
  }
  end_tiles();
}

// The outputs of one panel for tokens first to last, each turn fetching its part of the next panel.
template <typename T>
void multiply_panel(const Linear& c, int64_t panel, int64_t first, int64_t last) {
  if (on_tiles<T>()) return multiply_panel_on_tiles(c, panel, first, last);
  const int64_t size = c.in * kWidth, at = panel * kWidth;
  const int64_t turns = (last - first + kRows - 1) / kRows;
  Tile<T> tile{};
  tile.panel = static_cast<const T*>(c.panels) + panel * size;
  tile.bias = c.bias ? static_cast<const T*>(c.bias) + at : nullptr;
  tile.columns = std::min<int64_t>(kWidth, c.out - at);
  tile.step = kWidth * sizeof(float) / turns;
  for (int64_t turn = 0; turn < turns; ++turn) {
    const int64_t row = first + (last - first) * turn / turns;
    const int64_t end = first + (last - first) * (turn + 1) / turns;
    tile.x = static_cast<const T*>(c.x) + row * c.x_stride;
    tile.y = static_cast<T*>(c.y) + row * c.out + at;
    tile.ahead = reinterpret_cast<const char*>(tile.panel + size + size * turn / turns);
    turns > 1 ? multiply_rows<true>(end - row, c, tile) : multiply_rows<false>(end - row, c, tile);
  }
}

template <typename T>
void multiply(const Linear& c) {
  const int64_t panels = (c.out + kWidth - 1) / kWidth;
  const int64_t bytes = on_tiles<T>() ? kRowsBytesWithTiles : kRowsBytes;
  const int64_t held = bytes / static_cast<int64_t>(sizeof(T)) / std::max<int64_t>(c.in, 1);
  // Fewer where there would not be four pieces of work for each thread.
  const int64_t shared = c.num_threads > 1 ? c.tokens * panels / (4 * c.num_threads) : held;
  const int64_t rows = std::max<int64_t>(8 * kRows, std::min(held, shared));
  const int64_t blocks = (c.tokens + rows - 1) / rows;
#pragma omp parallel for collapse(2) schedule(static) num_threads(c.num_threads) \
    if (c.num_threads > 1)
  for (int64_t block = 0; block < blocks; ++block)
    for (int64_t panel = 0; panel < panels; ++panel)
      multiply_panel<T>(c, panel, c.tokens * block / blocks, c.tokens * (block + 1) / blocks);
}

// Some rows of one expert.
struct Piece {
  int64_t expert, first, last;
};

template <typename T>
void multiply_by_expert(const Linear& c) {
  const int64_t panels = (c.out + kWidth - 1) / kWidth;
  const int64_t size = panels * kWidth * c.in, rows = 8 * kRows;
  std::vector<Piece> pieces;
  for (int64_t expert = 0, first = 0; expert < c.experts; first = c.ends[expert++]) {
    const int64_t end = c.ends[expert];
    for (int64_t row = first; row < end; row += rows)
      pieces.push_back({expert, row, std::min(row + rows, end)});
  }
  const int64_t count = pieces.size();
#pragma omp parallel for collapse(2) schedule(static) num_threads(c.num_threads) \
    if (c.num_threads > 1)
  for (int64_t at = 0; at < count; ++at)
    for (int64_t panel = 0; panel < panels; ++panel) {
      Linear own = c;
      own.panels = static_cast<const T*>(c.panels) + pieces[at].expert * size;
      multiply_panel<T>(own, panel, pieces[at].first, pieces[at].last);
    }
}

template <typename T>
void multiply_any(const Linear& c) {
  c.ends ? multiply_by_expert<T>(c) : multiply<T>(c);
}

}  // namespace

extern "C" int64_t kvserve_panel_width() { return kWidth; }

extern "C" int64_t kvserve_lanes() { return kMaxLanes; }

extern "C" int64_t kvserve_has_tiles() { return tiles_allowed(); }

extern "C" int kvserve_take_rows(const TakeRows* call) {
  const TakeRows& c = *call;
  for (int64_t i = 0; i < c.count; ++i)
    if (c.places[i] < 0 || c.places[i] >= c.rows) {
      *c.fault = c.places[i];
      return 1;
    }
#pragma omp parallel for schedule(static) num_threads(c.num_threads) if (c.num_threads > 1)
  for (int64_t i = 0; i < c.count; ++i) {
    const int64_t panel = c.places[i] / kWidth, output = c.places[i] % kWidth;
    const uint32_t* from = c.panels + panel * c.units * kWidth + output;
    for (int64_t unit = 0; unit < c.units; ++unit)
      c.out[i * c.units + unit] = from[unit * kWidth];
  }
  return 0;
}

extern "C" void kvserve_linear(const Linear* c) {
  c->is_bf16 ? multiply_any<bf16>(*c) : multiply_any<float>(*c);
}
