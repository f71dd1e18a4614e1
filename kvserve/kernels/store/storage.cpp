// What is done to the blocks of a paged cache, each in one pass: new entries and queries are written to
// their slots, as numbers, as levels (quantized_entries.py has the reference) or as queries in 4 bits;
// entries are read by slot, of all layers and heads, or moved to the front of their rows.
//
// Of scattered sources, those of the entries that follow are fetched meanwhile.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "lanes.h"

namespace {

using V = Lanes<8>;

// 1 if one of the slots is not below `end`, the pool's; nothing has been read or written then.
int refusal(const int64_t* slots, int64_t count, int64_t end, int64_t* fault) {
  for (int64_t i = 0; i < count; ++i)
    if (slots[i] < 0 || slots[i] >= end) {
      *fault = slots[i];
      return 1;
    }
  return 0;
}

}  // namespace

// ---- numbers ------------------------------------------------------------------------------------

// What the launcher passes; it mirrors these fields. Strides and widths are in bytes.
extern "C" struct StoreKV {
  const char* key;       // [T, R * width], tokens key_stride apart
  const char* value;
  char* keys;            // [num_blocks, B * width], blocks block_stride apart
  char* values;
  const int64_t* slots;  // [R, T]
  int64_t* fault;        // the slot that was refused
  int64_t key_stride, value_stride, block_stride;
  int64_t num_tokens, num_blocks, block_size, num_tables, width;
};

extern "C" int kvserve_store_kv(const StoreKV* call) {
  const StoreKV& c = *call;
  if (refusal(c.slots, c.num_tables * c.num_tokens, c.num_blocks * c.block_size, c.fault)) return 1;
  for (int64_t r = 0; r < c.num_tables; ++r)
    for (int64_t t = 0; t < c.num_tokens; ++t) {
      const int64_t slot = c.slots[r * c.num_tokens + t];
      const int64_t place =
          slot / c.block_size * c.block_stride + slot % c.block_size * c.width;
      std::memcpy(c.keys + place, c.key + t * c.key_stride + r * c.width, c.width);
      std::memcpy(c.values + place, c.value + t * c.value_stride + r * c.width, c.width);
    }
  return 0;
}

// Strides are in elements.
extern "C" struct StoreQueries {
  const void* query;     // [T, R * heads * group, dim], tokens query_stride apart
  void* log;             // [num_blocks, B, heads, dim], blocks block_stride apart
  const int64_t* slots;  // [R, T]
  int64_t* fault;        // the slot that was refused
  int64_t query_stride, block_stride;
  int64_t num_tokens, num_blocks, block_size, num_tables, heads, group, dim, is_bf16;
};

namespace {

// The mean of `group` vectors that stand one behind the other.
template <typename T>
void mean(const T* from, T* to, int64_t group, int64_t dim) {
  for (int64_t i = 0; i < dim; i += 8) {
    const int64_t count = dim - i < 8 ? dim - i : 8;
    V::F sum = V::load(from + i, count);
    for (int64_t g = 1; g < group; ++g) sum += V::load(from + g * dim + i, count);
    V::store(to + i, sum / (float)group, count);
  }
}

template <typename T>
void store_queries(const StoreQueries& c) {
  const T* query = static_cast<const T*>(c.query);
  T* log = static_cast<T*>(c.log);
  for (int64_t r = 0; r < c.num_tables; ++r)
    for (int64_t t = 0; t < c.num_tokens; ++t) {
      const int64_t slot = c.slots[r * c.num_tokens + t];
      if (slot < c.block_size) continue;  // block 0 takes queries that are not logged
      T* to = log + slot / c.block_size * c.block_stride + slot % c.block_size * c.heads * c.dim;
      const T* from = query + t * c.query_stride + r * c.heads * c.group * c.dim;
      for (int64_t h = 0; h < c.heads; ++h)
        mean(from + h * c.group * c.dim, to + h * c.dim, c.group, c.dim);
    }
}

}  // namespace

extern "C" int kvserve_store_queries(const StoreQueries* call) {
  const StoreQueries& c = *call;
  if (refusal(c.slots, c.num_tables * c.num_tokens, c.num_blocks * c.block_size, c.fault)) return 1;
  c.is_bf16 ? store_queries<bf16>(c) : store_queries<float>(c);
  return 0;
}

