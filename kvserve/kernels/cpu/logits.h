// Logits of a tile: queries times keys, for any form of keys. Keys stand one after another where they
// are held, so a tile is transposed first, four bytes at a time: a column is the same four bytes of W
// keys, from which their numbers are taken without a sum over lanes. How many queries there are does
// not change the order of a sum.
//
// Where numbers are computed as bfloat16, whole levels meet queries that are rounded to 16 bits of
// their largest number (15, as two bytes, where a CPU multiplies bytes and levels have no sign). The sums are whole numbers then, exact in int32 (256 * 127 * 32767 < 2 ** 31),
// and a logit is off by at most the sum of the key's magnitudes times half a step, 1 / 65534 of the
// query's largest number: less than a 200th of what the query's own bfloat16 is off by. Keys of e4m3
// are numbers of bfloat16 as well, and meet queries as they are.

#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "ahead.h"
#include "lanes.h"

namespace {

constexpr int kColumnBytes = 16;  // of a key are transposed at a time: four columns
#if defined(__AVX2__)
typedef __m128i Bytes;
#else
typedef char Bytes;
#endif

// Of every four lanes two from each: the first two in turns, or the last two.
template <int W, int From, int... L>
inline typename Lanes<W>::F in_turns(typename Lanes<W>::F a, typename Lanes<W>::F b,
                                     std::integer_sequence<int, L...>) {
  typedef typename Lanes<W>::I I;
  return __builtin_shuffle(a, b, I{((L & 1) * W + (L & ~3) + From + (L >> 1 & 1))...});
}
template <int W, int From, int... L>
inline typename Lanes<W>::F pairs_in_turns(typename Lanes<W>::F a, typename Lanes<W>::F b,
                                           std::integer_sequence<int, L...>) {
  typedef typename Lanes<W>::I I;
  return __builtin_shuffle(a, b, I{((L >> 1 & 1) * W + (L & ~3) + From + (L & 1))...});
}

// Squares of 4 by 4, side by side.
template <int W>
inline void transpose(typename Lanes<W>::F* rows) {
  typedef typename Lanes<W>::F F;
  const std::make_integer_sequence<int, W> all;
  const F a = in_turns<W, 0>(rows[0], rows[1], all), b = in_turns<W, 2>(rows[0], rows[1], all);
  const F c = in_turns<W, 0>(rows[2], rows[3], all), d = in_turns<W, 2>(rows[2], rows[3], all);
  rows[0] = pairs_in_turns<W, 0>(a, c, all), rows[1] = pairs_in_turns<W, 2>(a, c, all);
  rows[2] = pairs_in_turns<W, 0>(b, d, all), rows[3] = pairs_in_turns<W, 2>(b, d, all);
}

// What a column holds of its keys, and what a query is for it.
template <typename Key, int W, bool Rounds>
struct Column : Lanes<W> {
  using typename Lanes<W>::F;
  using typename Lanes<W>::I;
  using typename Lanes<W>::U;
#if defined(__AVX512BF16__)
  static constexpr bool kWhole = std::is_same_v<Key, bf16> && W == 16;
#else
  static constexpr bool kWhole = false;
#endif
#if defined(KVSERVE_E4M3_PAIRS)
  static constexpr bool kWidens = Rounds && std::is_same_v<Key, e4m3> && W == 16;
#else
  static constexpr bool kWidens = false;
#endif
  static constexpr bool kRounds = Rounds && (std::is_same_v<Key, int8> || Planes<Key>::kLow);
#if defined(__AVX512VNNI__)
  static constexpr bool kBytes = Rounds && Planes<Key>::kLow && W == 16;
#else
  static constexpr bool kBytes = false;
#endif
  static constexpr bool kPairs = kWhole || kRounds || kWidens;  // a term is a product of pairs
  static constexpr int kTerms = kWhole ? 1 : kRounds || kWidens ? 2 : 4 / sizeof(Key);
  typedef std::conditional_t<kWidens, int64_t, std::conditional_t<kPairs, int32_t, float>> Query;
  typedef std::conditional_t<kPairs, I, F> Number;
  typedef std::conditional_t<kRounds, I, F> Sum;

