// Weights of a tile times its values, for any form of values.
//
// Where numbers are computed as bfloat16, and a CPU multiplies pairs of 16-bit numbers, two entries
// meet at a time: weights are rounded to bfloat16 beside values of bfloat16, as other engines round
// them, and of e4m3, which are numbers of bfloat16 as well; and beside levels of int8 and int4 to 16
// bits of the tile's largest, so that their sums are whole numbers, exact in int32
// (64 * 127 * 32767 < 2 ** 31). How many rows of weights there are does not change the order of a sum.

#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "ahead.h"
#include "lanes.h"

namespace {

constexpr int kMaxVectors = kMaxLanes / 4;

// ---- out[Q, V * W] += a[Q, depth] . rows[depth][V * W], number by number ------------------------

// int4: columns are those of both halves in turns, W each.
template <int W, int Q, int V, typename T>
inline void multiply(float* out, int stride, const float* a, int a_stride, const void* const* rows,
                     int column, int depth,
                     Ahead& ahead) {
  constexpr int per_item = std::is_same_v<T, int4x2> ? 2 : 1;
  typedef Lanes<W> X;
  typename X::F sum[Q][V];
  for (int q = 0; q < Q; ++q)
    for (int v = 0; v < V; ++v) sum[q][v] = X::load(out + q * stride + v * W);
  constexpr int kLines = std::max<int>(1, V * W * sizeof(T) / per_item / 64);
  for (int k = 0; k < depth; ++k) {
    ahead.fetch<kLines>();
    const T* row = static_cast<const T*>(rows[k]) + column / per_item;
    typename X::F b[V];
    if constexpr (per_item == 2) {
      for (int v = 0; v + 1 < V; v += 2) X::load(row + v / 2 * W, b[v], b[v + 1]);
    } else {
      for (int v = 0; v < V; ++v) b[v] = X::load(row + v * W);
    }
    for (int q = 0; q < Q; ++q)
      for (int v = 0; v < V; ++v) sum[q][v] += a[q * a_stride + k] * b[v];
  }
  for (int q = 0; q < Q; ++q)
    for (int v = 0; v < V; ++v) X::store(out + q * stride + v * W, sum[q][v]);
}

// Up to Q rows.
template <int W, int Q, typename T>
void multiply_rows(int num_rows, float* out, int stride, int width, const float* a, int a_stride,
                   const void* const* rows, int depth, Ahead& ahead) {
  if constexpr (Q > 1)
    if (num_rows < Q)
      return multiply_rows<W, Q - 1, T>(num_rows, out, stride, width, a, a_stride, rows, depth, ahead);
  int at = 0;
  for (; at + kMaxVectors * W <= width; at += kMaxVectors * W)
    multiply<W, Q, kMaxVectors, T>(out + at, stride, a, a_stride, rows, at, depth, ahead);
  for (; at + 2 * W <= width; at += 2 * W)
    multiply<W, Q, 2, T>(out + at, stride, a, a_stride, rows, at, depth, ahead);
  if constexpr (!std::is_same_v<T, int4x2>)
    if (at < width) multiply<W, Q, 1, T>(out + at, stride, a, a_stride, rows, at, depth, ahead);
}

// width: a multiple of W; of int4, of 2 W.
template <int W, typename T>
void multiply_all(float* out, int stride, int num_rows, int width, const float* a, int a_stride,
                  const void* const* rows, int depth, Ahead& ahead) {
  constexpr int kMost = kMaxLanes == 8 ? 6 : 4;  // whose sums registers hold
  const int turns = (num_rows + kMost - 1) / kMost;
  for (int turn = 0; turn < turns; ++turn) {
    const int first = num_rows * turn / turns, count = num_rows * (turn + 1) / turns - first;
    multiply_rows<W, kMost, T>(count, out + first * stride, stride, width, a + first * a_stride,
                               a_stride, rows, depth, ahead);
  }
}

// ---- out[Q, width] += weights[Q, depth] . rows[depth][width], two entries at a time --------------

#if defined(__AVX512BW__)
// Of 32 numbers as they are loaded, or of the lower and the upper halves of 32 bytes of int4.
template <typename T>
struct PairsOf {
  static constexpr bool kIs = std::is_same_v<T, int8> || std::is_same_v<T, int4x2>;
  static constexpr int kWidth = std::is_same_v<T, int4x2> ? 64 : 32;  // numbers of a step
  static constexpr int kLines = 1;  // that two entries take
  static constexpr int kRows = kWidth == 64 ? 4 : 8;  // whose sums registers hold
  typedef __m512i Sum;

