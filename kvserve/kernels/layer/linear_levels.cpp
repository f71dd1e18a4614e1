// Products with weights that are held as levels of 4 or 8 bits, in panels like those of linear.cpp.
//
// Levels are widened in registers, as exact numbers; the scale of a group of inputs is applied to the
// group's sum, and what is added to each weight of a group is multiplied with the sum of its x. Where
// many rows meet a panel, a slice of it is widened once for all of them. Either way each sum is formed
// in the same order, so that neither threads nor the other rows change a bit of it. For AMX levels are
// widened and scaled to bfloat16.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "panels.h"

// What the launcher passes; it mirrors these fields. Strides are in elements.
extern "C" struct LinearLevels {
  const void* x;          // [tokens, given], rows x_stride apart
  const uint8_t* levels;  // of each panel: steps of kBytes, see `Nibbles` and `Bytes`
  const void* scales;     // [P, groups, kWidth]
  const void* offsets;    // as scales; null: none
  const void* bias;       // [out] or null
  void* y;                // [tokens, out], dense
  const int32_t* ends;    // [experts], which rows of x are each expert's; null: one weight for all
  const int32_t* order;   // [experts, in], the number of x that each input is, -1: none; null: its own
  int64_t tokens, given, in, out, x_stride, group;
  int64_t experts, is_bf16, code, lowest, scale_type, offsets_are_zeros, rounds, num_threads;
};

// Rows of a table that is held so.
extern "C" struct TakeLevels {
  const uint8_t* levels;
  const void *scales, *offsets;
  const int64_t* places;  // [count]
  void* out;              // [count, in], of x's type
  int64_t* fault;         // the place that was refused
  int64_t count, rows, in, group, is_bf16, code, lowest, scale_type, offsets_are_zeros;
};

namespace {

constexpr int kRows = 6;               // of x at once
constexpr int64_t kMostRows = 192;     // for which a slice is widened once
constexpr int64_t kRun = 128;          // inputs of a group whose products are summed before its scale
constexpr int64_t kSlice = 128;        // inputs that are widened at once, or up to a run more
constexpr int64_t kTileSlice = 512;    // the same for tiles
constexpr float kLargest = 127.5f;     // of rounded numbers of x, which end at -128 and 127
enum Code { kNibbles, kInt8, kE4m3 };
enum ScaleType { kFloat32, kBfloat16, kFloat16 };

// ---- levels as numbers --------------------------------------------------------------------------

#if defined(__AVX512BF16__)
template <typename T>
constexpr bool kPaired = std::is_same_v<T, bf16>;
#else
template <typename T>
constexpr bool kPaired = false;
#endif
// What a lane holds: a number, or two inputs' numbers in bfloat16; and how many inputs' that are.
template <typename T>
using Unit = std::conditional_t<kPaired<T>, U, F>;
template <typename T>
constexpr int kEach = kPaired<T> ? 2 : 1;

template <typename T>
inline Unit<T> x_at(const T* at) {
  if constexpr (kPaired<T> || std::is_same_v<T, float>) {
    return in_all_lanes(at);
  } else {
    const uint32_t bits = uint32_t{at->bits} << 16;
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return F{} + number;
  }
}

#if defined(__AVX512BF16__)
inline U paired(F first, F last) {  // the numbers of one lane after the other
  return (U)_mm512_cvtne2ps_pbh((__m512)last, (__m512)first);
}
#endif

// A step of 4-bit levels is a vector of 32-bit lanes. Digit n of lane L is that of output
// n % kVectors * kMaxLanes + L and of the step's input n / kVectors.
template <typename T>
struct Nibbles {
  static constexpr int kInputs = 8 / kVectors, kUnits = kInputs / kEach<T>;
  static constexpr int64_t kBytes = 4 * kMaxLanes;
  typedef U Step;

  explicit Nibbles(int64_t lowest) : lowest(lowest) {
#if defined(__AVX512F__)
    alignas(64) float numbers[16];
    for (int i = 0; i < 16; ++i) numbers[i] = i + lowest;
    table = _mm512_load_ps(numbers);
#if defined(__AVX512BF16__)
    const __m256i halves = (__m256i)_mm512_cvtneps_pbh(table);
    pairs = _mm512_inserti64x4(_mm512_castsi256_si512(halves), halves, 1);
#endif
#endif
  }

