// Entries in few bits: few_levels.py has the form and the reference, whose levels these equal, bit
// for bit. So no product is fused with a sum here, and sums have the reference's order.
//
// New entries are turned, rounded and fed back with 16 tokens in the lanes of a register.

#pragma GCC optimize("fp-contract=off")

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "few.h"
#include "lanes.h"

namespace {

constexpr int kTile = 16, kMaxDim = 256, kMaxBytes = kMaxDim / 2;
typedef Lanes<16> X;
typedef X::F F;
typedef X::I I;
typedef X::U U;

}  // namespace

// What a layer's entries are, and where the tiles of a block are; the launchers pass one or more.
extern "C" struct FewLayer {
  uint8_t* tiles;        // [Hb, B / 16, bytes] of block 0; blocks block_stride bytes apart
  int64_t block_stride, num_blocks, block_size, heads, dim;
  int64_t key_bits, value_bits;
  float key_factor, value_factor;
  const float* mean;      // [H, dim], of keys
  const float* feedback;  // [H, dim, dim], unit lower triangular, in the order; null: plain
  const int64_t* order;   // [H, dim]
};

namespace {

struct Kind {
  Strips strips;
  int64_t at, code;  // in a tile: of the levels, and of the codes
  float factor;
  bool keys;

  // Where byte `byte` of a vector is, for entry 0 of a tile.
  int64_t place(int byte) const { return at + strips.place(byte, 0, keys); }
};

struct Layer {
  const FewLayer& b;
  Kind key, value;
  int64_t tile_bytes;

