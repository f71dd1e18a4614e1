// Queries and weights with tiles of 16 entries in few bits, which lie in memory as they are met: no
// transposition, no gather. Queries and weights are rounded to whole numbers of several bytes, of
// their largest: two where numbers are computed as bfloat16, three (or on CPUs that do not multiply
// bytes, twice 16 bits) as float32. So sums of products with levels are whole numbers, exact in int32,
// and nothing depends on who else is in a call.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ahead.h"
#include "few.h"
#include "lanes.h"
#include "logits.h"
#include "values.h"

namespace {

constexpr int kSixteen = 16;
typedef Column<packed<4>, kMaxLanes, true> LevelWords;

// visit(w, levels) for the words of four channels, w the first one's number over 4, of kMaxLanes
// entries from `half` on: four bytes of each are levels.
template <int Bits, typename Visit>
__attribute__((always_inline)) inline void each_word(const uint8_t* strips, int width, int half,
                                                     Ahead& ahead, Visit visit) {
  typedef Lanes<kMaxLanes>::U U;
  constexpr uint32_t kMask = 0x01010101u * ((1 << Bits) - 1);
  const int columns = width / 4;
  const auto line = [&](int strip, int j) {
    U x;
    std::memcpy(&x, strips + (strip * columns + j) * 4 * kSixteen + 4 * half, sizeof x);
    return x;
  };
  for (int j = 0; j < columns; ++j) {
    ahead.fetch<Bits == 3 ? 3 : 1>();
    if constexpr (Bits == 3) {
      const U a = line(0, j), b = line(1, j), c = line(2, j);
      visit(j, a & kMask);
      visit(columns + j, a >> 3 & kMask);
      visit(2 * columns + j, b & kMask);
      visit(3 * columns + j, b >> 3 & kMask);
      visit(4 * columns + j, c & kMask);
      visit(5 * columns + j, c >> 3 & kMask);
      visit(6 * columns + j, (a >> 6 & 0x03030303u) | (c >> 5 & 0x04040404u));
      visit(7 * columns + j, (b >> 6 & 0x03030303u) | (c >> 4 & 0x04040404u));
    } else {
      const U x = line(0, j);
#pragma GCC unroll 8
      for (int f = 0; f < 8 / Bits; ++f) visit(f * columns + j, x >> (Bits * f) & kMask);
    }
  }
}

// Of the numbers that a query is rounded to, those that meet four channels: the bytes of each, the
// highest first; or their 16-bit numbers of channels 0 and 2, of 1 and 3, then the lower ones.
template <bool Fine>
constexpr int kDigits = LevelWords::kBytes ? 2 + Fine : 2 * (1 + Fine);
constexpr int kByteShift = 8, kPairShift = 15;

template <bool Fine>
inline double largest_whole() {
  if (LevelWords::kBytes) return Fine ? 8355711 : 32639;
  return Fine ? (1 << 29) : 32767;
}

// 32 bits of each digit of a query's channels, four at a time: to[dim / 4][digits].
template <bool Fine>
inline void write_digits(const float* query, int dim, double inverse, int32_t* to) {
  constexpr int N = kDigits<Fine>;
  for (int d = 0; d < dim; ++d) {
    long whole = std::lrint(query[d] * inverse);
    char* word = reinterpret_cast<char*>(to + d / 4 * N);
    if constexpr (LevelWords::kBytes) {
      for (int i = N - 1; i >= 0; --i) {
        const int8_t low = (int8_t)whole;
        word[4 * i + d % 4] = low;
        whole = (whole - low) >> kByteShift;
      }
    } else {
      const int at = d % 2 * 4 + d % 4 / 2 * 2;
      const long high = Fine ? (whole + (1 << (kPairShift - 1))) >> kPairShift : whole;
      const int16_t digits[2] = {(int16_t)high, (int16_t)(whole - (high << kPairShift))};
      for (int i = 0; i < N / 2; ++i) std::memcpy(word + 8 * i + at, digits + i, sizeof *digits);
    }
  }
}

// Sums of Q rounded queries, `apart` numbers apart, with the levels of a tile's keys: [Q][16].
template <int Bits, bool Fine, int Q>
inline void level_sums(const uint8_t* strips, int width, const int32_t* queries, int apart,
                       float* to, int to_apart, Ahead& ahead) {
  typedef LevelWords C;
  typedef Lanes<kMaxLanes> X;
  constexpr int N = kDigits<Fine>;
  for (int half = 0; half < kSixteen; half += kMaxLanes) {
    typename C::Sum sums[Q][N] = {};
    each_word<Bits>(strips, width, half, ahead, [&](int w, X::U levels) {
      typename C::Number numbers[2] = {(typename C::Number)levels, (typename C::Number)levels};
      if constexpr (!C::kBytes) {
        numbers[0] = (typename C::Number)(levels & 0x00ff00ffu);
        numbers[1] = (typename C::Number)(levels >> 8 & 0x00ff00ffu);
      }
#pragma GCC unroll 4
      for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i)
          sums[q][i] = C::add(sums[q][i], queries[q * apart + N * w + i], numbers[i % 2]);
    });
    const auto number = [](typename C::Sum x) { return __builtin_convertvector(x, X::F); };
    for (int q = 0; q < Q; ++q) {
      X::F total;
      if constexpr (!C::kBytes)
        total = number(sums[q][0] + sums[q][1]);
      else
        total = number((sums[q][N - 2] << kByteShift) + sums[q][N - 1]);
      if constexpr (Fine && C::kBytes) total += number(sums[q][0]) * (float)(1 << 2 * kByteShift);
      if constexpr (Fine && !C::kBytes)
        total = total * (float)(1 << kPairShift) + number(sums[q][2] + sums[q][3]);
      X::store(to + q * to_apart + half, total);
    }
  }
}