// What the launcher passes; it mirrors these fields.
extern "C" struct MoveKV {
  char* cache;           // [num_blocks, block_layers, 2, block_size, block_heads, D], dense
  const int64_t* src;    // [L, H, S], slots
  const int64_t* dst;    // [L, H, S]; gathered: null
  const int64_t* layers; // [L], the layer of each; null: they are 0 to L
  char* out;             // [L, H, S, D]; moved: null
  int64_t* fault;        // the slot that was refused
  int64_t num_layers, num_heads, length;
  int64_t num_blocks, block_layers, block_size, block_heads, width;  // width: bytes of D numbers
  int64_t values;        // gathered: values, not keys
};

namespace {

constexpr int64_t kAhead = 12;  // entries whose memory is asked for before it is their turn

struct Lane {
  char* start;  // of block 0
  int64_t block_bytes, block_size, entry_bytes;

  template <typename Call>
  Lane(const Call& c, int64_t layer, int64_t head, bool values)
      : block_bytes(c.block_layers * 2 * c.block_size * c.block_heads * c.width),
        block_size(c.block_size),
        entry_bytes(c.block_heads * c.width) {
    const int64_t place = layer % c.block_layers * 2 + values;
    start = c.cache + place * block_size * entry_bytes + head % c.block_heads * c.width;
  }
  char* at(int64_t slot) const {
    return start + slot / block_size * block_bytes + slot % block_size * entry_bytes;
  }
};

void fetch(const char* from, int64_t width) {
  for (int64_t at = 0; at < width; at += 64) __builtin_prefetch(from + at);
}

}  // namespace

extern "C" int kvserve_gather_kv(const MoveKV* call) {
  const MoveKV& c = *call;
  const int64_t count = c.num_layers * c.num_heads * c.length;
  if (refusal(c.src, count, c.num_blocks * c.block_size, c.fault)) return 1;
  char* out = c.out;
  const int64_t* src = c.src;
  for (int64_t lane = 0; lane < c.num_layers * c.num_heads; ++lane, src += c.length) {
    const int64_t layer = c.layers ? c.layers[lane / c.num_heads] : lane / c.num_heads;
    const Lane from(c, layer, lane % c.num_heads, c.values);
    for (int64_t i = 0; i < c.length; ++i, out += c.width) {
      if (i + kAhead < c.length) fetch(from.at(src[i + kAhead]), c.width);
      std::memcpy(out, from.at(src[i]), c.width);
    }
  }
  return 0;
}

// Keys and values, in order: no destination may be the source of a later entry of its lane. Block 0
// is not used.
extern "C" int kvserve_move_kv(const MoveKV* call) {
  const MoveKV& c = *call;
  const int64_t count = c.num_layers * c.num_heads * c.length, end = c.num_blocks * c.block_size;
  if (refusal(c.src, count, end, c.fault) || refusal(c.dst, count, end, c.fault)) return 1;
  const int64_t *src = c.src, *dst = c.dst;
  for (int64_t lane = 0; lane < c.num_layers * c.num_heads; ++lane) {
    const Lane keys(c, lane / c.num_heads, lane % c.num_heads, false);
    const int64_t values = c.block_size * keys.entry_bytes;
    for (int64_t i = 0; i < c.length; ++i, ++src, ++dst) {
      if (i + kAhead < c.length) {
        const char* later = keys.at(src[kAhead]);
        fetch(later, c.width), fetch(later + values, c.width);
      }
      if (*dst < c.block_size || *src == *dst) continue;
      const char* from = keys.at(*src);
      char* to = keys.at(*dst);
      std::memcpy(to, from, c.width);
      std::memcpy(to + values, from + values, c.width);
    }
  }
  return 0;
}

// What launchers pass for means of entries, keys and values; it mirrors these fields.
extern "C" struct Means {
  const int64_t* slots;   // [L, H, E, S]
  const int64_t* counts;  // [E, L, H], how many of S count
  float *keys, *values;   // [E, L, H, D], dense; 0 where none counts
  float* bias;            // [E, L, H], dense: the logarithm of the count
  int64_t layers, heads, events, length, dim, is_bf16;
};

