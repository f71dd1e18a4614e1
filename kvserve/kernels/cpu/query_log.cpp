// Logs queries in 4 bits in a paged cache: codes, a scale and a share of attention for each vector, in one
// pass; and reads them as they are.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "lanes.h"

constexpr int kLargestDim = 256;
constexpr float kLevels = 7.0f;
constexpr float kLargestHalf = 65504.0f;

// What the launcher passes; it mirrors these fields. Strides are in elements.
extern "C" struct StoreInt4 {
  const void* query;     // [T, R * heads, dim], tokens query_stride apart
  const float* shares;     // [T, R * heads]
  uint8_t* codes;        // [num_blocks, B, heads, dim / 2], blocks codes_stride apart
  uint16_t* scales;      // [num_blocks, B, heads, 2], blocks scales_stride apart; float16
  const int64_t* slots;  // [R, T]
  int64_t* fault;        // the slot that was refused
  int64_t query_stride, codes_stride, scales_stride;
  int64_t num_tokens, num_blocks, block_size, num_tables, heads, dim, is_bf16;
};

// Likewise. Layers of a block are layer strides apart.
extern "C" struct GatherInt4 {
  const uint8_t* codes;     // as of StoreInt4, of all layers of a block
  const uint16_t* scales;
  const int64_t* slots;     // [L, H, S]
  const int64_t* layers;    // [L], the layer of each; null: they are 0 to L
  uint8_t* codes_out;       // [L, H, S, dim / 2]
  uint16_t* scales_out;     // [L, H, S, 2]
  int64_t* fault;
  int64_t codes_stride, scales_stride, codes_layer_stride, scales_layer_stride;
  int64_t num_layers, num_heads, length;
  int64_t num_blocks, block_layers, block_size, heads, dim;
};

namespace {

// To nearest, ties to even; |x| is at most kLargestHalf.
inline uint16_t to_half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits < 0x38800000) {  // subnormal there: the sum rounds it
    float sum;
    std::memcpy(&sum, &bits, sizeof sum);
    sum += 0.5f;
    std::memcpy(&bits, &sum, sizeof bits);
    return sign | (bits - 0x3f000000);
  }
  return sign | ((bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}

inline float from_half(uint16_t half) {  // not negative
  const uint32_t bits = (uint32_t)half << 13;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number * 0x1p112f;
}

inline float limited(float x, float most) { return std::max(-most, std::min(most, x)); }

template <typename T>
void store_vector(const T* from, float share, int64_t dim, uint8_t* codes, uint16_t* scales) {
  using V = Lanes<8>;
  float x[kLargestDim];
  for (int64_t d = 0; d < dim; d += 8) V::store(x + d, V::load(from + d));
  float largest = 0.0f;
  for (int64_t d = 0; d < dim; ++d) largest = std::max(largest, std::fabs(x[d]));
  scales[0] = to_half(std::min(largest / kLevels, kLargestHalf));
  scales[1] = to_half(limited(share, kLargestHalf));
  const float scale = from_half(scales[0]), inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  uint8_t numbers[kLargestDim];
  for (int64_t d = 0; d < dim; ++d)
    numbers[d] = (uint8_t)((int)limited(std::floor(x[d] * inverse + 0.5f), kLevels) + 8);
  for (int64_t d = 0; d < dim / 2; ++d) codes[d] = numbers[2 * d] | numbers[2 * d + 1] << 4;
}

template <typename Call>
int refusal(const Call& c, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    if (c.slots[i] < 0 || c.slots[i] >= c.num_blocks * c.block_size) {
      *c.fault = c.slots[i];
      return 1;
    }
  return 0;
}

template <typename T>
int store(const StoreInt4& c) {
  if (refusal(c, c.num_tables * c.num_tokens)) return 1;
  for (int64_t r = 0; r < c.num_tables; ++r)
    for (int64_t t = 0; t < c.num_tokens; ++t) {
      const int64_t slot = c.slots[r * c.num_tokens + t];
      if (slot < c.block_size) continue;  // block 0 takes queries that are not logged
      const int64_t block = slot / c.block_size, first = slot % c.block_size * c.heads;
      for (int64_t h = 0; h < c.heads; ++h) {
        const int64_t head = r * c.heads + h;
        store_vector(static_cast<const T*>(c.query) + t * c.query_stride + head * c.dim,
                     c.shares[t * c.num_tables * c.heads + head], c.dim,
                     c.codes + block * c.codes_stride + (first + h) * (c.dim / 2),
                     c.scales + block * c.scales_stride + (first + h) * 2);
      }
    }
  return 0;
}

}  // namespace

extern "C" int kvserve_store_int4(const StoreInt4* call) {
  return call->is_bf16 ? store<bf16>(*call) : store<float>(*call);
}

extern "C" int kvserve_gather_int4(const GatherInt4* call) {
  const GatherInt4& c = *call;
  const int64_t half = c.dim / 2;
  if (refusal(c, c.num_layers * c.num_heads * c.length)) return 1;
  const int64_t* slot = c.slots;
  uint8_t* codes_out = c.codes_out;
  uint16_t* scales_out = c.scales_out;
  for (int64_t lane = 0; lane < c.num_layers * c.num_heads; ++lane) {
    const int64_t layer = c.layers ? c.layers[lane / c.num_heads] : lane / c.num_heads;
    const uint8_t* codes = c.codes + layer % c.block_layers * c.codes_layer_stride;
    const uint16_t* scales = c.scales + layer % c.block_layers * c.scales_layer_stride;
    const int64_t head = lane % c.num_heads % c.heads;
    for (int64_t i = 0; i < c.length; ++i, ++slot, codes_out += half, scales_out += 2) {
      const int64_t block = *slot / c.block_size;
      const int64_t at = (*slot - block * c.block_size) * c.heads + head;
      std::memcpy(codes_out, codes + block * c.codes_stride + at * half, half);
      std::memcpy(scales_out, scales + block * c.scales_stride + at * 2, 2 * sizeof *scales);
    }
  }
  return 0;
}