// Of up to Q queries.
template <int Bits, bool Fine, int Q>
void level_sums_of(int count, const uint8_t* strips, int width, const int32_t* queries, int apart,
                   float* to, int to_apart, Ahead& ahead) {
  if constexpr (Q > 1)
    if (count < Q)
      return level_sums_of<Bits, Fine, Q - 1>(count, strips, width, queries, apart, to, to_apart, ahead);
  level_sums<Bits, Fine, Q>(strips, width, queries, apart, to, to_apart, ahead);
}

// fn(std::integral_constant<int, bits>()).
template <typename Fn>
inline void with_bits(int bits, Fn fn) {
  switch (bits) {
    case 1: return fn(std::integral_constant<int, 1>());
    case 2: return fn(std::integral_constant<int, 2>());
    case 3: return fn(std::integral_constant<int, 3>());
    default: return fn(std::integral_constant<int, 4>());
  }
}

#if defined(KVSERVE_QUADS)

// Two fields of the values of four entries and 16 bytes each (or of more entries, where strips are
// narrower): a level's bits where they stand, so many times as large.
template <int Bits, int Pair>
inline void fields_of(const uint8_t* strips, int64_t apart, int64_t line, __m512i* levels) {
  const auto load = [&](int strip) { return _mm512_loadu_si512(strips + strip * apart + line); };
  const auto bits = [](int mask) { return _mm512_set1_epi8((char)mask); };
  if constexpr (Bits == 3 && Pair == 3) {
    const __m512i a = load(0), b = load(1), c = load(2);
    // Lower bits from bits 5 and 6, the highest from bit 7: 32 times a level.
    levels[0] = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(a, 1), bits(0x60)),
                                _mm512_and_si512(c, bits(0x80)));
    levels[1] = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(b, 1), bits(0x60)),
                                _mm512_and_si512(_mm512_slli_epi16(c, 1), bits(0x80)));
  } else {
    constexpr int kMask = (1 << Bits) - 1, kAt = Bits == 3 ? 0 : 2 * Bits * Pair;
    const __m512i x = load(Bits == 3 ? Pair : 0);
    levels[0] = _mm512_and_si512(x, bits(kMask << kAt));
    levels[1] = _mm512_and_si512(x, bits(kMask << (kAt + Bits)));
  }
}
template <int Bits, int Pair>
constexpr int kTimes[2] = {Bits == 3 ? (Pair == 3 ? 5 : 0) : 2 * Bits * Pair,
                           Bits == 3 ? (Pair == 3 ? 5 : 3) : 2 * Bits * Pair + Bits};

// Weights times steps, N bytes each of the tile's largest, the highest first.
template <int N>
struct WeightDigits {
  alignas(64) int8_t bytes[N][kTileEntries + 16];  // read by sixteens
  float step;   // what one stands for
  float below;  // the sum of weights times lows; what is not finite stays so by it
};