  // Number `term` of each key; where queries are rounded, the even or the odd two; of e4m3 as bfloat16,
  // all four of the first or the last two of every four keys.
  static inline Number get(U column, int term) {
    if constexpr (kWhole) {
      return (I)column;
    } else if constexpr (kWidens) {
      return widened(column, term);
    } else if constexpr (kRounds) {
      return term ? upper_bytes(column) : upper_bytes((U)(column << 8));
    } else if constexpr (std::is_same_v<Key, int8>) {
      return __builtin_convertvector((I)(column << (24 - 8 * term)) >> 24, F);
    } else if constexpr (std::is_same_v<Key, bf16>) {
      return (F)(term ? column & 0xffff0000u : column << 16);
    } else if constexpr (std::is_same_v<Key, e4m3>) {
      const I bits = (I)(term == 3 ? column : column << (24 - 8 * term));
      return (F)((bits >> 4) & (I)((U){} + 0x87f00000u)) * 0x1p120f;
    } else {
      return (F)column;
    }
  }

  static inline Sum add(Sum sum, const Query& query, Number numbers) {
    if constexpr (kBytes) {
      // As assembly, since GCC 12 would load what is broadcast apart.
      asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(numbers), "m"(query));
      return sum;
    } else if constexpr (kWidens) {
      typedef int64_t L __attribute__((vector_size(64)));
      return add_pairs(sum, (I)((L){} + query), numbers);
    } else if constexpr (kPairs) {
      return add_pairs(sum, (I){} + query, numbers);
    } else {
      return sum + query * numbers;
    }
  }

  // Products of 16-bit numbers, two a lane, are added up.
  static inline Sum add_pairs(Sum sum, I a, I b) {
#if defined(__AVX512BF16__)
    if constexpr (kWhole || kWidens)
      return (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b);
#endif
#if defined(__AVX512VNNI__)
    if constexpr (kRounds && W == 16)
      return (I)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
    if constexpr (kRounds && W == 16) return sum + (I)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#endif
#if defined(__AVX2__)
    if constexpr (kRounds && W == 8) return sum + (I)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
    if constexpr (kRounds) return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
    return sum;
  }

  // Sums of the even and of the odd terms become those of the keys.
  static inline Sum joined(Sum even, Sum odd) {
    if constexpr (kBytes) return (even << 8) + odd;
#if defined(KVSERVE_E4M3_PAIRS)
    if constexpr (kWidens)
      return (F)_mm512_shuffle_ps((__m512)even, (__m512)odd, 0x88) +
             (F)_mm512_shuffle_ps((__m512)even, (__m512)odd, 0xdd);
#endif
    return even + odd;
  }

 private:
  static inline I widened(U column, int term) {
#if defined(KVSERVE_E4M3_PAIRS)
    if constexpr (kWidens) {
      __m512i half[2];
      widened_e4m3((__m512i)column, half[0], half[1]);
      return (I)half[term];
    }
#endif
    return (I)column;
  }
  static inline I upper_bytes(U x) {
    typedef int16_t Halves __attribute__((vector_size(4 * W)));
    return (I)((Halves)x >> 8);
  }
};

// Up to kColumnBytes of every fourth of W keys.
template <int W, bool Whole>
inline typename Lanes<W>::F load_bytes(const void* const* keys, int64_t at, int held) {
  const auto from = [=](int i) { return (const Bytes*)(static_cast<const char*>(keys[4 * i]) + at); };
#if defined(__AVX512F__)
  if constexpr (Whole && W == 16) {
    __m512i row = _mm512_castsi128_si512(_mm_loadu_si128(from(0)));
    row = _mm512_inserti32x4(row, _mm_loadu_si128(from(1)), 1);
    row = _mm512_inserti32x4(row, _mm_loadu_si128(from(2)), 2);
    return (typename Lanes<W>::F)_mm512_inserti32x4(row, _mm_loadu_si128(from(3)), 3);
  }
#endif
#if defined(__AVX2__)
  if constexpr (Whole && W == 8)
    return (typename Lanes<W>::F)_mm256_set_m128i(_mm_loadu_si128(from(1)),
                                                  _mm_loadu_si128(from(0)));
#endif
  typename Lanes<W>::F row;
  char bytes[4 * W] = {};
  for (int i = 0; i < W / 4; ++i)
    std::memcpy(bytes + kColumnBytes * i, from(i), Whole ? kColumnBytes : held);
  std::memcpy(&row, bytes, sizeof row);
  return row;
}