  explicit Layer(const FewLayer& blocks)
      : b(blocks), key(kind(blocks, true)), value(kind(blocks, false)) {
    value.at = kTile * key.strips.bytes();
    key.code = value.at + kTile * value.strips.bytes();
    value.code = key.code + kTile;
    tile_bytes = value.code + kTile;
  }
  static Kind kind(const FewLayer& b, bool keys) {
    return {Strips(keys ? b.key_bits : b.value_bits, b.dim), 0, 0,
            keys ? b.key_factor : b.value_factor, keys};
  }
  uint8_t* tile(int64_t slot, int64_t head) const {
    const int64_t tiles = b.block_size / kTile;
    return b.tiles + slot / b.block_size * b.block_stride +
           (head * tiles + slot % b.block_size / kTile) * tile_bytes;
  }
};

// 1 if one of the slots is not in the pool; nothing has been read or written then.
int refusal(const FewLayer& b, const int64_t* slots, int64_t count, int64_t* fault) {
  for (int64_t i = 0; i < count; ++i)
    if (slots[i] < 0 || slots[i] >= b.num_blocks * b.block_size) {
      *fault = slots[i];
      return 1;
    }
  return 0;
}

// ---- turning ------------------------------------------------------------------------------------

// Of `dim` things side by side that can be added, a number or a register each.
template <typename T>
inline void turn(T* x, int dim) {
  for (int size = 1 << (31 - __builtin_clz(dim)); dim; size >>= 1) {
    if (!(dim & size)) continue;
    for (int width = 1; width < size; width *= 2)
      for (int i = 0; i < size; i += 2 * width)
        for (int j = i; j < i + width; ++j) {
          const T a = x[j], c = x[j + width];
          x[j] = a + c;
          x[j + width] = a - c;
        }
    const float shrink = (float)(1.0 / std::sqrt((double)size));
    for (int i = 0; i < size; ++i) x[i] = x[i] * shrink;
    x += size;
    dim -= size;
  }
}

inline float number(float x) { return x; }
inline float number(bf16 x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}
inline void put(float* to, float x) { *to = x; }
inline void put(bf16* to, float x) {  // to nearest, ties to even; not a number stays so
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  to->bits = x != x ? bits >> 16 | 64 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

}  // namespace

extern "C" struct TurnHeads {
  const void* x;      // [T, heads, dim], tokens stride apart
  const float* mean;  // [heads, dim]; null: nothing
  void* out;          // [T, heads, dim], dense
  int64_t tokens, heads, dim, stride, from_bf16, to_bf16;
};

namespace {

template <typename From, typename To>
void turn_heads(const TurnHeads& c) {
  float x[kMaxDim];
  To* out = static_cast<To*>(c.out);
  for (int64_t t = 0; t < c.tokens; ++t)
    for (int64_t h = 0; h < c.heads; ++h, out += c.dim) {
      const From* from = static_cast<const From*>(c.x) + t * c.stride + h * c.dim;
      for (int64_t d = 0; d < c.dim; ++d) x[d] = number(from[d]);
      if (c.mean)
        for (int64_t d = 0; d < c.dim; ++d) x[d] = x[d] - c.mean[h * c.dim + d];
      turn(x, c.dim);
      for (int64_t d = 0; d < c.dim; ++d) put(out + d, x[d]);
    }
}

}  // namespace

extern "C" int kvserve_turn_heads(const TurnHeads* call) {
  const TurnHeads& c = *call;
  if (c.from_bf16)
    c.to_bf16 ? turn_heads<bf16, bf16>(c) : turn_heads<bf16, float>(c);
  else
    c.to_bf16 ? turn_heads<float, bf16>(c) : turn_heads<float, float>(c);
  return 0;
}

// ---- new entries --------------------------------------------------------------------------------

extern "C" struct StoreFew {
  const FewLayer* layers;
  const void* key;       // [L, T, R * Hb, dim]: layers key_layer numbers apart, tokens key_stride
  const void* value;
  const int64_t* slots;  // [R, T], of every layer
  int64_t* fault;        // the slot that was refused
  int64_t num_layers, key_layer, value_layer;
  int64_t key_stride, value_stride, num_tokens, num_tables, is_bf16;
};

namespace {

template <int Step, int... L>
inline void swap_corners(F& a, F& b, std::integer_sequence<int, L...>) {
  const F upper = __builtin_shuffle(a, b, I{((L & Step) ? 16 + L - Step : L)...});
  b = __builtin_shuffle(a, b, I{((L & Step) ? 16 + L : L + Step)...});
  a = upper;
}
template <int Step>
inline void transpose(F* rows) {
  for (int i = 0; i < 16; ++i)
    if (!(i & Step)) swap_corners<Step>(rows[i], rows[i + Step], std::make_integer_sequence<int, 16>());
}

// Channels of up to 16 tokens, a token in each lane: x[dim].
template <typename T>
void load(const T* from, int64_t stride, int count, int dim, const float* mean, F* x) {
  for (int d = 0; d < dim; d += 16) {
    const int some = std::min(16, dim - d);
    const F less = mean ? X::load(mean + d, some) : F{};
    F rows[16];
    for (int t = 0; t < 16; ++t)
      rows[t] = X::load(from + std::min(t, count - 1) * stride + d, some) - less;
    transpose<1>(rows), transpose<2>(rows), transpose<4>(rows), transpose<8>(rows);
    std::memcpy(x + d, rows, some * sizeof(F));
  }
}

constexpr float kThresholds[] = {1.0442737824274138f, 1.1387886347566916f, 1.2418578120734840f,
                                 1.3542555469368927f, 1.4768261459394993f, 1.6104903319492543f,
                                 1.7562521603732995f, 1.9152065613971474f};

// The code of each lane's vector.
I codes_of(const F* x, int dim) {
  F total = {};
  for (int d = 0; d < dim; ++d) total = total + x[d] * x[d];
  const U bits = (U)(total / (float)dim);
  const F mantissa = (F)((bits & 0x7fffffu) | 0x3f800000u);
  I code = ((I)(bits >> 23) - 127) * 8 + 128;
  for (float threshold : kThresholds) code -= mantissa >= threshold;
  code = code < 0 ? I{} : code;
  return code > 255 ? I{} + 255 : code;
}

// The level of numbers that are steps already; what is no number is the least.
inline I level_of(F x, float half) {
  x = x > -half ? x : F{} - half;
  x = x < half - 0.5f ? x : F{} + (half - 0.5f);
  const I whole = __builtin_convertvector(x, I);
  return whole + (__builtin_convertvector(whole, F) > x) + (int)half;
}

// Levels of 16 vectors: in `levels`, channel by channel, where x was.
void round_plainly(F* x, int dim, F step, float half) {
  const F inverse = 1.0f / step;
  for (int d = 0; d < dim; ++d) x[d] = (F)level_of(x[d] * inverse, half);
}

void round_shaped(F* x, int dim, F step, float half, const float* feedback, const int64_t* order) {
  constexpr int kSome = 16;  // channels whose errors meet the others together
  F wanted[kMaxDim], left[kMaxDim], errors[kSome];
  for (int i = 0; i < dim; ++i) left[i] = wanted[i] = x[order[i]];
  const F inverse = 1.0f / step, middle = F{} + (half - 0.5f);
  for (int end = dim, first; end; end = first) {
    first = std::max(0, end - kSome);
    for (int i = end - 1; i >= first; --i) {
      const I level = level_of(left[i] * inverse, half);
      x[order[i]] = (F)level;
      const F error = (__builtin_convertvector(level, F) - middle) * step - wanted[i];
      const float* row = feedback + i * dim;
      for (int j = first; j < i; ++j) left[j] = left[j] - row[j] * error;
      errors[i - first] = error;
    }
    if (end - first < kSome) break;
    int j = 0;
    for (; j + 4 <= first; j += 4) {
      F sums[4] = {left[j], left[j + 1], left[j + 2], left[j + 3]};
#pragma GCC unroll 16
      for (int i = kSome - 1; i >= 0; --i)
        for (int k = 0; k < 4; ++k) sums[k] = sums[k] - feedback[(first + i) * dim + j + k] * errors[i];
      for (int k = 0; k < 4; ++k) left[j + k] = sums[k];
    }
    for (; j < first; ++j)
      for (int i = kSome - 1; i >= 0; --i) left[j] = left[j] - feedback[(first + i) * dim + j] * errors[i];
  }
}

// Bytes of 16 vectors from their levels: lane t has bytes 4 w to 4 w + 3 of token t in words[w].
void pack(const I* levels, int dim, const Strips& strips, U* words) {
  const int width = strips.width, bits = strips.bits;
  const auto level = [&](int field, int j) {
    const int channel = field * width + j;
    return channel < dim ? (U)levels[channel] : U{};
  };
  for (int at = 0; at < strips.bytes(); at += 4) {
    U word = {};
    for (int byte = 0; byte < 4; ++byte) {
      const int strip = (at + byte) / width, j = (at + byte) % width;
      U bytes = {};
      if (bits != 3) {
        for (int field = 0; field < 8 / bits; ++field) bytes |= level(field, j) << (bits * field);
      } else {
        bytes = level(2 * strip, j) | level(2 * strip + 1, j) << 3;
        if (strip < 2)
          bytes |= (level(6 + strip, j) & 3u) << 6;
        else
          bytes |= level(6, j) >> 2 << 7 | level(7, j) >> 2 << 6;
      }
      word |= bytes << (8 * byte);
    }
    words[at / 4] = word;
  }
}

// Whether these are the entries of one tile.
inline bool is_tile(const int64_t* slots, int count) {
  for (int t = 1; t < count; ++t)
    if (slots[t] != slots[0] + t) return false;
  return count == kTile && slots[0] % kTile == 0;
}

// Words and codes of 16 tokens to their slots; the keys of a tile go together.
void write(const Layer& layer, const Kind& kind, const int64_t* slots, int count, int64_t head,
           const U* words, I codes) {
  const int bytes = kind.strips.bytes();
  if (kind.keys && is_tile(slots, count)) {
    uint8_t* tile = layer.tile(slots[0], head);
    for (int at = 0; at < bytes; at += 4) std::memcpy(tile + kind.place(at), &words[at / 4], 64);
    for (int t = 0; t < kTile; ++t) tile[kind.code + t] = codes[t];
    return;
  }
  for (int t = 0; t < count; ++t) {
    uint8_t* tile = layer.tile(slots[t], head);
    const int entry = slots[t] % kTile;
    for (int at = 0; at < bytes; at += 4) {
      uint32_t word;
      std::memcpy(&word, (const char*)&words[at / 4] + 4 * t, 4);
      uint8_t* to = tile + kind.at + kind.strips.place(at, entry, kind.keys);
      if (kind.keys)
        std::memcpy(to, &word, 4);
      else
        for (int byte = 0; byte < 4; ++byte) to[4 * byte] = word >> 8 * byte;
    }
    tile[kind.code + entry] = codes[t];
  }
}

// The new entries of one layer.
template <typename T>
void store(const StoreFew& c, const FewLayer& b, const T* key, const T* value) {
  const Layer layer(b);
  const int dim = b.dim;
  alignas(64) F x[kMaxDim];
  U words[kMaxBytes / 4 + 4];
  for (int64_t head = 0; head < c.num_tables * b.heads; ++head)
    for (int64_t first = 0; first < c.num_tokens; first += kTile) {
      const int count = std::min<int64_t>(kTile, c.num_tokens - first);
      const int64_t* slots = c.slots + head / b.heads * c.num_tokens + first;
      for (const Kind* kind : {&layer.key, &layer.value}) {
        const int64_t stride = kind->keys ? c.key_stride : c.value_stride;
        const T* from = (kind->keys ? key : value) + first * stride + head * dim;
        load(from, stride, count, dim, kind->keys ? b.mean + head * dim : nullptr, x);
        turn(x, dim);
        const I codes = codes_of(x, dim);
        const F step = scales_of(codes) * kind->factor;
        const float half = 1 << (kind->strips.bits - 1);
        if (kind->keys && b.feedback)
          round_shaped(x, dim, step, half, b.feedback + head * dim * dim, b.order + head * dim);
        else
          round_plainly(x, dim, step, half);
        pack((const I*)x, dim, kind->strips, words);
        write(layer, *kind, slots, count, head % b.heads, words, codes);
      }
    }
}

template <typename T>
void store(const StoreFew& c) {
  const T *key = static_cast<const T*>(c.key), *value = static_cast<const T*>(c.value);
  for (int64_t i = 0; i < c.num_layers; ++i)
    store(c, c.layers[i], key + i * c.key_layer, value + i * c.value_layer);
}

}  // namespace

extern "C" int kvserve_store_few(const StoreFew* call) {
  const StoreFew& c = *call;
  if (refusal(*c.layers, c.slots, c.num_tables * c.num_tokens, c.fault)) return 1;
  c.is_bf16 ? store<bf16>(c) : store<float>(c);
  return 0;
}

// ---- entries by slot ----------------------------------------------------------------------------

extern "C" struct GatherFew {
  const FewLayer* layers;
  void* out;             // [L, H, S, dim]
  const int64_t* slots;  // [L, H, S]
  int64_t* fault;
  int64_t num_layers, num_heads, length, values, is_bf16;  // values: not keys
};

namespace {

// What `write` wrote: words, and codes, which are returned. Lanes behind `count` are zero.
I read(const Layer& layer, const Kind& kind, const int64_t* slots, int count, int64_t head, U* words) {
  const int bytes = kind.strips.bytes();
  I codes = {};
  if (kind.keys && is_tile(slots, count)) {
    const uint8_t* tile = layer.tile(slots[0], head);
    for (int at = 0; at < bytes; at += 4) std::memcpy(&words[at / 4], tile + kind.place(at), 64);
    return (I)unsigned_bytes<16>(tile + kind.code);
  }
  std::memset(words, 0, bytes * kTile);
  for (int t = 0; t < count; ++t) {
    const uint8_t* tile = layer.tile(slots[t], head);
    const int entry = slots[t] % kTile;
    for (int at = 0; at < bytes; at += 4) {
      const uint8_t* from = tile + kind.at + kind.strips.place(at, entry, kind.keys);
      uint8_t* to = (uint8_t*)&words[at / 4] + 4 * t;
      if (kind.keys)
        std::memcpy(to, from, 4);
      else
        for (int byte = 0; byte < 4; ++byte) to[byte] = from[4 * byte];
    }
    codes[t] = tile[kind.code + entry];
  }
  return codes;
}

// Levels of 16 vectors from their words, channel by channel: as many as there are fields, times width.
void unpack(const U* words, const Strips& strips, F* x) {
  const int width = strips.width, bits = strips.bits;
  const auto field = [&](int at, int shift, uint32_t mask) {  // of byte `at`
    return words[at / 4] >> (at % 4 * 8 + shift) & mask;
  };
  const auto set = [&](int number, int j, U levels) {
    x[number * width + j] = __builtin_convertvector((I)levels, F);
  };
  for (int j = 0; j < width; ++j) {
    if (bits != 3) {
      for (int f = 0; f < 8 / bits; ++f) set(f, j, field(j, bits * f, (1u << bits) - 1));
      continue;
    }
    const int last = 2 * width + j;
    for (int f = 0; f < 6; ++f) set(f, j, field(f / 2 * width + j, f % 2 * 3, 7));
    set(6, j, field(j, 6, 3) | field(last, 7, 1) << 2);
    set(7, j, field(width + j, 6, 3) | field(last, 6, 1) << 2);
  }
}

// The other way of `load`.
template <typename T>
void unload(const F* x, int count, int dim, T* to) {
  for (int d = 0; d < dim; d += 16) {
    F rows[16];
    std::memcpy(rows, x + d, sizeof rows);
    transpose<1>(rows), transpose<2>(rows), transpose<4>(rows), transpose<8>(rows);
    for (int t = 0; t < count; ++t) X::store(to + t * dim + d, rows[t], std::min(16, dim - d));
  }
}

// What one layer's slots hold.
template <typename T>
void gather(const GatherFew& c, const FewLayer& b, const int64_t* slots, T* out) {
  const Layer layer(b);
  const Kind& kind = c.values ? layer.value : layer.key;
  const int dim = b.dim;
  const float half = (1 << (kind.strips.bits - 1)) - 0.5f;
  alignas(64) F x[kMaxDim + 64];
  U words[kMaxBytes / 4 + 4];
  for (int64_t head = 0; head < c.num_heads; ++head, slots += c.length)
    for (int64_t first = 0; first < c.length; first += kTile) {
      const int count = std::min<int64_t>(kTile, c.length - first);
      const I codes = read(layer, kind, slots + first, count, head % b.heads, words);
      const F step = scales_of(codes) * kind.factor;
      unpack(words, kind.strips, x);
      for (int d = 0; d < dim; ++d) x[d] = (x[d] - half) * step;
      turn(x, dim);
      if (kind.keys)
        for (int d = 0; d < dim; ++d) x[d] = x[d] + b.mean[head * dim + d];
      unload(x, count, dim, out);
      out += count * dim;
    }
}

template <typename T>
void gather(const GatherFew& c) {
  const int64_t lane = c.num_heads * c.length;
  for (int64_t i = 0; i < c.num_layers; ++i)
    gather(c, c.layers[i], c.slots + i * lane, static_cast<T*>(c.out) + i * lane * c.layers[i].dim);
}

}  // namespace

extern "C" int kvserve_gather_few(const GatherFew* call) {
  const GatherFew& c = *call;
  const int64_t count = c.num_layers * c.num_heads * c.length;
  if (c.num_layers && refusal(*c.layers, c.slots, count, c.fault)) return 1;
  c.is_bf16 ? gather<bf16>(c) : gather<float>(c);
  return 0;
}

extern "C" struct MoveFew {
  const FewLayer* layers;
  const int64_t* src;  // [L, H, S]
  const int64_t* dst;
  int64_t* fault;
  int64_t num_layers, num_heads, length;
};

namespace {

// In order, so that no destination may be the source of a later entry of its lane.
void move(const FewLayer& b, const int64_t* src, const int64_t* dst, int64_t num_heads, int64_t length) {
  const Layer layer(b);
  for (int64_t i = 0; i < num_heads * length; ++i) {
    if (dst[i] < b.block_size || src[i] == dst[i]) continue;  // block 0 is not used
    const int64_t head = i / length % b.heads;
    const uint8_t* from = layer.tile(src[i], head);
    uint8_t* to = layer.tile(dst[i], head);
    const int a = src[i] % kTile, z = dst[i] % kTile;
    for (const Kind* kind : {&layer.key, &layer.value}) {
      const Strips& strips = kind->strips;
      const int some = kind->keys ? 4 : 1;  // bytes side by side
      for (int byte = 0; byte < strips.bytes(); byte += some)
        std::memcpy(to + kind->at + strips.place(byte, z, kind->keys),
                    from + kind->at + strips.place(byte, a, kind->keys), some);
      to[kind->code + z] = from[kind->code + a];
    }
  }
}

}  // namespace

extern "C" int kvserve_move_few(const MoveFew* call) {
  const MoveFew& c = *call;
  const int64_t lane = c.num_heads * c.length, count = c.num_layers * lane;
  if (!count) return 0;
  if (refusal(*c.layers, c.src, count, c.fault) || refusal(*c.layers, c.dst, count, c.fault)) return 1;
  for (int64_t i = 0; i < c.num_layers; ++i)
    move(c.layers[i], c.src + i * lane, c.dst + i * lane, c.num_heads, c.length);
  return 0;
}