template <int N>
inline void find_weight_digits(const float* weights, int count, const Steps& of, WeightDigits<N>& to) {
  typedef Lanes<16> X;
  X::F products[kTileEntries / 16], highest = {}, below = {};
  for (int v = 0; v < count; ++v) {
    X::F weight = X::load(weights + 16 * v);
    weight = weight < 1e-30f ? X::F{} : weight;  // subnormal products take 100 times as long
    products[v] = weight * X::load(of.steps + 16 * v);
    highest = products[v] > highest ? products[v] : highest;
    below += weight * X::load(of.lows + 16 * v);
  }
  // A power of two, so that the largest is between a half and all of what N bytes hold.
  constexpr float kMost = N == 2 ? 32639.0f : 8355711.0f;
  const float largest = std::max(X::largest(highest) * ((1 << (8 * N - 1)) / kMost), 0x1p-100f);
  uint32_t bits;
  std::memcpy(&bits, &largest, sizeof bits);
  const uint32_t up = ((127 + 8 * N - 2 + 127) << 23) - (bits & 0x7f800000u);  // 2^(8 N - 2 - e)
  const uint32_t down = (254u << 23) - up;
  float scale;
  std::memcpy(&scale, &up, sizeof scale);
  std::memcpy(&to.step, &down, sizeof down);
  for (int v = 0; v < count; ++v) {
    __m512i whole = _mm512_cvtps_epi32((__m512)(products[v] * scale));
    for (int i = N - 1; i >= 0; --i) {
      _mm_store_si128((__m128i*)(to.bytes[i] + 16 * v), _mm512_cvtepi32_epi8(whole));
      whole = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
    }
  }
  to.below = X::total(below);
}

// out[Q, ...] += weights times two fields of the values of `count` tiles.
template <int Bits, int N, int Pair, int Q>
inline void add_pair(float* out, int stride, const WeightDigits<N>* digits,
                     const uint8_t* const* tiles, int count, int width, Ahead& ahead) {
  const int quads = width < kSixteen ? kSixteen / width : 1;  // in a line
  const int blocks = width < kSixteen ? 1 : width / kSixteen;
  const int64_t apart = kSixteen * width;
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  // Which of a line's quads each lane is of.
  const __m512i own = quads == 1   ? _mm512_setzero_si512()
                      : quads == 2 ? _mm512_srli_epi32(lanes, 3)
                                   : _mm512_srli_epi32(lanes, 2);
  for (int block = 0; block < blocks; ++block) {
    __m512i sums[Q][N][2];
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) sums[q][i][0] = sums[q][i][1] = _mm512_setzero_si512();
    for (int tile = 0; tile < count; ++tile)
      for (int quad = 0; quad < 4; quad += quads) {
        ahead.fetch<1>();
        __m512i levels[2];
        fields_of<Bits, Pair>(tiles[tile], apart, 4 * (quad * width + block * kSixteen), levels);
        const int at = tile * kSixteen + 4 * quad;
#pragma GCC unroll 8
        for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
          for (int i = 0; i < N; ++i) {
            const int8_t* from = digits[q].bytes[i] + at;
            if (quads == 1) {
              sums[q][i][0] = add_products(sums[q][i][0], levels[0], from);
              sums[q][i][1] = add_products(sums[q][i][1], levels[1], from);
              continue;
            }
            const __m512i some = _mm512_permutexvar_epi32(
                own, _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)from)));
            sums[q][i][0] = _mm512_dpbusd_epi32(sums[q][i][0], levels[0], some);
            sums[q][i][1] = _mm512_dpbusd_epi32(sums[q][i][1], levels[1], some);
          }
      }
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q)
#pragma GCC unroll 2
      for (int f = 0; f < 2; ++f) {
        const auto number = [&](__m512i x) {
          if (quads > 1) x = _mm512_add_epi32(x, _mm512_shuffle_i64x2(x, x, 0x4e));
          if (quads > 2) x = _mm512_add_epi32(x, _mm512_shuffle_i64x2(x, x, 0xb1));
          return _mm512_cvtepi32_ps(x);
        };
        __m512 sum = number(_mm512_add_epi32(_mm512_slli_epi32(sums[q][N - 2][f], 8), sums[q][N - 1][f]));
        if constexpr (N == 3) sum = _mm512_fmadd_ps(number(sums[q][0][f]), _mm512_set1_ps(65536.0f), sum);
        const __m512 step = _mm512_set1_ps(digits[q].step / (1 << kTimes<Bits, Pair>[f]));
        const __mmask16 some = width < kSixteen ? (1 << width) - 1 : 0xffff;
        float* to = out + q * stride + (2 * Pair + f) * width + block * kSixteen;
        const __m512 below = _mm512_add_ps(_mm512_maskz_loadu_ps(some, to), _mm512_set1_ps(digits[q].below));
        _mm512_mask_storeu_ps(to, some, _mm512_fmadd_ps(sum, step, below));
      }
  }
}

