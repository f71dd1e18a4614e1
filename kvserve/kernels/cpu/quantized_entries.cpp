// Keys and values that are held as levels: rounded when they are stored, widened when an event looks
// at them, moved as they are. quantized_entries.py has the reference of each.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "lanes.h"

// What the launchers pass; it mirrors these fields. Of each entry of a lane (a layer and KV head), in
// blocks block_stride, layers layer_stride and head_stride bytes apart.
extern "C" struct Held {
  uint8_t* levels;  // [B, bytes of a vector]
  uint16_t* steps;  // bfloat16 [groups, B]
  uint16_t* lows;   // likewise; null: levels have a sign, and none is counted from a low
  int64_t bits, e4m3, groups;
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

// Round one vector and write it; `levels` is room for a byte of each channel.
template <typename T>
void quantize(const T* x, const Blocks& b, const Held& held, const Place& to, uint8_t* levels) {
  const int64_t size = b.dim / held.groups, bytes = width(b, held);
  const float most = held.e4m3 ? 448.0f : (1 << (held.bits - !held.lows)) - 1;
  for (int64_t g = 0; g < held.groups; ++g) {
    const T* from = x + g * size;
    V::F highest = V::F{} - INFINITY, lowest = V::F{} + INFINITY;
    for (int64_t d = 0; d < size; d += 8) {
      V::F numbers = V::load(from + d);
      if (!held.lows) numbers = magnitude(numbers);
      highest = numbers > highest ? numbers : highest;
      lowest = numbers < lowest ? numbers : lowest;
    }
    float low = 0.0f;
    if (held.lows) {
      const uint16_t bits = above(V::largest(-lowest)) ^ 0x8000;
      to.lows[g * b.block_size] = bits;
      low = as_float(bits);
    }
    const uint16_t bits = above((V::largest(highest) - low) / most);
    to.steps[g * b.block_size] = bits;
    const float step = as_float(bits), divisor = step > 0.0f ? step : 1.0f;
    for (int64_t d = 0; d < size; d += 8) {
      const V::F numbers = (V::load(from + d) - low) / divisor;
      const V::I found = held.e4m3 ? (V::I)e4m3_bits(numbers)
                                   : __builtin_convertvector(
                                         rounded(numbers, held.lows ? 0.0f : -most, most), V::I);
      const Bytes narrow = __builtin_convertvector(found, Bytes);
      std::memcpy(levels + g * size + d, &narrow, sizeof narrow);
    }
  }
  std::memcpy(to.levels, levels, bytes);
  for (int64_t shift = held.bits; shift < 8; shift += held.bits) {
    levels += bytes;
    for (int64_t j = 0; j < bytes; ++j) to.levels[j] |= levels[j] << shift;
  }
}

template <typename T>
void widen(const Blocks& b, const Held& held, const Place& from, T* to, uint8_t* levels) {
  const int64_t size = b.dim / held.groups, bytes = width(b, held);
  const uint8_t mask = (1 << held.bits) - 1;
  for (int64_t shift = 0; shift < 8; shift += held.bits)
    for (int64_t j = 0; j < bytes; ++j)
      levels[shift / held.bits * bytes + j] = from.levels[j] >> shift & mask;
  for (int64_t d = 0; d < b.dim; d += 8) {
    const int64_t g = d / size * b.block_size;
    const V::F numbers = held.e4m3 ? V::load((const e4m3*)levels + d)
                         : from.lows
                             ? __builtin_convertvector((V::I)unsigned_bytes<8>(levels + d), V::F)
                             : V::load((const int8*)levels + d);
    const float low = from.lows ? as_float(from.lows[g]) : 0.0f;
    V::store(to + d, numbers * as_float(from.steps[g]) + low);
  }
}

void copy(const Blocks& b, const Held& held, const Place& from, const Place& to) {
  std::memcpy(to.levels, from.levels, width(b, held));
  for (int64_t g = 0; g < held.groups * b.block_size; g += b.block_size) {
    to.steps[g] = from.steps[g];
    if (to.lows) to.lows[g] = from.lows[g];
  }
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
  std::vector<uint8_t> levels(b.dim);
  for (int64_t lane = 0; lane < c.num_layers * c.num_heads; ++lane) {
    const int64_t layer = c.layers[lane / c.num_heads] % b.num_layers;
    for (int64_t i = lane * c.length; i < (lane + 1) * c.length; ++i) {
      if (outside(b, c.slots[i])) {
        *c.fault = c.slots[i];
        return 1;
      }
      const Place from = at(b, held, c.slots[i], layer, lane % c.num_heads % b.heads);
      if (c.is_bf16)
        widen(b, held, from, static_cast<bf16*>(c.out) + i * b.dim, levels.data());
      else
        widen(b, held, from, static_cast<float*>(c.out) + i * b.dim, levels.data());
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
