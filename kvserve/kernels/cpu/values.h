// Weights of a tile times its values, for any form of values.
//
// Where numbers are computed as bfloat16, several entries meet at a time. Values of bfloat16, and of
// e4m3, which are numbers of bfloat16 as well, meet by twos weights that are rounded to bfloat16, as
// other engines round them. Whole levels meet by fours, on CPUs that multiply bytes (VNNI): weights
// times a group's steps are rounded to 15 bits of the tile's largest, as two bytes each, so that their
// sums are whole numbers, exact in int32 (64 * 32639 * 255 < 2 ** 31). How many rows of weights there
// are does not change the order of a sum.

#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "ahead.h"
#include "lanes.h"

namespace {

constexpr int kTileEntries = 64;
constexpr int kMaxVectors = kMaxLanes / 4;

// What a level stands for in each value of a tile.
struct Steps {
  const float *steps, *lows;
};

// W numbers of one plane of entry k.
template <int W, typename T>
inline typename Lanes<W>::F number(const T* from, int plane, const Steps& of, int k) {
  auto x = Lanes<W>::load_plane(from, plane);
  if constexpr (sizeof(T) == 1) x = x * of.steps[k];
  if constexpr (Planes<T>::kLow) x = x + of.lows[k];
  return x;
}

// ---- out[Q, V * W] += a[Q, depth] . rows[depth][V * W], number by number ------------------------

// V vectors of W channels in each plane, from `column` on.
template <int W, int Q, int V, typename T>
inline void multiply(float* out, int stride, int width, const float* a, int a_stride,
                     const void* const* rows, int column, int depth, const Steps& of,
                     Ahead& ahead) {
  typedef Lanes<W> X;
  constexpr int P = Planes<T>::kPlanes;
  int at[V * P];
  for (int v = 0; v < V * P; ++v) at[v] = v % P * (width / P) + column + v / P * W;
  typename X::F sum[Q][V * P];
  for (int q = 0; q < Q; ++q)
    for (int v = 0; v < V * P; ++v) sum[q][v] = X::load(out + q * stride + at[v]);
  constexpr int kLines = std::max<int>(1, V * W * sizeof(T) / 64);
  for (int k = 0; k < depth; ++k) {
    ahead.fetch<kLines>();
    const T* row = static_cast<const T*>(rows[k]) + column;
    typename X::F b[V * P];
    for (int v = 0; v < V * P; ++v) b[v] = number<W>(row + v / P * W, v % P, of, k);
    for (int q = 0; q < Q; ++q)
      for (int v = 0; v < V * P; ++v) sum[q][v] += a[q * a_stride + k] * b[v];
  }
  for (int q = 0; q < Q; ++q)
    for (int v = 0; v < V * P; ++v) X::store(out + q * stride + at[v], sum[q][v]);
}

// Up to Q rows.
template <int W, int Q, typename T>
void multiply_rows(int num_rows, float* out, int stride, int width, const float* a, int a_stride,
                   const void* const* rows, int depth, const Steps& of, Ahead& ahead) {
  if constexpr (Q > 1)
    if (num_rows < Q)
      return multiply_rows<W, Q - 1, T>(num_rows, out, stride, width, a, a_stride, rows, depth, of, ahead);
  constexpr int P = Planes<T>::kPlanes, V = std::max(1, kMaxVectors / P);
  int at = 0;
  for (; at + V * W <= width / P; at += V * W)
    multiply<W, Q, V, T>(out, stride, width, a, a_stride, rows, at, depth, of, ahead);
  if constexpr (V > 2)
    for (; at + 2 * W <= width / P; at += 2 * W)
      multiply<W, Q, 2, T>(out, stride, width, a, a_stride, rows, at, depth, of, ahead);
  if constexpr (V > 1)
    for (; at < width / P; at += W)
      multiply<W, Q, 1, T>(out, stride, width, a, a_stride, rows, at, depth, of, ahead);
}

// width: channels, a multiple of W in each plane.
template <int W, typename T>
void multiply_all(float* out, int stride, int num_rows, int width, const float* a, int a_stride,
                  const void* const* rows, int depth, const Steps& of, Ahead& ahead) {
  // Whose sums registers hold.
  constexpr int kMost = Planes<T>::kPlanes == 4 ? 3 : kMaxLanes == 8 ? 6 : 4;
  const int turns = (num_rows + kMost - 1) / kMost;
  for (int turn = 0; turn < turns; ++turn) {
    const int first = num_rows * turn / turns, count = num_rows * (turn + 1) / turns - first;
    multiply_rows<W, kMost, T>(count, out + first * stride, stride, width, a + first * a_stride,
                               a_stride, rows, depth, of, ahead);
  }
}

// ---- out[Q, width] += weights[Q, depth] . rows[depth][width], two entries at a time --------------

#if defined(__AVX512BF16__)
// Of 32 numbers as they are loaded.
template <typename T>
struct PairsOf {
  static constexpr bool kIs = false;
};
template <>
struct PairsOf<bf16> {
  static constexpr bool kIs = true;
  static constexpr int kLines = 2;  // that two entries take