  static inline Sum zero() { return _mm512_setzero_si512(); }
  static inline Sum add(Sum sum, __m512i a, __m512i b) {
#if defined(__AVX512VNNI__)
    return _mm512_dpwssd_epi32(sum, a, b);
#else
    return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
  }
  static inline __m512 as_float(Sum sum) { return _mm512_cvtepi32_ps(sum); }
  static inline __m512i load(const T* from) {
    const __m256i bytes = _mm256_loadu_si256((const __m256i*)from);
    return std::is_same_v<T, int8> ? _mm512_cvtepi8_epi16(bytes) : _mm512_cvtepu8_epi16(bytes);
  }
};

#if defined(__AVX512BF16__)
template <>
struct PairsOf<bf16> {
  static constexpr bool kIs = true;
  static constexpr int kWidth = 32;
  static constexpr int kLines = 2;
  static constexpr int kRows = 8;
  typedef __m512 Sum;

  static inline Sum zero() { return _mm512_setzero_ps(); }
  static inline Sum add(Sum sum, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
  static inline __m512 as_float(Sum sum) { return sum; }
  static inline __m512i load(const bf16* from) { return _mm512_loadu_si512(from); }
};
#endif

#if defined(KVSERVE_E4M3_PAIRS)
template <>
struct PairsOf<e4m3> : PairsOf<bf16> {  // as which they are met
  static constexpr int kLines = 1;

  static inline __m512i load(const e4m3* from) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)from));
  }
};
#endif

// Q rows of weights, pairs of 16 bits, times the numbers from `column` on.
template <int Q, typename T>
inline void add_pairs(float* out, int stride, const int32_t* pairs, int apart, const float* steps,
                      const void* const* rows, int64_t offset, int column, int depth,
                      Ahead& ahead) {
  typedef PairsOf<T> P;
  constexpr int kVectors = P::kWidth / 16, kItems = std::is_same_v<T, int4x2> ? 2 : 1;
  const int64_t at = offset + column / kItems * (int64_t)sizeof(T);
  typename P::Sum sums[Q][kVectors];
  for (int q = 0; q < Q; ++q)
    for (int v = 0; v < kVectors; ++v) sums[q][v] = P::zero();
  for (int k = 0; k < depth; k += 2) {
    ahead.fetch<P::kLines>();
    const __m512i a = P::load(reinterpret_cast<const T*>(static_cast<const char*>(rows[k]) + at));
    const __m512i b = P::load(reinterpret_cast<const T*>(static_cast<const char*>(rows[k + 1]) + at));
    __m512i both[kVectors];
    if constexpr (std::is_same_v<T, e4m3>) {
      widened_e4m3(_mm512_or_si512(a, _mm512_slli_epi16(b, 8)), both[0], both[1]);
    } else {
      both[0] = _mm512_unpacklo_epi16(a, b);
      both[1] = _mm512_unpackhi_epi16(a, b);
    }
    if constexpr (kItems == 2) {
      const __m512i levels = _mm512_set1_epi16(15);
      for (int v = 0; v < 2; ++v) {
        both[v + 2] = _mm512_srli_epi16(both[v], 4);
        both[v] = _mm512_and_si512(both[v], levels);
      }
    }
    for (int q = 0; q < Q; ++q) {
      const __m512i weight = _mm512_set1_epi32(pairs[q * apart + k / 2]);
      for (int v = 0; v < kVectors; ++v) sums[q][v] = P::add(sums[q][v], weight, both[v]);
    }
  }
  // Unpacking has put numbers 0 to 3 of every eight into the first vector.
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  for (int q = 0; q < Q; ++q) {
    const __m512 step = _mm512_set1_ps(steps[q]);
    for (int v = 0; v < kVectors; v += 2) {
      const __m512 low = P::as_float(sums[q][v]), high = P::as_float(sums[q][v + 1]);
      float* to = out + q * stride + column + (kItems == 2 ? v / 2 * 16 : 0);
      const __m512 parts[2] = {_mm512_permutex2var_ps(low, first, high),
                               _mm512_permutex2var_ps(low, second, high)};
      for (int i = 0; i < 2; ++i, to += 16 * kItems)
        _mm512_storeu_ps(to, _mm512_fmadd_ps(parts[i], step, _mm512_loadu_ps(to)));
    }
  }
}

