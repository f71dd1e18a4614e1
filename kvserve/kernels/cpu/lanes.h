// Vectors of W floats, loaded from float32, bfloat16 or float16 and stored as the first two; and loaded
// from levels, which are widened without their steps.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kMaxLanes = 16;
#else
constexpr int kMaxLanes = 8;
#endif

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};
struct int8 {
  int8_t level;
};
struct e4m3 {
  uint8_t bits;
};
// Levels of Bits without a sign, several a byte. Of a vector of D channels byte j holds channel j, and
// above it j + D / kPlanes and so on: each plane is channels side by side.
template <int Bits>
struct packed {
  uint8_t levels;
};

// How many planes there are, and whether levels count from a low.
template <typename T>
struct Planes {
  static constexpr int kBits = 8, kPlanes = 1;
  static constexpr bool kLow = false;
};
template <int Bits>
struct Planes<packed<Bits>> {
  static constexpr int kBits = Bits, kPlanes = 8 / Bits;
  static constexpr bool kLow = true;
};

template <int W>
struct Vectors;

template <>
struct Vectors<8> {
  typedef float F __attribute__((vector_size(32)));
  typedef double D __attribute__((vector_size(64)));
  typedef int32_t I __attribute__((vector_size(32)));
  typedef uint32_t U __attribute__((vector_size(32)));
  typedef uint16_t H __attribute__((vector_size(16)));
};

template <>
struct Vectors<16> {
  typedef float F __attribute__((vector_size(64)));
  typedef int32_t I __attribute__((vector_size(64)));
  typedef uint32_t U __attribute__((vector_size(64)));
  typedef uint16_t H __attribute__((vector_size(32)));
};

// Between 16 and 32 bits a lane.
template <typename To, typename From>
inline To resized(From x) {
  return __builtin_convertvector(x, To);
}
#if defined(__AVX512F__)  // GCC 12 would do either in two halves
template <>
inline Vectors<16>::U resized(Vectors<16>::H x) {
  return (Vectors<16>::U)_mm512_cvtepu16_epi32((__m256i)x);
}
template <>
inline Vectors<16>::H resized(Vectors<16>::U x) {
  return (Vectors<16>::H)_mm512_cvtepi32_epi16((__m512i)x);
}
#endif

// W bytes, a lane each.
template <int W>
inline typename Vectors<W>::I signed_bytes(const void* from) {
  typedef int8_t B __attribute__((vector_size(W)));
  B bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, typename Vectors<W>::I);
}
template <int W>
inline typename Vectors<W>::U unsigned_bytes(const void* from) {
  typedef uint8_t B __attribute__((vector_size(W)));
  B bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, typename Vectors<W>::U);
}
#if defined(__AVX2__)  // GCC 12 would widen in several steps
template <>
inline Vectors<8>::I signed_bytes<8>(const void* from) {
  return (Vectors<8>::I)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
}
template <>
inline Vectors<8>::U unsigned_bytes<8>(const void* from) {
  return (Vectors<8>::U)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
}
#endif
#if defined(__AVX512F__)
template <>
inline Vectors<16>::I signed_bytes<16>(const void* from) {
  return (Vectors<16>::I)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
}
template <>
inline Vectors<16>::U unsigned_bytes<16>(const void* from) {
  return (Vectors<16>::U)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
}
#endif

#if defined(__F16C__)
// Sign and number where a float16 has them; its exponent is then 8 too small.
template <int W>
inline typename Vectors<W>::F e4m3_numbers(const void* from);
template <>
inline Vectors<8>::F e4m3_numbers<8>(const void* from) {
  const __m128i bits = _mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)from)), 8);
  const __m128i half = _mm_and_si128(_mm_srai_epi16(bits, 1), _mm_set1_epi16((int16_t)0xbf80));
  return (Vectors<8>::F)_mm256_cvtph_ps(half) * 256.0f;
}
#if defined(__AVX512F__)
template <>
inline Vectors<16>::F e4m3_numbers<16>(const void* from) {
  const __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)from));
  const __m256i half = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 1),
                                        _mm256_set1_epi16((int16_t)0xbf80));
  return (Vectors<16>::F)_mm512_cvtph_ps(half) * 256.0f;
}
#endif
#endif

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define KVSERVE_E4M3_PAIRS
// The upper and the lower byte of each number of e4m3, its sign aside, as bfloat16, which holds all.
struct BytesOfE4m3 {
  alignas(64) uint8_t upper[128], lower[128];

  constexpr BytesOfE4m3() : upper(), lower() {
    for (int bits = 0; bits < 128; ++bits) {
      int number = 0x3c00 + (bits << 4);  // as it is where its exponent is not 0
      if (bits < 8) {
        int exponent = 121, fraction = bits << 4;
        while (bits && !(fraction & 0x80)) fraction <<= 1, --exponent;
        number = bits ? (exponent << 7) + (fraction & 0x7f) : 0;
      }
      upper[bits] = number >> 8;
      lower[bits] = number & 0xff;
    }
  }
};
constexpr BytesOfE4m3 kBytesOfE4m3;