  static inline __m512i load(const bf16* from) { return _mm512_loadu_si512(from); }
};

#if defined(KVSERVE_E4M3_PAIRS)
template <>
struct PairsOf<e4m3> {  // as bfloat16, as which they are met
  static constexpr bool kIs = true;
  static constexpr int kLines = 1;

  static inline __m512i load(const e4m3* from) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)from));
  }
};
#endif

// Q rows of weights, pairs of bfloat16, times the numbers from `column` on.
template <int Q, typename T>
inline void add_pairs(float* out, int stride, const int32_t* pairs, const void* const* rows,
                      int64_t offset, int column, int depth, Ahead& ahead) {
  typedef PairsOf<T> P;
  const int64_t at = offset + column * (int64_t)sizeof(T);
  __m512 sums[Q][2];
  for (int q = 0; q < Q; ++q) sums[q][0] = sums[q][1] = _mm512_setzero_ps();
  for (int k = 0; k < depth; k += 2) {
    ahead.fetch<P::kLines>();
    const __m512i a = P::load(reinterpret_cast<const T*>(static_cast<const char*>(rows[k]) + at));
    const __m512i b = P::load(reinterpret_cast<const T*>(static_cast<const char*>(rows[k + 1]) + at));
    __m512i both[2];
    if constexpr (std::is_same_v<T, e4m3>) {
      widened_e4m3(_mm512_or_si512(a, _mm512_slli_epi16(b, 8)), both[0], both[1]);
    } else {
      both[0] = _mm512_unpacklo_epi16(a, b);
      both[1] = _mm512_unpackhi_epi16(a, b);
    }
    for (int q = 0; q < Q; ++q) {
      const __m512bh weight = (__m512bh)_mm512_set1_epi32(pairs[q * kTileEntries + k / 2]);
      for (int v = 0; v < 2; ++v)
        sums[q][v] = _mm512_dpbf16_ps(sums[q][v], weight, (__m512bh)both[v]);
    }
  }
  // Unpacking has put numbers 0 to 3 of every eight into the first vector.
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  for (int q = 0; q < Q; ++q) {
    const __m512 parts[2] = {_mm512_permutex2var_ps(sums[q][0], first, sums[q][1]),
                             _mm512_permutex2var_ps(sums[q][0], second, sums[q][1])};
    float* to = out + q * stride + column;
    for (int i = 0; i < 2; ++i, to += 16)
      _mm512_storeu_ps(to, _mm512_add_ps(parts[i], _mm512_loadu_ps(to)));
  }
}

// Up to Q rows, from the first on.
template <int Q, typename T>
void add_pairs_of(float* out, int stride, int num_rows, int width, const int32_t* pairs,
                  const void* const* rows, int64_t offset, int depth, Ahead& ahead) {
  if constexpr (Q > 1)
    if (num_rows < Q)
      return add_pairs_of<Q - 1, T>(out, stride, num_rows, width, pairs, rows, offset, depth, ahead);
  for (int column = 0; column < width; column += 32)
    add_pairs<Q, T>(out, stride, pairs, rows, offset, column, depth, ahead);
}
#endif

// Whether values of T, `width` numbers each, are met in pairs.
template <int W, typename T>
inline bool in_pairs([[maybe_unused]] int width) {
#if defined(__AVX512BF16__)
  if constexpr (W == 16 && PairsOf<T>::kIs) return width % 32 == 0;
#endif
  return false;
}