  inline Step load(const uint8_t* from) const {
    U step;
    std::memcpy(&step, from, sizeof step);
    return step;
  }

  template <int u>
  inline void widen(Step step, Unit<T> (&to)[kVectors]) const {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
#if defined(__AVX512BF16__)
      if constexpr (kPaired<T>) {
        to[v] = (U)_mm512_permutexvar_epi16(_mm512_srli_epi16((__m512i)step, 4 * v), pairs);
        continue;
      }
#endif
      to[v] = (Unit<T>)number(step >> (4 * (u * kVectors + v)));
    }
  }

  // Of the lowest digits.
  inline F number(U digits) const {
#if defined(__AVX512F__)
    return (F)_mm512_permutexvar_ps((__m512i)digits, table);
#else
    return __builtin_convertvector((X::I)(digits & 15) + (int32_t)lowest, F);
#endif
  }

  inline float one(const uint8_t* panel, int64_t output, int64_t input) const {
    const int64_t digit = input % kInputs * kVectors + output / kMaxLanes;
    const uint8_t* lane = panel + input / kInputs * kBytes + output % kMaxLanes * 4;
    return static_cast<float>((lane[digit / 2] >> (digit % 2 * 4) & 15) + lowest);
  }

  int64_t lowest;
#if defined(__AVX512F__)
  __m512 table;
#if defined(__AVX512BF16__)
  __m512i pairs;
#endif
#endif
};

// A step of levels that are bytes, signed whole numbers or e4m3, lies as bfloat16 or float32 would:
// [kWidth, kEach].
template <typename T, typename B>
struct Bytes {
  static constexpr int kInputs = kEach<T>, kUnits = 1;
  static constexpr int64_t kBytes = kWidth * kInputs;
  typedef const B* Step;

  explicit Bytes(int64_t) {}

  inline Step load(const uint8_t* from) const { return reinterpret_cast<const B*>(from); }

  template <int>
  inline void widen(Step step, Unit<T> (&to)[kVectors]) const {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const B* from = step + v * kMaxLanes * kInputs;
#if defined(__AVX512BF16__)
      if constexpr (kPaired<T>) {
        to[v] = paired(X::load(from), X::load(from + kMaxLanes));
        continue;
      }
#endif
      to[v] = (Unit<T>)X::load(from);
    }
  }

  inline float one(const uint8_t* panel, int64_t output, int64_t input) const {
    const int64_t at = input / kInputs * kBytes + output * kInputs + input % kInputs;
    return X::load(reinterpret_cast<const B*>(panel) + at, 1)[0];
  }
};

// What `widen_slice` has made of any of them.
template <typename T>
struct Widened {
  static constexpr int kInputs = kEach<T>, kUnits = 1;
  static constexpr int64_t kBytes = kWidth * sizeof(float);
  typedef const uint8_t* Step;

  inline Step load(const uint8_t* from) const { return from; }

  template <int>
  inline void widen(Step step, Unit<T> (&to)[kVectors]) const {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)  // one by one, or GCC copies them to the stack
      std::memcpy(&to[v], step + v * sizeof to[v], sizeof to[v]);
  }
};

// ---- scales -------------------------------------------------------------------------------------

inline F scales_at(const void* scales, int64_t type, int64_t index) {
  if (type == kFloat16) return X::load(static_cast<const fp16*>(scales) + index);
  if (type == kBfloat16) return X::load(static_cast<const bf16*>(scales) + index);
  return X::load(static_cast<const float*>(scales) + index);
}

// What is added to weights whose scales are these.
template <typename C>
inline F offsets_at(const C& c, int64_t index, F scales) {
  const F offsets = scales_at(c.offsets, c.scale_type, index);
  return c.offsets_are_zeros ? -(scales * offsets) : offsets;
}

// ---- x ------------------------------------------------------------------------------------------

// Some rows of one expert, or of all.
struct Piece {
  int64_t expert, first, last;
};