// Up to Q rows, from the first on.
template <int Q, typename T>
void add_pairs_of(float* out, int stride, int num_rows, int width, const int32_t* pairs, int apart,
                  const float* steps, const void* const* rows, int64_t offset, int depth,
                  Ahead& ahead) {
  if constexpr (Q > 1)
    if (num_rows < Q)
      return add_pairs_of<Q - 1, T>(out, stride, num_rows, width, pairs, apart, steps, rows, offset, depth, ahead);
  for (int column = 0; column < width; column += PairsOf<T>::kWidth)
    add_pairs<Q, T>(out, stride, pairs, apart, steps, rows, offset, column, depth, ahead);
}
#endif

// Whether values of T, `width` numbers each, are met in pairs.
template <int W, typename T>
inline bool in_pairs([[maybe_unused]] int width) {
#if defined(__AVX512BW__)
  if constexpr (W == 16 && PairsOf<T>::kIs) return width % PairsOf<T>::kWidth == 0;
#endif
  return false;
}

// `count` weights as pairs of 16 bits, and what one of them stands for; count is a multiple of W.
template <int W, typename T>
inline float pair_up(const float* weights, int count, int32_t* pairs) {
  typedef Lanes<W> X;
  if constexpr (std::is_same_v<T, bf16> || std::is_same_v<T, e4m3>) {
    for (int v = 0; v < count; v += W)
      X::store(reinterpret_cast<bf16*>(pairs) + v, X::load(weights + v));
    return 1.0f;
  } else {
    typename X::F highest = {}, odd = {};
    for (int v = 0; v < count; v += W) {
      const auto x = X::load(weights + v);
      highest = x > highest ? x : highest;
      odd += x * 0.0f;
    }
    const float largest = X::largest(highest);
    const float inverse = largest > 0.0f ? 32767.0f / largest : 0.0f;
    for (int v = 0; v < count; v += W) {
      const auto steps = X::load(weights + v) * inverse + 12582912.0f;  // to nearest, ties to even
      const auto levels = resized<typename X::H>((typename X::U)steps);
      std::memcpy(reinterpret_cast<uint16_t*>(pairs) + v, &levels, sizeof levels);
    }
    return largest / 32767.0f + X::total(odd);  // what is not finite stays so
  }
}

// out[num_rows, width] += weights . rows in pairs; apart: numbers between rows of weights.
template <int W, typename T>
void add_in_pairs(float* out, int stride, int num_rows, int width, const float* weights, int apart,
                  const void* const* rows, int64_t offset, int depth,
                  Ahead& ahead) {
#if defined(__AVX512BW__)
  if constexpr (W == 16 && PairsOf<T>::kIs) {
    constexpr int kRows = PairsOf<T>::kRows;
    alignas(64) int32_t pairs[kRows * 64];
    const int count = (depth + W - 1) / W * W;
    for (int i = 0; i < num_rows; i += kRows) {
      const int some = std::min(kRows, num_rows - i);
      float steps[kRows];
      for (int q = 0; q < some; ++q)
        steps[q] = pair_up<W, T>(weights + (i + q) * apart, count, pairs + q * 64);
      add_pairs_of<kRows, T>(out + i * stride, stride, some, width, pairs, 64, steps, rows, offset, depth, ahead);
    }
  }
#endif
}

}  // namespace