// out[num_rows, width] += weights . rows in pairs; apart: numbers between rows of weights.
template <int W, typename T>
void add_in_pairs([[maybe_unused]] float* out, [[maybe_unused]] int stride,
                  [[maybe_unused]] int num_rows, [[maybe_unused]] int width,
                  [[maybe_unused]] const float* weights, [[maybe_unused]] const void* const* rows,
                  [[maybe_unused]] int64_t offset, [[maybe_unused]] int depth,
                  [[maybe_unused]] const Steps& of, [[maybe_unused]] Ahead& ahead) {
#if defined(__AVX512BF16__)
  if constexpr (W == 16 && PairsOf<T>::kIs) {
    typedef Lanes<W> X;
    constexpr int kRows = 8;  // whose sums registers hold
    alignas(64) int32_t pairs[kRows * kTileEntries];
    for (int i = 0; i < num_rows; i += kRows) {
      const int some = std::min(kRows, num_rows - i);
      for (int q = 0; q < some; ++q)
        for (int v = 0; v < depth; v += W) {
          auto weight = X::load(weights + (i + q) * kTileEntries + v);
          if constexpr (sizeof(T) == 1) weight *= X::load(of.steps + v);
          X::store(reinterpret_cast<bf16*>(pairs + q * kTileEntries) + v, weight);
        }
      add_pairs_of<kRows, T>(out + i * stride, stride, some, width, pairs, rows, offset, depth, ahead);
    }
  }
#endif
}

// ---- the same, four entries at a time, over levels ----------------------------------------------

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define KVSERVE_QUADS
#endif

// Whether values of T, `width` channels each, are met by fours.
template <int W, typename T>
inline bool in_quads([[maybe_unused]] int width) {
#if defined(KVSERVE_QUADS)
  if constexpr (W == 16 && sizeof(T) == 1 && !std::is_same_v<T, e4m3>)
    return width / Planes<T>::kPlanes % 16 == 0;
#endif
  return false;
}

#if defined(KVSERVE_QUADS)
// Weights times steps, 15 bits each, as the bytes of 256 * high + low.
struct Digits {
  alignas(64) int8_t high[kTileEntries], low[kTileEntries];
  float step;   // what one stands for
  float below;  // the sum of weights times lows; what is not finite stays so by it
  int sum;
};

template <typename T>
inline void find_digits(const float* weights, int depth, const Steps& of, Digits& to) {
  typedef Lanes<16> X;
  X::F products[kTileEntries / 16] = {}, highest = {}, below = {};
  const int count = (depth + 15) / 16;
  for (int v = 0; v < count; ++v) {
    const X::F weight = X::load(weights + 16 * v);
    products[v] = weight * X::load(of.steps + 16 * v);
    highest = products[v] > highest ? products[v] : highest;
    below += Planes<T>::kLow ? weight * X::load(of.lows + 16 * v) : products[v] * 0.0f;
  }
  // A power of two, so that the largest is 16320 to 32639.
  const float largest = std::max(X::largest(highest) * (32768.0f / 32639.0f), 0x1p-100f);
  uint32_t bits;
  std::memcpy(&bits, &largest, sizeof bits);
  const uint32_t up = 0x86000000u - (bits & 0x7f800000u), down = 0x7f000000u - up;  // 2^(14 - e)
  float scale;
  std::memcpy(&scale, &up, sizeof scale);
  std::memcpy(&to.step, &down, sizeof down);
  const __m512i words = _mm512_setr_epi32(
      0x00020000, 0x00060004, 0x000a0008, 0x000e000c, 0x00120010, 0x00160014, 0x001a0018, 0x001e001c,
      0x00220020, 0x00260024, 0x002a0028, 0x002e002c, 0x00320030, 0x00360034, 0x003a0038, 0x003e003c);
  __m512i sum = _mm512_setzero_si512();
  for (int v = 0; v < count; v += 2) {
    const __m512i a = _mm512_cvtps_epi32((__m512)(products[v] * scale));
    const __m512i b = _mm512_cvtps_epi32((__m512)(products[v + 1] * scale));
    const __m512i whole = _mm512_permutex2var_epi16(a, words, b);
    const __m512i high = _mm512_srai_epi16(_mm512_add_epi16(whole, _mm512_set1_epi16(128)), 8);
    _mm256_store_si256((__m256i*)(to.high + 16 * v), _mm512_cvtepi16_epi8(high));
    _mm256_store_si256((__m256i*)(to.low + 16 * v), _mm512_cvtepi16_epi8(whole));
    if constexpr (!Planes<T>::kLow) sum = _mm512_add_epi32(sum, _mm512_add_epi32(a, b));
  }
  to.below = X::total(below);
  to.sum = Planes<T>::kLow ? 0 : _mm512_reduce_add_epi32(sum);
}

// Adds up the products of bytes without a sign and of four bytes with one. Without assembly GCC 12
// copies sums around, and loads the four apart.
inline __m512i add_products(__m512i sum, __m512i bytes, const int8_t* four) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(bytes), "m"(*(const int32_t*)four));
  return sum;
}