// x as its products need it.
template <typename T>
struct Rows {
  const T* x;
  int64_t stride, groups;
  std::vector<T> own;          // x with its inputs in order, or rounded
  std::vector<float> sums;     // [tokens, groups], of each group's numbers
  std::vector<float> factors;  // [tokens], what a row was divided by

  explicit Rows(const LinearLevels& c)
      : x(static_cast<const T*>(c.x)), stride(c.x_stride), groups((c.in + c.group - 1) / c.group) {
    if (c.order || c.rounds || c.given != c.in) {
      own.resize(c.tokens * c.in);
      x = own.data(), stride = c.in;
    }
    if (c.offsets) sums.resize(c.tokens * groups);
    if (c.rounds) factors.resize(c.tokens);
  }

  static inline float number(float at) { return at; }
  static inline float number(bf16 at) {
    const uint32_t bits = uint32_t{at.bits} << 16;
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
  }
  static inline void set(float& at, float number) { at = number; }
  static inline void set(bf16& at, float number) {  // a whole number that it holds
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    at.bits = bits >> 16;
  }

  void fill(const LinearLevels& c, int64_t expert, int64_t row) {
    if (!own.empty()) {
      const T* from = static_cast<const T*>(c.x) + row * c.x_stride;
      T* to = own.data() + row * c.in;
      const int32_t* order = c.order ? c.order + expert * c.in : nullptr;
      for (int64_t i = 0; i < c.in; ++i) {
        const int64_t place = order ? order[i] : i < c.given ? i : -1;
        to[i] = place < 0 ? T{} : from[place];
      }
      if (c.rounds) {
        float largest = 0.0f;
        for (int64_t i = 0; i < c.in; ++i) largest = std::max(largest, std::fabs(number(to[i])));
        const float step = largest > 0.0f ? largest / kLargest : 1.0f;
        for (int64_t i = 0; i < c.in; ++i)
          set(to[i], std::clamp(std::nearbyint(number(to[i]) / step), -128.0f, 127.0f));
        factors[row] = step;
      }
    }
    if (sums.empty()) return;
    const T* from = x + row * stride;
    for (int64_t group = 0; group < groups; ++group) {
      F sum = {};
      int64_t i = group * c.group;
      const int64_t end = std::min(i + c.group, c.in);
      for (; i + kMaxLanes <= end; i += kMaxLanes) sum += X::load(from + i);
      if (i < end) sum += X::load(from + i, end - i);
      sums[row * groups + group] = X::total(sum);
    }
  }
};

// ---- a panel's products -------------------------------------------------------------------------

// Some rows with a panel.
template <typename T>
struct Block {
  const T* x;
  int64_t stride, rows;
  const uint8_t* levels;
  int64_t scales;    // the index of the panel's first
  float* totals;     // [rows, kWidth]
};

template <typename T, typename S, int R>
inline void add_run(const S& source, const uint8_t* levels, const T* x, int64_t stride,
                    int64_t inputs, const LinearLevels& c, int64_t scales, float* totals) {
  F parts[R][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) parts[r][v] = F{};
  const auto add = [&](const Unit<T> (&weights)[kVectors], int64_t i) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Unit<T> value = x_at(x + r * stride + i);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) parts[r][v] = add_product(parts[r][v], weights[v], value);
    }
  };
  for (int64_t i = 0; i < inputs; i += S::kInputs, levels += S::kBytes) {
    const typename S::Step step = source.load(levels);
    Unit<T> weights[kVectors];
    source.template widen<0>(step, weights);
    add(weights, i);
    if constexpr (S::kUnits > 1) {
      source.template widen<1>(step, weights);
      add(weights, i + kEach<T>);
    }
    if constexpr (S::kUnits > 2) {
      source.template widen<2>(step, weights);
      add(weights, i + 2 * kEach<T>);
      source.template widen<3>(step, weights);
      add(weights, i + 3 * kEach<T>);
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const F scale = scales_at(c.scales, c.scale_type, scales + v * kMaxLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      float* total = totals + r * kWidth + v * kMaxLanes;
      X::store(total, X::load(total) + scale * parts[r][v]);
    }
  }
}

// A run ends with its group, or after kRun inputs.
inline int64_t run_end(const LinearLevels& c, int64_t at) {
  return std::min({at + kRun, at - at % c.group + c.group, c.in});
}

