// Queries and weights with tiles of 16 entries in few bits, which lie in memory as they are met: no
// transposition, no gather. Queries and weights are rounded as logits.h and values.h say, so sums of
// products with levels are whole numbers, exact in int32: nothing depends on who else is in a call.

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

// Sums of Q rounded queries, `apart` numbers apart, with the levels of a tile's keys: [Q][16].
template <int Bits, int Q>
inline void level_sums(const uint8_t* strips, int width, const int32_t* queries, int apart,
                       float* to, int to_apart, Ahead& ahead) {
  typedef LevelWords C;
  typedef Lanes<kMaxLanes> X;
  for (int half = 0; half < kSixteen; half += kMaxLanes) {
    typename C::Sum even[Q] = {}, odd[Q] = {};
    each_word<Bits>(strips, width, half, ahead, [&](int w, X::U levels) {
      typename C::Number first = (typename C::Number)levels, second = first;
      if constexpr (!C::kBytes) {
        first = (typename C::Number)(levels & 0x00ff00ffu);
        second = (typename C::Number)(levels >> 8 & 0x00ff00ffu);
      }
#pragma GCC unroll 4
      for (int q = 0; q < Q; ++q) {
        even[q] = C::add(even[q], queries[q * apart + 2 * w], first);
        odd[q] = C::add(odd[q], queries[q * apart + 2 * w + 1], second);
      }
    });
    for (int q = 0; q < Q; ++q)
      X::store(to + q * to_apart + half, __builtin_convertvector(C::joined(even[q], odd[q]), X::F));
  }
}

// Of up to Q queries.
template <int Bits, int Q>
void level_sums_of(int count, const uint8_t* strips, int width, const int32_t* queries, int apart,
                   float* to, int to_apart, Ahead& ahead) {
  if constexpr (Q > 1)
    if (count < Q)
      return level_sums_of<Bits, Q - 1>(count, strips, width, queries, apart, to, to_apart, ahead);
  level_sums<Bits, Q>(strips, width, queries, apart, to, to_apart, ahead);
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

// out[Q, ...] += weights times two fields of the values of `count` tiles.
template <int Bits, int Pair, int Q>
inline void add_pair(float* out, int stride, const Digits* digits, const uint8_t* const* tiles,
                     int count, int width, Ahead& ahead) {
  const int quads = width < kSixteen ? kSixteen / width : 1;  // in a line
  const int blocks = width < kSixteen ? 1 : width / kSixteen;
  const int64_t apart = kSixteen * width;
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  // Which of a line's quads each lane is of.
  const __m512i own = quads == 1   ? _mm512_setzero_si512()
                      : quads == 2 ? _mm512_srli_epi32(lanes, 3)
                                   : _mm512_srli_epi32(lanes, 2);
  for (int block = 0; block < blocks; ++block) {
    __m512i high[Q][2], low[Q][2];
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q)
      high[q][0] = high[q][1] = low[q][0] = low[q][1] = _mm512_setzero_si512();
    for (int tile = 0; tile < count; ++tile)
      for (int quad = 0; quad < 4; quad += quads) {
        ahead.fetch<1>();
        __m512i levels[2];
        fields_of<Bits, Pair>(tiles[tile], apart, 4 * (quad * width + block * kSixteen), levels);
        const int at = tile * kSixteen + 4 * quad;
#pragma GCC unroll 8
        for (int q = 0; q < Q; ++q) {
          if (quads == 1) {
#pragma GCC unroll 2
            for (int f = 0; f < 2; ++f) {
              high[q][f] = add_products(high[q][f], levels[f], digits[q].high + at);
              low[q][f] = add_products(low[q][f], levels[f], digits[q].low + at);
            }
            continue;
          }
          const auto spread = [&](const int8_t* from) {
            return _mm512_permutexvar_epi32(
                own, _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)from)));
          };
          const __m512i a = spread(digits[q].high + at);
          const __m512i b = spread(digits[q].low + at);
#pragma GCC unroll 2
          for (int f = 0; f < 2; ++f) {
            high[q][f] = _mm512_dpbusd_epi32(high[q][f], levels[f], a);
            low[q][f] = _mm512_dpbusd_epi32(low[q][f], levels[f], b);
          }
        }
      }
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q)
#pragma GCC unroll 2
      for (int f = 0; f < 2; ++f) {
        const Digits& of = digits[q];
        __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high[q][f], 8), low[q][f]);
        if (quads > 1) sum = _mm512_add_epi32(sum, _mm512_shuffle_i64x2(sum, sum, 0x4e));
        if (quads > 2) sum = _mm512_add_epi32(sum, _mm512_shuffle_i64x2(sum, sum, 0xb1));
        const __m512 step = _mm512_set1_ps(of.step / (1 << kTimes<Bits, Pair>[f]));
        const __mmask16 some = width < kSixteen ? (1 << width) - 1 : 0xffff;
        float* to = out + q * stride + (2 * Pair + f) * width + block * kSixteen;
        const __m512 below = _mm512_add_ps(_mm512_maskz_loadu_ps(some, to), _mm512_set1_ps(of.below));
        _mm512_mask_storeu_ps(to, some, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), step, below));
      }
  }
}

template <int Bits, int Q>
inline void add_pairs_of_fields(float* out, int stride, const Digits* digits,
                                const uint8_t* const* tiles, int count, int width, Ahead& ahead) {
  add_pair<Bits, 0, Q>(out, stride, digits, tiles, count, width, ahead);
  if constexpr (Bits < 4) add_pair<Bits, 1, Q>(out, stride, digits, tiles, count, width, ahead);
  if constexpr (Bits == 3 || Bits == 1) {
    add_pair<Bits, 2, Q>(out, stride, digits, tiles, count, width, ahead);
    add_pair<Bits, 3, Q>(out, stride, digits, tiles, count, width, ahead);
  }
}

// Up to Q rows.
template <int Bits, int Q>
void add_levels_of(int rows, float* out, int stride, const Digits* digits,
                   const uint8_t* const* tiles, int count, int width, Ahead& ahead) {
  if constexpr (Q > 1)
    if (rows < Q)
      return add_levels_of<Bits, Q - 1>(rows, out, stride, digits, tiles, count, width, ahead);
  add_pairs_of_fields<Bits, Q>(out, stride, digits, tiles, count, width, ahead);
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
inline void add_levels([[maybe_unused]] float* out, [[maybe_unused]] int stride,
                       [[maybe_unused]] int num_rows, [[maybe_unused]] const float* weights,
                       [[maybe_unused]] const uint8_t* const* tiles, [[maybe_unused]] int count,
                       [[maybe_unused]] const Strips& strips, [[maybe_unused]] const Steps& of,
                       [[maybe_unused]] Ahead& ahead) {
#if defined(KVSERVE_QUADS)
  constexpr int kRows = 6;  // whose sums registers hold
  Digits digits[kRows];
  const int turns = (num_rows + kRows - 1) / kRows;
  for (int turn = 0, i = 0, some; turn < turns; ++turn, i += some) {
    some = num_rows * (turn + 1) / turns - i;
    for (int q = 0; q < some; ++q)
      find_digits<packed<4>>(weights + (i + q) * kTileEntries, count * kSixteen, of, digits[q]);
    with_bits(strips.bits, [&](auto bits) {
      add_levels_of<bits, kRows>(some, out + i * stride, stride, digits, tiles, count, strips.width, ahead);
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