namespace {

// add(layer, head, slot, values, sum) adds what stands in a slot.
template <typename Add>
void write_means(const Means& m, const Add& add) {
  for (int64_t lane = 0; lane < m.layers * m.heads; ++lane)
    for (int64_t event = 0; event < m.events; ++event) {
      const int64_t* slots = m.slots + (lane * m.events + event) * m.length;
      const int64_t at = event * m.layers * m.heads + lane;
      const int64_t count = std::min(m.counts[at], m.length);
      m.bias[at] = std::log((float)count);
      for (const bool values : {false, true}) {
        float* mean = (values ? m.values : m.keys) + at * m.dim;
        std::fill_n(mean, m.dim, 0.0f);
        for (int64_t i = 0; i < count; ++i)
          add(lane / m.heads, lane % m.heads, slots[i], values, mean);
        for (int64_t d = 0; d < m.dim && count; ++d) mean[d] /= count;
      }
    }
}

}  // namespace

extern "C" struct MeanKV {
  char* cache;  // as of MoveKV
  Means means;
  int64_t* fault;
  int64_t num_blocks, block_layers, block_size, block_heads, width;
};

extern "C" int kvserve_mean_kv(const MeanKV* call) {
  const MeanKV& c = *call;
  const Means& m = c.means;
  const int64_t count = m.layers * m.heads * m.events * m.length;
  if (refusal(m.slots, count, c.num_blocks * c.block_size, c.fault)) return 1;
  write_means(m, [&](int64_t layer, int64_t head, int64_t slot, bool values, float* sum) {
    const char* from = Lane(c, layer, head, values).at(slot);
    const auto add = [&](auto* x) {
      for (int64_t d = 0; d < m.dim; d += 8) V::store(sum + d, V::load(sum + d) + V::load(x + d));
    };
    m.is_bf16 ? add((const bf16*)from) : add((const float*)from);
  });
  return 0;
}

// ---- queries in 4 bits ------------------------------------------------------------------------

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

