// Entries of a cache by slot, of all layers and heads: gathered, or moved to the front of their rows.
//
// Sources are scattered, so those of the entries that follow are fetched meanwhile.

#include <cstdint>
#include <cstring>

// What the launcher passes; it mirrors these fields.
extern "C" struct MoveKV {
  char* cache;           // [num_blocks, block_layers, 2, block_size, block_heads, D], dense
  const int64_t* src;    // [L, H, S], slots
  const int64_t* dst;    // [L, H, S]; gathered: null
  const int64_t* layers; // [L], the layer of each; moved: null, they are 0 to L
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

  Lane(const MoveKV& c, int64_t layer, int64_t head, bool values)
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

int refusal(const MoveKV& c, const int64_t* slots) {
  const int64_t count = c.num_layers * c.num_heads * c.length;
  for (int64_t i = 0; i < count; ++i)
    if (slots[i] < 0 || slots[i] >= c.num_blocks * c.block_size) {
      *c.fault = slots[i];
      return 1;
    }
  return 0;
}

void fetch(const char* from, int64_t width) {
  for (int64_t at = 0; at < width; at += 64) __builtin_prefetch(from + at);
}

}  // namespace

// 1 for a slot that is not in the cache; nothing has been read or written then.
extern "C" int kvserve_gather_kv(const MoveKV* call) {
  const MoveKV& c = *call;
  if (refusal(c, c.src)) return 1;
  char* out = c.out;
  const int64_t* src = c.src;
  for (int64_t lane = 0; lane < c.num_layers * c.num_heads; ++lane, src += c.length) {
    const Lane from(c, c.layers[lane / c.num_heads], lane % c.num_heads, c.values);
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
  if (refusal(c, c.src) || refusal(c, c.dst)) return 1;
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