// 16 bytes of each of four entries: lane i has the i-th of each.
inline __m512i quads_at(const void* const* rows, int64_t at) {
  const auto from = [=](int k) { return (const __m128i*)(static_cast<const char*>(rows[k]) + at); };
  __m512i x = _mm512_castsi128_si512(_mm_loadu_si128(from(0)));
  x = _mm512_inserti32x4(x, _mm_loadu_si128(from(1)), 1);
  x = _mm512_inserti32x4(x, _mm_loadu_si128(from(2)), 2);
  x = _mm512_inserti32x4(x, _mm_loadu_si128(from(3)), 3);
  const __m512i words = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m128i bytes = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  x = _mm512_permutexvar_epi32(words, x);
  return _mm512_shuffle_epi8(x, _mm512_broadcast_i32x4(bytes));
}

// Q rows times the channels of 16 bytes from `column` on.
template <int Q, typename T>
inline void add_quads(float* out, int stride, int width, const Digits* digits,
                      const void* const* rows, int64_t offset, int column, int depth,
                      Ahead& ahead) {
  constexpr int P = Planes<T>::kPlanes, kBits = Planes<T>::kBits;
  const int plane = width / P;
  __m512i high[Q][P], low[Q][P];
#pragma GCC unroll 8
  for (int q = 0; q < Q; ++q)
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) high[q][p] = low[q][p] = _mm512_setzero_si512();
  for (int k = 0; k < depth; k += 4) {
    ahead.fetch<1>();
    const __m512i bytes = quads_at(rows + k, offset + column);
    __m512i levels[P];  // times 1 << p * kBits; with a sign, 128 more than they are
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p)
      levels[p] = Planes<T>::kLow
                      ? _mm512_and_si512(bytes, _mm512_set1_epi8(((1 << kBits) - 1) << p * kBits))
                      : _mm512_xor_si512(bytes, _mm512_set1_epi8((char)0x80));
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q)
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) {
        high[q][p] = add_products(high[q][p], levels[p], digits[q].high + k);
        low[q][p] = add_products(low[q][p], levels[p], digits[q].low + k);
      }
  }
#pragma GCC unroll 8
  for (int q = 0; q < Q; ++q)
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      const Digits& own = digits[q];
      __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high[q][p], 8), low[q][p]);
      if constexpr (!Planes<T>::kLow) sum = _mm512_sub_epi32(sum, _mm512_set1_epi32(128 * own.sum));
      float* to = out + q * stride + p * plane + column;
      const __m512 below = _mm512_add_ps(_mm512_loadu_ps(to), _mm512_set1_ps(own.below));
      const __m512 step = _mm512_set1_ps(own.step / (1 << p * kBits));
      _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), step, below));
    }
}

// Up to Q rows, from the first on.
template <int Q, typename T>
void add_quads_of(float* out, int stride, int num_rows, int width, const Digits* digits,
                  const void* const* rows, int64_t offset, int depth, Ahead& ahead) {
  if constexpr (Q > 1)
    if (num_rows < Q)
      return add_quads_of<Q - 1, T>(out, stride, num_rows, width, digits, rows, offset, depth, ahead);
  for (int column = 0; column < width / Planes<T>::kPlanes; column += 16)
    add_quads<Q, T>(out, stride, width, digits, rows, offset, column, depth, ahead);
}
#endif

// out[num_rows, width] += weights . rows by fours. Rows go on to a multiple of four.
template <typename T>
void add_in_quads([[maybe_unused]] float* out, [[maybe_unused]] int stride,
                  [[maybe_unused]] int num_rows, [[maybe_unused]] int width,
                  [[maybe_unused]] const float* weights, [[maybe_unused]] const void* const* rows,
                  [[maybe_unused]] int64_t offset, [[maybe_unused]] int depth,
                  [[maybe_unused]] const Steps& of, [[maybe_unused]] Ahead& ahead) {
#if defined(KVSERVE_QUADS)
  if constexpr (sizeof(T) == 1 && !std::is_same_v<T, e4m3>) {
    constexpr int kRows = std::min(8, 12 / Planes<T>::kPlanes);  // whose sums registers hold
    Digits digits[kRows];
    const int turns = (num_rows + kRows - 1) / kRows;
    for (int turn = 0, i = 0, some; turn < turns; ++turn, i += some) {
      some = num_rows * (turn + 1) / turns - i;
      for (int q = 0; q < some; ++q)
        find_digits<T>(weights + (i + q) * kTileEntries, depth, of, digits[q]);
      add_quads_of<kRows, T>(out + i * stride, stride, some, width, digits, rows, offset, depth, ahead);
    }
  }
#endif
}

}  // namespace