// Inputs `at` to `end`, whole runs, whose levels begin at `levels`.
template <typename T, typename S, int R = kRows>
void add_runs(const S& source, const uint8_t* levels, const LinearLevels& c, const Block<T>& b,
              int64_t row, int64_t rows, int64_t at, int64_t end) {
  if constexpr (R > 1)
    if (rows < R) return add_runs<T, S, R - 1>(source, levels, c, b, row, rows, at, end);
  const T* x = b.x + row * b.stride;
  for (int64_t next; at < end; at = next) {
    next = run_end(c, at);
    add_run<T, S, R>(source, levels, x + at, b.stride, next - at, c,
                     b.scales + at / c.group * kWidth, b.totals + row * kWidth);
    levels += (next - at) / S::kInputs * S::kBytes;
  }
}

template <typename T, typename S>
void widen_slice(const S& source, const uint8_t* levels, int64_t inputs, Unit<T>* to) {
  for (int64_t i = 0; i < inputs; i += S::kInputs, levels += S::kBytes) {
    const typename S::Step step = source.load(levels);
    const auto put = [&](const Unit<T> (&weights)[kVectors]) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) std::memcpy(to++, &weights[v], sizeof weights[v]);
    };
    Unit<T> weights[kVectors];
    source.template widen<0>(step, weights), put(weights);
    if constexpr (S::kUnits > 1) source.template widen<1>(step, weights), put(weights);
    if constexpr (S::kUnits > 2) source.template widen<2>(step, weights), put(weights);
    if constexpr (S::kUnits > 2) source.template widen<3>(step, weights), put(weights);
  }
}

template <typename T, typename S>
void add_products(const S& source, const LinearLevels& c, const Block<T>& b) {
  if (b.rows <= kRows) return add_runs<T, S>(source, b.levels, c, b, 0, b.rows, 0, c.in);
  alignas(64) Unit<T> widened[(kSlice + kRun) / kEach<T> * kVectors];
  const Widened<T> wide;
  const int64_t turns = (b.rows + kRows - 1) / kRows;
  const uint8_t* levels = b.levels;
  for (int64_t at = 0, end; at < c.in; at = end) {
    for (end = at; end < c.in && end - at < kSlice;) end = run_end(c, end);
    widen_slice<T>(source, levels, end - at, widened);
    levels += (end - at) / S::kInputs * S::kBytes;
    // Each turn fetches its part of the next slice.
    const char* ahead = reinterpret_cast<const char*>(levels);
    const int64_t lines = (end - at) / S::kInputs * S::kBytes / 64;
    for (int64_t turn = 0; turn < turns; ++turn) {
      for (int64_t line = lines * turn / turns; line < lines * (turn + 1) / turns; ++line)
        __builtin_prefetch(ahead + line * 64, 0, 2);
      const int64_t row = b.rows * turn / turns, count = b.rows * (turn + 1) / turns - row;
      add_runs<T>(wide, reinterpret_cast<const uint8_t*>(widened), c, b, row, count, at, end);
    }
  }
}

// What is added to the weights of a group, times the sums of its numbers of x.
template <int R = kRows>
void add_offsets(const LinearLevels& c, const float* sums, int64_t groups, int64_t rows,
                 int64_t scales, float* totals) {
  if constexpr (R > 1)
    if (rows < R) return add_offsets<R - 1>(c, sums, groups, rows, scales, totals);
  for (int64_t row = 0; row + R <= rows; row += R, sums += R * groups, totals += R * kWidth) {
    F parts[R][kVectors];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v) parts[r][v] = F{};
    for (int64_t group = 0; group < groups; ++group)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = scales + group * kWidth + v * kMaxLanes;
        const F offset = offsets_at(c, at, scales_at(c.scales, c.scale_type, at));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) parts[r][v] += offset * sums[r * groups + group];
      }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v) X::store(totals + r * kWidth + v * kMaxLanes, parts[r][v]);
  }
  if constexpr (R > 1)
    if (rows % R) add_offsets<R - 1>(c, sums, groups, rows % R, scales, totals);
}

