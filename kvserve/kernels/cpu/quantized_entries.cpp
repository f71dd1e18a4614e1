// Keys and values that are held as levels: rounded when they are stored, widened when an event looks
// at them, moved as they are. quantized_entries.py has the reference of each.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "lanes.h"

namespace {

enum Form : int64_t { kInt8 = 1, kInt4, kFp8 };

}  // namespace

// What the launchers pass; it mirrors these fields. Of each entry of a lane (a layer and KV head), in
// blocks block_stride, layers layer_stride and heads head_stride bytes apart.
extern "C" struct Held {
  uint8_t* levels;   // [B, bytes of a vector]
  uint16_t* scales;  // bfloat16 [B]
  uint16_t* lows;    // bfloat16 [B], of int4
  int64_t form;
};
extern "C" struct Blocks {
  Held keys, values;
  int64_t block_stride, layer_stride, head_stride;
  int64_t num_blocks, num_layers, block_size, heads, dim;
};

namespace {

using V = Lanes<8>;
typedef uint8_t Bytes __attribute__((vector_size(8)));

struct Place {
  uint8_t* levels;
  uint16_t *scale, *low;
};

inline int64_t width(const Blocks& b, const Held& held) {
  return held.form == kInt4 ? b.dim / 2 : b.dim;
}

inline Place at(const Blocks& b, const Held& held, int64_t slot, int64_t layer, int64_t head) {
  const int64_t base = slot / b.block_size * b.block_stride + layer * b.layer_stride +
                       head * b.head_stride;
  const int64_t entry = slot % b.block_size;
  return {held.levels + base + entry * width(b, held), held.scales + base / 2 + entry,
          held.lows ? held.lows + base / 2 + entry : nullptr};
}

inline bool outside(const Blocks& b, int64_t slot) {
  return slot < 0 || slot >= b.num_blocks * b.block_size;
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

// Round one vector and write it.
template <typename T>
void quantize(const T* x, const Blocks& b, const Held& held, const Place& to) {
  V::F highest = V::F{} - INFINITY, lowest = V::F{} + INFINITY;
  for (int64_t d = 0; d < b.dim; d += 8) {
    V::F numbers = V::load(x + d);
    if (held.form != kInt4) numbers = magnitude(numbers);
    highest = numbers > highest ? numbers : highest;
    lowest = numbers < lowest ? numbers : lowest;
  }
  const float most = V::largest(highest);
  if (held.form == kInt4) {
    const uint16_t low_bits = above(V::largest(-lowest)) ^ 0x8000;
    const float low = as_float(low_bits);
    const uint16_t scale_bits = above((most - low) / 15.0f);
    const float scale = as_float(scale_bits), divisor = scale > 0.0f ? scale : 1.0f;
    *to.scale = scale_bits;
    *to.low = low_bits;
    for (int64_t d = 0; d < b.dim / 2; d += 8) {
      const V::F one = (V::load(x + d) - low) / divisor;
      const V::F other = (V::load(x + d + b.dim / 2) - low) / divisor;
      const V::I levels = __builtin_convertvector(rounded(one, 0.0f, 15.0f), V::I) |
                          __builtin_convertvector(rounded(other, 0.0f, 15.0f), V::I) << 4;
      const Bytes bytes = __builtin_convertvector(levels, Bytes);
      std::memcpy(to.levels + d, &bytes, sizeof bytes);
    }
    return;
  }
  const float end = held.form == kFp8 ? 448.0f : 127.0f;
  *to.scale = above(most / end);
  const float scale = as_float(*to.scale), divisor = scale > 0.0f ? scale : 1.0f;
  for (int64_t d = 0; d < b.dim; d += 8) {
    const V::F numbers = V::load(x + d) / divisor;
    V::I levels;
    if (held.form == kFp8)
      levels = (V::I)e4m3_bits(numbers);
    else
      levels = __builtin_convertvector(rounded(numbers, -127.0f, 127.0f), V::I);
    const Bytes bytes = __builtin_convertvector(levels, Bytes);
    std::memcpy(to.levels + d, &bytes, sizeof bytes);
  }
}

template <typename T>
void widen(const Blocks& b, const Held& held, const Place& from, T* to) {
  const float scale = as_float(*from.scale);
  if (held.form == kInt4) {
    const float low = as_float(*from.low);
    for (int64_t d = 0; d < b.dim / 2; d += 8) {
      V::F lower, upper;
      V::load((const int4x2*)from.levels + d, lower, upper);
      V::store(to + d, lower * scale + low);
      V::store(to + d + b.dim / 2, upper * scale + low);
    }
    return;
  }
  for (int64_t d = 0; d < b.dim; d += 8) {
    const V::F levels = held.form == kFp8 ? V::load((const e4m3*)from.levels + d)
                                          : V::load((const int8*)from.levels + d);
    V::store(to + d, levels * scale);
  }
}

void copy(const Blocks& b, const Held& held, const Place& from, const Place& to) {
  std::memcpy(to.levels, from.levels, width(b, held));
  *to.scale = *from.scale;
  if (to.low) *to.low = *from.low;
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
  for (int64_t t = 0; t < c.num_tokens; ++t)
    for (int64_t head = 0; head < c.num_tables * b.heads; ++head) {
      const int64_t slot = c.slots[head / b.heads * c.num_tokens + t];
      const T* key = static_cast<const T*>(c.key) + t * c.key_stride + head * b.dim;
      const T* value = static_cast<const T*>(c.value) + t * c.value_stride + head * b.dim;
      quantize(key, b, b.keys, at(b, b.keys, slot, c.layer, head % b.heads));
      quantize(value, b, b.values, at(b, b.values, slot, c.layer, head % b.heads));
    }
}

}  // namespace

// 1 for a slot that is not in the pool; nothing has been written then.
extern "C" int kvserve_store_levels(const StoreLevels* call) {
  const StoreLevels& c = *call;
  for (int64_t i = 0; i < c.num_tables * c.num_tokens; ++i)
    if (outside(c.blocks, c.slots[i])) {
      *c.fault = c.slots[i];
      return 1;
    }
  c.is_bf16 ? store<bf16>(c) : store<float>(c);
  return 0;
}

extern "C" struct GatherLevels {
  Blocks blocks;
  void* out;                // [L', H, S, D]
  const int64_t* slots;     // [L', H, S]
  const int64_t* layers;    // [L']
  int64_t* fault;
  int64_t num_layers, num_heads, length, values, is_bf16;  // values: gather these, not keys
};

extern "C" int kvserve_gather_levels(const GatherLevels* call) {
  const GatherLevels& c = *call;
  const Blocks& b = c.blocks;
  const Held& held = c.values ? b.values : b.keys;
  for (int64_t lane = 0; lane < c.num_layers * c.num_heads; ++lane) {
    const int64_t layer = c.layers[lane / c.num_heads] % b.num_layers;
    for (int64_t i = lane * c.length; i < (lane + 1) * c.length; ++i) {
      if (outside(b, c.slots[i])) {
        *c.fault = c.slots[i];
        return 1;
      }
      const Place from = at(b, held, c.slots[i], layer, lane % c.num_heads % b.heads);
      if (c.is_bf16)
        widen(b, held, from, static_cast<bf16*>(c.out) + i * b.dim);
      else
        widen(b, held, from, static_cast<float*>(c.out) + i * b.dim);
    }
  }
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
  for (int64_t i = 0; i < c.num_layers * c.num_heads * c.length; ++i)
    for (int64_t slot : {c.src[i], c.dst[i]})
      if (outside(b, slot)) {
        *c.fault = slot;
        return 1;
      }
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