template <typename T>
int store(const StoreInt4& c) {
  if (refusal(c.slots, c.num_tables * c.num_tokens, c.num_blocks * c.block_size, c.fault)) return 1;
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
  const int64_t count = c.num_layers * c.num_heads * c.length;
  if (refusal(c.slots, count, c.num_blocks * c.block_size, c.fault)) return 1;
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

// ---- levels -------------------------------------------------------------------------------------

// What the launchers pass; it mirrors these fields. Of each entry of a lane (a layer and KV head), in
// blocks block_stride, layers layer_stride and head_stride bytes apart.
extern "C" struct Held {
  uint8_t* levels;  // [B, bytes of a vector]
  uint16_t* steps;  // bfloat16 [B]
  uint16_t* lows;   // likewise; null: levels have a sign, and none is counted from a low
  int64_t bits, e4m3;
};
extern "C" struct Blocks {
  Held keys, values;
  int64_t block_stride, layer_stride, head_stride;
  int64_t num_blocks, num_layers, block_size, heads, dim;
};

namespace {

typedef uint8_t Bytes __attribute__((vector_size(8)));

struct Place {
  uint8_t* levels;
  uint16_t *steps, *lows;
};

inline int64_t width(const Blocks& b, const Held& held) { return b.dim * held.bits / 8; }

inline Place at(const Blocks& b, const Held& held, int64_t slot, int64_t layer, int64_t head) {
  const int64_t base = slot / b.block_size * b.block_stride + layer * b.layer_stride +
                       head * b.head_stride;
  const int64_t entry = slot % b.block_size;
  return {held.levels + base + entry * width(b, held), held.steps + base / 2 + entry,
          held.lows ? held.lows + base / 2 + entry : nullptr};
}

inline int refusal(const Blocks& b, const int64_t* slots, int64_t count, int64_t* fault) {
  return refusal(slots, count, b.num_blocks * b.block_size, fault);
}

inline float as_float(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float x;
  std::memcpy(&x, &wide, sizeof x);
  return x;
}

// The least bfloat16 number that is not below x.
inline uint16_t above(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return (bits >> 31 ? bits : bits + 0xffff) >> 16;
}

inline V::F rounded(V::F x, float least, float most) {
  x = (x + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: to whole numbers, ties to even
  x = x > least ? x : V::F{} + least;
  return x < most ? x : V::F{} + most;
}

inline V::F magnitude(V::F x) { return (V::F)((V::U)x & 0x7fffffffu); }

// Of numbers up to 448.
inline V::U e4m3_bits(V::F x) {
  const V::F size = magnitude(x);
  const V::U bits = (V::U)size;
  const V::U normal = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (120u << 3);
  const V::U small = (V::U)(size + 16384.0f) - (V::U)(V::F{} + 16384.0f);  // in steps of 2^-9
  const V::U code = (V::U)(size < 0x1p-6f ? (V::I)small : (V::I)normal);
  return code | ((V::U)x >> 31 << 7);
}

// Round one vector and write it; `levels` is room for a byte of each channel.
template <typename T>
void quantize(const T* x, const Blocks& b, const Held& held, const Place& to, uint8_t* levels) {
  const int64_t bytes = width(b, held);
  const float most = held.e4m3 ? 448.0f : (1 << (held.bits - !held.lows)) - 1;
  V::F highest = V::F{} - INFINITY, lowest = V::F{} + INFINITY;
  for (int64_t d = 0; d < b.dim; d += 8) {
    V::F numbers = V::load(x + d);
    if (!held.lows) numbers = magnitude(numbers);
    highest = numbers > highest ? numbers : highest;
    lowest = numbers < lowest ? numbers : lowest;
  }
  float low = 0.0f;
  if (held.lows) {
    *to.lows = above(V::largest(-lowest)) ^ 0x8000;
    low = as_float(*to.lows);
  }
  *to.steps = above((V::largest(highest) - low) / most);
  const float step = as_float(*to.steps), divisor = step > 0.0f ? step : 1.0f;
  for (int64_t d = 0; d < b.dim; d += 8) {
    const V::F numbers = (V::load(x + d) - low) / divisor;
    const V::I found = held.e4m3 ? (V::I)e4m3_bits(numbers)
                                 : __builtin_convertvector(
                                       rounded(numbers, held.lows ? 0.0f : -most, most), V::I);
    const Bytes narrow = __builtin_convertvector(found, Bytes);
    std::memcpy(levels + d, &narrow, sizeof narrow);
  }
  std::memcpy(to.levels, levels, bytes);
  if (held.bits == 4)
    for (int64_t j = 0; j < bytes; ++j) to.levels[j] |= levels[bytes + j] << 4;
}

// put(d, numbers, count) takes the numbers of channels d to d + count.
template <typename Put>
inline void widen(const Blocks& b, const Held& held, const Place& from, const Put& put) {
  const uint8_t* levels = from.levels;
  const int64_t dim = b.dim, half = dim / 2;
  const float step = as_float(*from.steps), low = from.lows ? as_float(*from.lows) : 0.0f;
  if (held.bits == 4) {
    for (int64_t d = 0; d < half; d += 8) {  // behind levels there are steps: 8 may be read
      const auto both = (const packed<4>*)(levels + d);
      put(d, V::load_plane(both, 0) * step + low, std::min<int64_t>(8, half - d));
      put(half + d, V::load_plane(both, 1) * step + low, std::min<int64_t>(8, half - d));
    }
  } else if (held.e4m3) {
    for (int64_t d = 0; d < dim; d += 8) put(d, V::load((const e4m3*)levels + d) * step, 8);
  } else {
    for (int64_t d = 0; d < dim; d += 8) put(d, V::load((const int8*)levels + d) * step, 8);
  }
}

void copy(const Blocks& b, const Held& held, const Place& from, const Place& to) {
  std::memcpy(to.levels, from.levels, width(b, held));
  *to.steps = *from.steps;
  if (to.lows) *to.lows = *from.lows;
}

}  // namespace

extern "C" struct StoreLevels {
  Blocks blocks;
  const void* key;       // [T, R * Hb, D], tokens key_stride numbers apart
  const void* value;
  const int64_t* slots;  // [R, T]
  int64_t* fault;        // the slot that was refused
  int64_t key_stride, value_stride, layer, num_tokens, num_tables, is_bf16;
};

namespace {

template <typename T>
void store(const StoreLevels& c) {
  const Blocks& b = c.blocks;
  std::vector<uint8_t> levels(b.dim);
  for (int64_t t = 0; t < c.num_tokens; ++t)
    for (int64_t head = 0; head < c.num_tables * b.heads; ++head) {
      const int64_t slot = c.slots[head / b.heads * c.num_tokens + t];
      const T* key = static_cast<const T*>(c.key) + t * c.key_stride + head * b.dim;
      const T* value = static_cast<const T*>(c.value) + t * c.value_stride + head * b.dim;
      for (const auto& [x, held] : {std::pair{key, &b.keys}, std::pair{value, &b.values}})
        quantize(x, b, *held, at(b, *held, slot, c.layer, head % b.heads), levels.data());
    }
}

}  // namespace

extern "C" int kvserve_store_levels(const StoreLevels* call) {
  const StoreLevels& c = *call;
  if (refusal(c.blocks, c.slots, c.num_tables * c.num_tokens, c.fault)) return 1;
  c.is_bf16 ? store<bf16>(c) : store<float>(c);
  return 0;
}

extern "C" struct GatherLevels {
  Blocks blocks;
  void* out;                // [L', H, S, D]
  float* steps;             // [L', H, S], of levels that are read as they are; null: numbers are
  const int64_t* slots;     // [L', H, S]
  const int64_t* layers;    // [L']; null: they are 0 to L'
  int64_t* fault;
  int64_t num_layers, num_heads, length, values, is_bf16;  // values: gather these, not keys
};

extern "C" int kvserve_gather_levels(const GatherLevels* call) {
  const GatherLevels& c = *call;
  const Blocks& b = c.blocks;
  const Held& held = c.values ? b.values : b.keys;
  const auto put_in = [](auto* to) {
    return [=](int64_t d, V::F x, int64_t count) { V::store(to + d, x, count); };
  };
  if (refusal(b, c.slots, c.num_layers * c.num_heads * c.length, c.fault)) return 1;
  for (int64_t lane = 0; lane < c.num_layers * c.num_heads; ++lane) {
    const int64_t place = lane / c.num_heads;
    const int64_t layer = (c.layers ? c.layers[place] : place) % b.num_layers;
    for (int64_t i = lane * c.length; i < (lane + 1) * c.length; ++i) {
      const Place from = at(b, held, c.slots[i], layer, lane % c.num_heads % b.heads);
      if (c.steps) {
        std::memcpy(static_cast<uint8_t*>(c.out) + i * b.dim, from.levels, b.dim);
        c.steps[i] = as_float(*from.steps);
      } else if (c.is_bf16)
        widen(b, held, from, put_in(static_cast<bf16*>(c.out) + i * b.dim));
      else
        widen(b, held, from, put_in(static_cast<float*>(c.out) + i * b.dim));
    }
  }
  return 0;
}

extern "C" struct MeanLevels {
  Blocks blocks;
  Means means;
  int64_t* fault;
};

extern "C" int kvserve_mean_levels(const MeanLevels* call) {
  const Blocks& b = call->blocks;
  const Means& m = call->means;
  if (refusal(b, m.slots, m.layers * m.heads * m.events * m.length, call->fault)) return 1;
  write_means(m, [&](int64_t layer, int64_t head, int64_t slot, bool values, float* sum) {
    const Held& held = values ? b.values : b.keys;
    const Place from = at(b, held, slot, layer % b.num_layers, head % b.heads);
    widen(b, held, from, [&](int64_t d, V::F x, int64_t count) {
      V::store(sum + d, V::load(sum + d, count) + (m.is_bf16 ? V::rounded<bf16>(x) : x), count);
    });
  });
  return 0;
}

extern "C" struct MoveLevels {
  Blocks blocks;
  const int64_t* src;  // [L, H, S]
  const int64_t* dst;
  int64_t* fault;
  int64_t num_layers, num_heads, length;
};

// In order, so that no destination may be the source of a later entry of its lane.
extern "C" int kvserve_move_levels(const MoveLevels* call) {
  const MoveLevels& c = *call;
  const Blocks& b = c.blocks;
  const int64_t count = c.num_layers * c.num_heads * c.length;
  if (refusal(b, c.src, count, c.fault) || refusal(b, c.dst, count, c.fault)) return 1;
  for (int64_t lane = 0; lane < c.num_layers * c.num_heads; ++lane) {
    const int64_t layer = lane / c.num_heads % b.num_layers, head = lane % c.num_heads % b.heads;
    for (int64_t i = lane * c.length; i < (lane + 1) * c.length; ++i) {
      if (c.dst[i] < b.block_size || c.src[i] == c.dst[i]) continue;  // block 0 is not used
      for (const Held* held : {&b.keys, &b.values})
        copy(b, *held, at(b, *held, c.src[i], layer, head), at(b, *held, c.dst[i], layer, head));
    }
  }
  return 0;
}