// Of every eight numbers of e4m3 the first four as bfloat16, in `first`, and the last four.
inline void widened_e4m3(__m512i numbers, __m512i& first, __m512i& last) {
  const auto byte = [&](const uint8_t* of) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(of), numbers, _mm512_load_si512(of + 64));
  };
  const __m512i sign = _mm512_set1_epi8((char)0x80), lower = byte(kBytesOfE4m3.lower);
  const __m512i upper = _mm512_ternarylogic_epi32(byte(kBytesOfE4m3.upper), numbers, sign, 0xf8);
  first = _mm512_unpacklo_epi8(lower, upper);
  last = _mm512_unpackhi_epi8(lower, upper);
}
#endif

template <int W>
struct Lanes : Vectors<W> {
  using typename Vectors<W>::F;
  using typename Vectors<W>::I;
  using typename Vectors<W>::U;
  using typename Vectors<W>::H;

  static inline F load(const float* from) {
    F x;
    std::memcpy(&x, from, sizeof x);
    return x;
  }
  static inline F load(const bf16* from) {
    H half;
    std::memcpy(&half, from, sizeof half);
    return (F)(resized<U>(half) << 16);
  }
  static inline F load(const fp16* from) {
    H half;
    std::memcpy(&half, from, sizeof half);
#if defined(__AVX512F__)
    if constexpr (W == 16) return (F)_mm512_cvtph_ps((__m256i)half);
#endif
#if defined(__F16C__)
    if constexpr (W == 8) return (F)_mm256_cvtph_ps((__m128i)half);
#endif
    // Sign and number where a float has them; its exponent is then 112 too small.
    const U bits = resized<U>(half);
    return (F)((bits & 0x8000) << 16 | (bits & 0x7fff) << 13) * 0x1p112f;
  }
  static inline F load(const int8* from) {
    return __builtin_convertvector(signed_bytes<W>(from), F);
  }
  static inline F load(const e4m3* from) {
#if defined(__F16C__)  // through float16, whose small numbers cost nothing
    return e4m3_numbers<W>(from);
#else
    // Sign and number where a float has them; its exponent is then 120 too small.
    const I bits = (I)(unsigned_bytes<W>(from) << 24);
    return (F)((bits >> 4) & (I)((U){} + 0x87f00000u)) * 0x1p120f;
#endif
  }
  // Of W channels of one plane.
  template <typename T>
  static inline F load_plane(const T* from, int plane) {
    if constexpr (Planes<T>::kLow) {
      const U levels = unsigned_bytes<W>(from) >> (plane * Planes<T>::kBits);
      return __builtin_convertvector((I)(levels & ((1 << Planes<T>::kBits) - 1)), F);
    } else {
      return load(from);
    }
  }
  // Of both planes of 4 bits, of the first `count` bytes alone; the other channels are zero.
  static inline void load(const packed<4>* from, int64_t count, F& low, F& high) {
    packed<4> part[W] = {};
    std::memcpy(part, from, count);
    if (count != W) from = part;
    low = load_plane(from, 0);
    high = load_plane(from, 1);
  }
  static inline void store(float* to, F x) { std::memcpy(to, &x, sizeof x); }
  static inline void store(bf16* to, F x) {
    const H half = narrowed(x);
    std::memcpy(to, &half, sizeof half);
  }

  // The first `count` lanes alone; the others are zero.
  template <typename T>
  static inline F load(const T* from, int64_t count) {
    if (count == W) return load(from);
    T part[W] = {};
    std::memcpy(part, from, count * sizeof(T));
    return load(part);
  }
  template <typename T>
  static inline void store(T* to, F x, int64_t count) {
    if (count == W) return store(to, x);
    T part[W];
    store(part, x);
    std::memcpy(to, part, count * sizeof(T));
  }

  // x as it would be read back after a store as T.
  template <typename T>
  static inline F rounded(F x) {
    if constexpr (sizeof(T) == sizeof(bf16)) return (F)(resized<U>(narrowed(x)) << 16);
    return x;
  }

  static inline I count() {
    I x;
    for (int i = 0; i < W; ++i) x[i] = i;
    return x;
  }

  // The result of all lanes, by halves.
  static inline float largest(F x) {
#pragma GCC unroll 4
    for (int step = W / 2; step; step /= 2) {
      const F other = __builtin_shuffle(x, count() ^ step);
      x = other > x ? other : x;
    }
    return x[0];
  }
  static inline float total(F x) {
#pragma GCC unroll 4
    for (int step = W / 2; step; step /= 2) x += __builtin_shuffle(x, count() ^ step);
    return x[0];
  }

  // To about 2e-7 relative; beyond -87 and 88 it stays what it is there.
  static inline F exp(F x) {
    x = x > -87.0f ? x : F{} - 87.0f;
    x = x < 88.0f ? x : F{} + 88.0f;
    const F shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to whole numbers
    const F n = shifted - 12582912.0f;
    const F r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    F p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (F)((__builtin_convertvector(n, I) + 127) << 23);
  }

 private:
  // To nearest, ties to even.
  static inline H narrowed(F x) {
#if defined(__AVX512BF16__)
    if constexpr (W == 16) return (H)_mm512_cvtneps_pbh((__m512)x);
#endif
    const U bits = (U)x;
    return resized<H>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
};

}  // namespace