template <int Bits, int N, int Q>
inline void add_fields(float* out, int stride, const WeightDigits<N>* digits,
                       const uint8_t* const* tiles, int count, int width, Ahead& ahead) {
  add_pair<Bits, N, 0, Q>(out, stride, digits, tiles, count, width, ahead);
  if constexpr (Bits < 4) add_pair<Bits, N, 1, Q>(out, stride, digits, tiles, count, width, ahead);
  if constexpr (Bits == 3 || Bits == 1) {
    add_pair<Bits, N, 2, Q>(out, stride, digits, tiles, count, width, ahead);
    add_pair<Bits, N, 3, Q>(out, stride, digits, tiles, count, width, ahead);
  }
}

// Up to Q rows.
template <int Bits, int N, int Q>
void add_levels_of(int rows, float* out, int stride, const WeightDigits<N>* digits,
                   const uint8_t* const* tiles, int count, int width, Ahead& ahead) {
  if constexpr (Q > 1)
    if (rows < Q)
      return add_levels_of<Bits, N, Q - 1>(rows, out, stride, digits, tiles, count, width, ahead);
  add_fields<Bits, N, Q>(out, stride, digits, tiles, count, width, ahead);
}
#endif

// Whether strips of values of `width` bytes, of heads of `dim`, are met as they lie.
inline bool meets_levels([[maybe_unused]] int bits, [[maybe_unused]] int width, [[maybe_unused]] int dim) {
#if defined(KVSERVE_QUADS)
  return (width == 4 || width == 8 || width % kSixteen == 0) && width * Strips::fields(bits) == dim;
#else
  return false;
#endif
}

// out[num_rows, dim] += weights . values of `count` tiles, whose steps and lows are `of`'s.
template <bool Fine>
void add_levels([[maybe_unused]] float* out, [[maybe_unused]] int stride,
                [[maybe_unused]] int num_rows, [[maybe_unused]] const float* weights,
                [[maybe_unused]] const uint8_t* const* tiles, [[maybe_unused]] int count,
                [[maybe_unused]] const Strips& strips, [[maybe_unused]] const Steps& of,
                [[maybe_unused]] Ahead& ahead) {
#if defined(KVSERVE_QUADS)
  constexpr int N = 2 + Fine, kRows = Fine ? 4 : 6;  // whose sums registers hold
  WeightDigits<N> digits[kRows];
  const int turns = (num_rows + kRows - 1) / kRows;
  for (int turn = 0, i = 0, some; turn < turns; ++turn, i += some) {
    some = num_rows * (turn + 1) / turns - i;
    for (int q = 0; q < some; ++q)
      find_weight_digits<N>(weights + (i + q) * kTileEntries, count, of, digits[q]);
    with_bits(strips.bits, [&](auto bits) {
      add_levels_of<bits, N, kRows>(some, out + i * stride, stride, digits, tiles, count, strips.width, ahead);
    });
  }
#endif
}

// Values of `count` tiles as numbers: to[16 * count, dim].
inline void widen_levels(const uint8_t* const* tiles, int count, const Strips& strips, int dim,
                         const Steps& of, float* to) {
  typedef Lanes<8> X;
  const int width = strips.width, bits = strips.bits;
  const uint32_t mask = (1 << bits) - 1;
  for (int tile = 0; tile < count; ++tile)
    for (int quad = 0; quad < 4; ++quad)
      for (int j = 0; j < width; j += 8) {
        const int some = std::min(8, width - j);
        X::U x[3] = {};
        for (int strip = 0; strip < strips.count; ++strip)
          std::memcpy(&x[strip], tiles[tile] + strip * kSixteen * width + 4 * (quad * width + j), 4 * some);
        for (int entry = 0; entry < 4; ++entry) {
          const int k = tile * kSixteen + 4 * quad + entry;
          for (int field = 0; field < Strips::fields(bits); ++field) {
            X::U levels;
            if (bits != 3)
              levels = x[0] >> (8 * entry + bits * field) & mask;
            else if (field < 6)
              levels = x[field / 2] >> (8 * entry + field % 2 * 3) & mask;
            else
              levels = (x[field - 6] >> (8 * entry + 6) & 3u) | (x[2] >> (8 * entry + 13 - field) & 1u) << 2;
            const int channel = field * width + j, left = std::min(some, dim - channel);
            if (left <= 0) continue;
            const X::F numbers = __builtin_convertvector((X::I)levels, X::F) * of.steps[k] + of.lows[k];
            X::store(to + k * dim + channel, numbers, left);
          }
        }
      }
}

}  // namespace