#if defined(KVSERVE_TILES)
// Scaled weights of `inputs`, in pairs of bfloat16.
template <typename S>
void widen_scaled(const S& source, const LinearLevels& c, const uint8_t* levels, int64_t scales,
                  int64_t at, int64_t inputs, U* to) {
  const __m512i turns = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  for (int64_t end = at + inputs, next; at < end; at = next) {
    next = std::min(at - at % c.group + c.group, end);
    F scale[kVectors], offset[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const int64_t index = scales + at / c.group * kWidth + v * kMaxLanes;
      scale[v] = scales_at(c.scales, c.scale_type, index);
      offset[v] = c.offsets ? offsets_at(c, index, scale[v]) : F{};
    }
    for (int64_t i = at; i < next; i += 2, levels += S::kBytes * 2 / S::kInputs, to += kVectors) {
      U weights[kVectors];
      source.template widen<0>(source.load(levels), weights);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const F even = (F)(weights[v] << 16) * scale[v] + offset[v];
        const F odd = (F)(weights[v] & 0xffff0000u) * scale[v] + offset[v];
        to[v] = (U)_mm512_permutexvar_epi16(turns, (__m512i)paired(even, odd));
      }
    }
  }
}

template <typename S>
void add_products_on_tiles(const S& source, const LinearLevels& c, const Block<bf16>& b) {
  alignas(64) U widened[kTileSlice / 2 * kVectors];
  TileProduct p{};
  p.panel = reinterpret_cast<const bf16*>(widened);
  p.x_stride = b.stride, p.adds = true;
  for (int64_t at = 0; at < c.in; at += kTileSlice) {
    p.in = std::min(kTileSlice, c.in - at);
    widen_scaled(source, c, b.levels + at / S::kInputs * S::kBytes, b.scales, at, p.in, widened);
    for (int64_t row = 0; row < b.rows; row += kTileRows) {
      p.rows = std::min<int64_t>(kTileRows, b.rows - row);
      begin_tiles(p.rows, p.in);
      p.x = b.x + row * b.stride + at, p.sums = b.totals + row * kWidth;
      multiply_tiles(p);
    }
  }
  end_tiles();
}
#endif

template <typename T, typename S>
void multiply_panel(const LinearLevels& c, const Rows<T>& rows, Piece piece, int64_t panel) {
  const int64_t panels = (c.out + kWidth - 1) / kWidth, at = panel * kWidth;
  const int64_t place = piece.expert * panels + panel, count = piece.last - piece.first;
  alignas(64) float totals[kMostRows * kWidth];
  const S source(c.lowest);
  Block<T> b{rows.x + piece.first * rows.stride, rows.stride, count,
             c.levels + place * (c.in / S::kInputs) * S::kBytes, place * rows.groups * kWidth,
             totals};
  std::fill(totals, totals + count * kWidth, 0.0f);
  const auto on_tiles = [&] {
#if defined(KVSERVE_TILES)
    if constexpr (kPaired<T>) {
      if (tiles_allowed()) {
        add_products_on_tiles(source, c, b);
        return true;
      }
    }
#endif
    return false;
  };
  if (!on_tiles()) {
    if (c.offsets)
      add_offsets(c, rows.sums.data() + piece.first * rows.groups, rows.groups, count, b.scales,
                  totals);
    add_products(source, c, b);
  }
  const int64_t columns = std::min<int64_t>(kWidth, c.out - at);
  const T* bias = c.bias ? static_cast<const T*>(c.bias) + at : nullptr;
  T* y = static_cast<T*>(c.y) + piece.first * c.out + at;
  for (int64_t r = 0; r < count; ++r, y += c.out) {
    const float factor = c.rounds ? rows.factors[piece.first + r] : 1.0f;
    for (int64_t v = 0; v < columns; v += kMaxLanes) {
      const int64_t lanes = std::min<int64_t>(kMaxLanes, columns - v);
      const F start = bias ? X::load(bias + v, lanes) : F{};
      X::store(y + v, start + X::load(totals + r * kWidth + v) * factor, lanes);
    }
  }
}