// Columns of W keys, `stride` apart: of `held` of their bytes, from `at` on.
template <int W, bool Whole>
inline void square_of(const void* const* keys, int64_t at, int held, uint32_t* out, int stride,
                      Ahead& ahead) {
  typename Lanes<W>::F rows[4];
  ahead.fetch<kColumnBytes * W / 128>();  // the other half while logits are summed
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) rows[i] = load_bytes<W, Whole>(keys + i, at, held);
  transpose<W>(rows);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    if (Whole || 4 * i < held) std::memcpy(out + i * stride, &rows[i], 4 * W);
}

// Columns of W keys: of `bytes` of their bytes, from `at` on.
template <int W>
inline void columns_of(const void* const* keys, int64_t at, int bytes, uint32_t* out, int stride,
                       Ahead& ahead) {
  const int64_t end = at + bytes;
  for (; at + kColumnBytes <= end; at += kColumnBytes, out += kColumnBytes / 4 * stride)
    square_of<W, true>(keys, at, kColumnBytes, out, stride, ahead);
  if (at < end) square_of<W, false>(keys, at, end - at, out, stride, ahead);
}

// A few queries meet keys of float32 as they stand: four bytes a number, columns would cost more than
// sums over lanes do.
constexpr int kFewQueries = 4;

template <int W, int Step, int... L>
inline void swap_corners(typename Lanes<W>::F& a, typename Lanes<W>::F& b,
                         std::integer_sequence<int, L...>) {
  typedef typename Lanes<W>::I I;
  const auto upper = __builtin_shuffle(a, b, I{((L & Step) ? W + L - Step : L)...});
  b = __builtin_shuffle(a, b, I{((L & Step) ? W + L : L + Step)...});
  a = upper;
}

// Sums of keys k, k + Step, k + 2 Step, ... below W. Lanes whose numbers are the same below Step
// add up to the logit of one key: k plus that number.
template <int W, int Q, int Step = 1>
inline void dots(const float* queries, int apart, int dim, const void* const* keys, int64_t offset,
                 int k, typename Lanes<W>::F* sums, Ahead& ahead) {
  typedef Lanes<W> X;
  typedef typename X::F F;
  if constexpr (Step == W) {
    for (int q = 0; q < Q; ++q) sums[q] = F{};
    const char* row = static_cast<const char*>(keys[k]) + offset;
    for (int d = 0; d < dim; d += W) {
      const F key = X::load(reinterpret_cast<const float*>(row) + d);
      if (W == 16 || d % 16 == 0) ahead.fetch<1>();
      for (int q = 0; q < Q; ++q) sums[q] += X::load(queries + q * apart + d) * key;
    }
  } else {
    F others[Q];
    dots<W, Q, 2 * Step>(queries, apart, dim, keys, offset, k, sums, ahead);
    dots<W, Q, 2 * Step>(queries, apart, dim, keys, offset, k + Step, others, ahead);
    for (int q = 0; q < Q; ++q) {
      swap_corners<W, Step>(sums[q], others[q], std::make_integer_sequence<int, W>());
      sums[q] += others[q];
    }
  }
}

// Sums of Q queries, `apart` numbers apart, with V vectors of keys. Every two columns fetch `Lines`.
template <typename C, int W, int Q, int V, int Lines>
inline void logits_of(const typename C::Query* queries, int apart, int num_columns,
                      const uint32_t* columns, int stride, typename C::Sum (*sums)[V],
                      Ahead& ahead) {
  typename C::Sum part[2][Q][V] = {};
  for (int j = 0; j < num_columns; j += 2) {
    ahead.fetch<Lines>();
#pragma GCC unroll 8
    for (int term = 0; term < 2 * C::kTerms; ++term) {
      typename C::Number numbers[V];
      const int column = term / C::kTerms;
      for (int v = 0; v < V; ++v) {
        typename C::U bits;
        std::memcpy(&bits, columns + (j + column) * stride + v * W, sizeof bits);
        numbers[v] = C::get(bits, term % C::kTerms);
      }
      for (int q = 0; q < Q; ++q)
        for (int v = 0; v < V; ++v)
          part[term & 1][q][v] =
              C::add(part[term & 1][q][v], queries[q * apart + j * C::kTerms + term], numbers[v]);
    }
  }
  for (int q = 0; q < Q; ++q)
    for (int v = 0; v < V; ++v) sums[q][v] = C::joined(part[0][q][v], part[1][q][v]);
}

}  // namespace