template <typename T, typename S>
void multiply(const LinearLevels& c) {
  const int64_t panels = (c.out + kWidth - 1) / kWidth;
  std::vector<Piece> pieces;
  for (int64_t expert = 0, first = 0, end; expert < (c.ends ? c.experts : 1); ++expert, first = end) {
    end = c.ends ? c.ends[expert] : c.tokens;
    // Fewer rows at once where there would not be four pieces of work for each thread.
    const int64_t shared = c.num_threads > 1 ? (end - first) * panels / (4 * c.num_threads) : kMostRows;
    const int64_t most = std::clamp<int64_t>(shared, 8 * kRows, kMostRows);
    const int64_t blocks = (end - first + most - 1) / most;
    for (int64_t block = 0; block < blocks; ++block)
      pieces.push_back({expert, first + (end - first) * block / blocks,
                        first + (end - first) * (block + 1) / blocks});
  }
  Rows<T> rows(c);
  const bool fills = !rows.own.empty() || !rows.sums.empty();
  const int64_t count = pieces.size();
#pragma omp parallel num_threads(c.num_threads) if (c.num_threads > 1)
  {
    if (fills)
#pragma omp for schedule(static)
      for (int64_t at = 0; at < count; ++at)
        for (int64_t row = pieces[at].first; row < pieces[at].last; ++row)
          rows.fill(c, pieces[at].expert, row);
#pragma omp for collapse(2) schedule(static)
    for (int64_t at = 0; at < count; ++at)
      for (int64_t panel = 0; panel < panels; ++panel)
        multiply_panel<T, S>(c, rows, pieces[at], panel);
  }
}

// Calls `run` with the levels of a call.
template <typename T, typename Run>
void with_levels(int64_t code, Run run) {
  if (code == kNibbles) return run(static_cast<Nibbles<T>*>(nullptr));
  if (code == kInt8) return run(static_cast<Bytes<T, int8>*>(nullptr));
  run(static_cast<Bytes<T, e4m3>*>(nullptr));
}

template <typename T>
void multiply_any(const LinearLevels& c) {
  with_levels<T>(c.code, [&](auto* kind) { multiply<T, std::remove_pointer_t<decltype(kind)>>(c); });
}

template <typename T, typename S>
void take(const TakeLevels& c) {
  const S source(c.lowest);
  const int64_t groups = (c.in + c.group - 1) / c.group;
  for (int64_t i = 0; i < c.count; ++i) {
    const int64_t panel = c.places[i] / kWidth, output = c.places[i] % kWidth;
    const uint8_t* levels = c.levels + panel * (c.in / S::kInputs) * S::kBytes;
    T* out = static_cast<T*>(c.out) + i * c.in;
    const auto scale_of = [&](const void* scales, int64_t group) {
      const int64_t at = (panel * groups + group) * kWidth + output / kMaxLanes * kMaxLanes;
      return scales_at(scales, c.scale_type, at)[output % kMaxLanes];
    };
    for (int64_t group = 0; group < groups; ++group) {
      const float scale = scale_of(c.scales, group);
      float offset = c.offsets ? scale_of(c.offsets, group) : 0.0f;
      if (c.offsets_are_zeros) offset = -(scale * offset);
      for (int64_t k = group * c.group; k < std::min((group + 1) * c.group, c.in); ++k)
        X::store(out + k, F{} + (source.one(levels, output, k) * scale + offset), 1);
    }
  }
}

}  // namespace

// How many inputs lie side by side where levels are bytes: [in / E, kWidth, E].
extern "C" int64_t kvserve_inputs_side_by_side(int64_t is_bf16) {
  return is_bf16 ? kEach<bf16> : kEach<float>;
}

extern "C" void kvserve_linear_levels(const LinearLevels* c) {
  c->is_bf16 ? multiply_any<bf16>(*c) : multiply_any<float>(*c);
}

extern "C" int kvserve_take_levels(const TakeLevels* call) {
  const TakeLevels& c = *call;
  for (int64_t i = 0; i < c.count; ++i)
    if (c.places[i] < 0 || c.places[i] >= c.rows) {
      *c.fault = c.places[i];
      return 1;
    }
  const auto take_as = [&](auto number) {
    typedef decltype(number) T;
    with_levels<T>(c.code, [&](auto* kind) { take<T, std::remove_pointer_t<decltype(kind)>>(c); });
  };
  c.is_bf16 ? take_as(bf16{}) : take_as(float{});
  return 0;
}
