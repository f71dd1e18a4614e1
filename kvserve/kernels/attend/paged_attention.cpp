// Attention over a paged cache that reads the blocks in place, for CPUs.
//
// A tile is up to kTileRows rows: (query, head) pairs of a chunk that share one KV head, or all pairs
// of a decoding token whose heads share a table, since their entries lie side by side in a block. It
// walks its context kTileEntries at a time with an online softmax, in parts of kPartEntries whose
// results are merged in order: neither the number of threads nor other chunks change a bit of a row.
// What is read next is fetched meanwhile (ahead.h). Sums are float32; logits.h and values.h say how
// products are made of each form.
// A row's remainder, if it has one, is where its online softmax begins. A head's sink is added to the
// total at the end. Entries before the first one that a token sees are not read; tiles begin where
// they do without them, so that a row's sums are the same in any company.
// Entries held as codes are decoded kTileEntries at a time; one that is a codebook vector itself is
// read in place.
//
// KVSERVE_KEY and KVSERVE_VALUE say what is stored (``VectorForm.code``); there is a library for each
// pair. A logit is step * (query . levels) + low * (sum of the query). Of levels, chunks of many
// queries add up in the same order as few queries do: the rounding of a new entry must not depend on
// whether its token came in a chunk. Entries in few bits are read tile by tile (few_tiles.h).

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <type_traits>
#include <utility>
#include <vector>

#include "few_tiles.h"
#include "lanes.h"
#include "logits.h"
#include "values.h"

#ifndef KVSERVE_KEY
#define KVSERVE_KEY 0
#define KVSERVE_VALUE 0
#endif
#ifndef KVSERVE_MAX_HEAD_DIM  // 512 for larger heads: rows of queries lie so far apart
#define KVSERVE_MAX_HEAD_DIM 256
#endif

namespace {

// What a vector is stored as, where numbers are computed as T: bits, 16 more for levels that count
// from a low, 32 more for e4m3; 0: numbers of T; 64: few bits, whose number is in the call.
template <typename T, int Code>
struct Stored {
  typedef packed<Code % 16> type;
};
template <typename T>
struct Stored<T, 0> {
  typedef T type;
};
template <typename T>
struct Stored<T, 8> {
  typedef int8 type;
};
template <typename T>
struct Stored<T, 40> {
  typedef e4m3 type;
};
template <typename T>
struct Stored<T, 64> {
  typedef packed<4> type;
};
constexpr bool kLevels = KVSERVE_KEY != 0, kFew = KVSERVE_KEY == 64;

constexpr int kTileRows = 32;
constexpr int kPartEntries = 1024;
constexpr int kMaxHeadDim = KVSERVE_MAX_HEAD_DIM;
constexpr int kKept = 3;  // numbers of a part beside its sums: largest logit, total, and of the newest
constexpr int kFewRows = 8;  // up to so many, as in decoding, read entries as they are held

// An entry held as a code, as it is stored; scales are float16.
struct Slot {
  uint16_t key, value, key_scale, value_scale, position;
  int16_t distance;
  uint32_t unused;
};

// Of a finite number that is not negative.
inline float half_to_float(uint16_t half) {
  const uint32_t bits = (uint32_t)half << 13;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number * 0x1p112f;
}

}  // namespace

// ---- what the launcher passes; it mirrors these fields -----------------------------------------

extern "C" struct PagedAttention {
  const void* query;        // [T, Hq, D], tokens query_stride apart
  void* out;                // [T, Hq, D], dense
  const void* keys;         // [num_blocks, B, Hb, D], blocks block_stride apart; levels: see below
  const void* values;
  const int32_t* tables;    // [num_rows, R, M] of this layer group
  const int64_t* rows;      // [S], table row of each chunk
  const int64_t* starts;    // [S + 1], its tokens
  const int64_t* last;      // [R, T], last entry that each token sees; -1: none
  const int64_t* first;     // [R, T], first entry that each token sees; null: entry 0
  const int64_t* always;    // [R, T], entries before this one are seen as well; null: none
  const float* sinks;       // [Hq], a logit without a value for each query head; null: none
  int64_t* fault;           // [2], the chunk and the number that were refused
  float* shares;            // [T, Hq]: logarithm of what the newest entries got; null: not wanted
  const int64_t* recent;    // [T], how many entries are the newest
  // What tokens see of other entries, newer ones: float32 [T, Hq, D] and logarithms [T, Hq]. A call
  // that begins a softmax writes log_sums and an out of float32; one that goes on reads begun.
  float* log_sums;           // null: out is of T
  const float* begun;        // null: nothing
  const float* begun_sums;   // -inf: the token sees none
  const float* begun_shares;  // of those, what the newest got; if there are shares
  // What stands for entries that a row has lost, [num_rows, Hkv, D] and [num_rows, Hkv]; null: nothing.
  const float* remainder_keys;
  const float* remainder_values;
  const float* remainder_bias;   // -inf: nothing
  // Entries held as codes; coded is null where there can be none. Lanes are [num_rows, R].
  const int64_t* coded;          // how many entries of each lane are codes, from its first on
  const Slot* slots;             // [num_blocks, slots_per_block]
  const void* vectors;           // [num_blocks, 2 * B, D]
  const int32_t* slot_tables;    // [num_rows, R, slot_columns], blocks of slots
  const int32_t* vector_tables;  // [num_rows, R, vector_columns], blocks of vectors
  const float* turns;            // [num_turns, D], cosines and sines by distance
  // Of levels: bfloat16 [num_blocks, Hb, B], blocks block_stride and heads head_stride bytes apart, as
  // levels are too. Of few bits all is in the tiles (few.h), which keys names.
  const uint16_t* key_steps;
  const uint16_t* value_steps;
  const uint16_t* value_lows;
  int64_t head_stride, key_bits, value_bits;
  // Of few bits that differ by KV head: [Hkv][3], where a head's tiles are in a block, and the bits of
  // its keys and values; [Hkv][2], their factors. Null: those above are all heads'.
  const int64_t* lanes;
  const float* lane_factors;
  float key_factor, value_factor;
  int64_t slots_per_block, slot_columns, vector_columns, num_turns;
  int64_t query_stride, block_stride;
  int64_t num_tokens, num_chunks, num_blocks, num_rows, columns;
  int64_t block_size, num_heads, num_kv_heads, tables_per_row, head_dim;
  int64_t num_threads;
  float scale;
  float soft_cap;  // logits x become soft_cap * tanh(x / soft_cap); 0: they stay
  int32_t is_bf16;
};

enum Refusal { kNone, kRow, kChunk, kEntry, kBlock, kVector, kDistance };

namespace {

// Rows [first, first + count) of chunk's (query, head) pairs, of each of `heads` KV heads from kv_head
// on, over one part of their context.
struct Item {
  int chunk, kv_head, heads, first, count, part, parts;
  int64_t begin, seen, end;  // entries: those from `seen` on are read, tiles count from `begin`
  int64_t always;      // and those before this one, by its first part
  int64_t partial;     // where the first of its parts is kept, if there are several

  int rows() const { return heads * count; }
  int64_t start() const { return always && !part ? 0 : begin; }  // of its first tile
  int64_t behind(int64_t at) const { return std::max(at + kTileEntries, begin); }
};

struct Scratch {
  alignas(64) float query[kTileRows * kMaxHeadDim];  // each kMaxHeadDim apart
  alignas(64) float sums[kTileRows * kMaxHeadDim];
  alignas(64) uint32_t columns[kTileEntries * kMaxHeadDim];  // of the keys; see logits.h
  alignas(64) float weights[kTileRows * kTileEntries];
  float largest[kTileRows], total[kTileRows], recent[kTileRows];
  int64_t first[kTileRows], last[kTileRows], newer[kTileRows];  // newer: the newest begin there
  int64_t always[kTileRows];
  alignas(64) int32_t pairs[kTileRows * kMaxHeadDim];  // queries as pairs of 16 bits, or digits
  float steps[kTileRows];                              // what one of those stands for
};

// Of a KV head in few bits: where its tiles are in a block, and what they hold.
struct FewLane {
  int64_t at;
  Strips keys, values;
  float key_factor, value_factor;

  int64_t value_at() const { return kSixteen * keys.bytes(); }
  int64_t codes_at() const { return value_at() + kSixteen * values.bytes(); }
  int64_t bytes() const { return codes_at() + 2 * kSixteen; }
};

// Beside it where levels are held: what these stand for in each of the tile's entries.
struct Scales {
  alignas(64) float values[kTileEntries * kMaxHeadDim];  // as numbers, for chunks
  alignas(64) float key_steps[kTileEntries];
  alignas(64) float value_steps[kTileEntries], value_lows[kTileEntries];
  float sums[kTileRows];  // of each query's numbers
};

template <typename T, int W>
class Kernel {
  typedef typename Stored<T, KVSERVE_KEY>::type Key;
  typedef typename Stored<T, KVSERVE_VALUE>::type Value;

 public:
  explicit Kernel(const PagedAttention& call)
      : call_(call),
        dim_(call.head_dim),
        group_(call.num_heads / call.num_kv_heads),
        heads_per_table_(call.num_kv_heads / call.tables_per_row),
        key_step_((kLevels ? 1 : heads_per_table_) * dim_ * sizeof(Key)),
        value_step_((kLevels ? 1 : heads_per_table_) * dim_ * sizeof(Value) / kValuePlanes),
        head_step_(kLevels ? call.head_stride : dim_ * sizeof(T)),
        block_step_(call.block_stride * (kLevels ? 1 : sizeof(T))),
        key_columns_(dim_ * sizeof(Key) / 4) {
    for (int h = 0; kFew && h < call.num_kv_heads; ++h) {
      const int64_t* own = call.lanes ? call.lanes + 3 * h : nullptr;
      const float* factors = call.lanes ? call.lane_factors + 2 * h : &call.key_factor;
      lanes_.push_back({own ? own[0] : h % heads_per_table_ * head_step_,
                        Strips(own ? own[1] : call.key_bits, dim_),
                        Strips(own ? own[2] : call.value_bits, dim_), factors[0], factors[1]});
    }
  }

  int run() {
    if (int refusal = plan()) return refusal;
    const int threads = std::max<int64_t>(1, std::min<int64_t>(call_.num_threads, items_.size()));
    const int64_t count = items_.size();
    std::atomic<int> refusal{kNone};
    if (threads == 1) {
      for (int64_t i = 0; i < count; ++i) attend(i, refusal);
    } else {
      const int64_t run = std::max<int64_t>(1, count / (8 * threads));  // each fetches for the next
#pragma omp parallel for schedule(dynamic, run) num_threads(threads)
      for (int64_t i = 0; i < count; ++i) attend(i, refusal);
    }
    if (refusal == kNone && !partials_.empty())
      for (const Item& item : items_)
        if (item.parts > 1 && item.part == 0) merge(item);
    return refusal;
  }

 private:
  typedef Lanes<W> X;
  static constexpr int kValuePlanes = Planes<Value>::kPlanes;
  static constexpr bool kBf16 = std::is_same_v<T, bf16>;
  typedef std::conditional_t<kFew, LevelWords, Column<Key, W, kBf16>> C;
  typedef typename X::F F;

  int refuse(Refusal why, int64_t chunk, int64_t number) const {
    call_.fault[0] = chunk;
    call_.fault[1] = number;
    return why;
  }

  const int64_t* last_of(int kv_head) const {
    return call_.last + kv_head / heads_per_table_ * call_.num_tokens;
  }

  const int64_t* first_of(int kv_head) const {
    return call_.first + kv_head / heads_per_table_ * call_.num_tokens;
  }

  const int64_t* always_of(int kv_head) const {
    return call_.always + kv_head / heads_per_table_ * call_.num_tokens;
  }

  // Check every chunk, and cut it into items.
  int plan() {
    const PagedAttention& c = call_;
    int64_t partials = 0;
    for (int64_t s = 0; s < c.num_chunks; ++s) {
      const int64_t begin = c.starts[s], end = c.starts[s + 1];
      if (c.rows[s] < 0 || c.rows[s] >= c.num_rows) return refuse(kRow, s, c.rows[s]);
      if (begin < 0 || end < begin || end > c.num_tokens) return refuse(kChunk, s, end);
      const int64_t pairs = (end - begin) * group_;
      for (int h = 0, heads; h < c.num_kv_heads; h += heads) {
        heads = heads_from(h, pairs);
        const int64_t* last = last_of(h);
        for (int64_t first = 0; first < pairs; first += kTileRows) {
          const int count = std::min<int64_t>(kTileRows, pairs - first);
          int64_t furthest = -1, nearest = c.first ? INT64_MAX : 0, always = 0;
          const int64_t stop = begin + (first + count - 1) / group_;
          for (int64_t t = begin + first / group_; t <= stop; ++t) {
            if (last[t] < -1 || last[t] >= c.columns * c.block_size)
              return refuse(kEntry, s, last[t]);
            furthest = std::max(furthest, last[t]);
            if (c.first && last[t] >= 0) {
              const int64_t from = first_of(h)[t];
              if (from < 0 || from > last[t]) return refuse(kEntry, s, from);
              nearest = std::min(nearest, from);
              if (c.always) always = std::max(always, std::min(always_of(h)[t], last[t] + 1));
            }
          }
          nearest = std::min(nearest, std::max<int64_t>(furthest, 0));
          const int64_t skipped = nearest / kPartEntries * kPartEntries;
          const int parts =
              std::max<int64_t>(1, (furthest - skipped + kPartEntries) / kPartEntries);
          for (int part = 0; part < parts; ++part) {
            const int64_t seen = std::max(skipped + (int64_t)part * kPartEntries, nearest);
            const int64_t from = seen / kTileEntries * kTileEntries;
            const int64_t to = std::min(furthest + 1, skipped + (part + 1) * (int64_t)kPartEntries);
            items_.push_back({(int)s, h, heads, (int)first, count, part, parts, from, seen, to,
                              std::min(always, nearest), partials});
          }
          if (parts > 1) partials += parts * heads * count;
        }
      }
    }
    partials_.resize(partials * (dim_ + kKept));
    return kNone;
  }

  // How many KV heads from h on are one item: their entries lie side by side in a block, and memory is
  // fastest read in order. Threads take items, so one sequence on many of them has more.
  int heads_from(int h, int64_t pairs) const {
    const PagedAttention& c = call_;
    if (c.coded || pairs > kFewRows) return 1;
    const int beside = heads_per_table_ - h % heads_per_table_;
    const int heads = std::min<int64_t>(kTileRows / std::max<int64_t>(1, pairs), beside);
    if (c.num_threads == 1) return heads;
    const int64_t share = c.num_chunks * c.num_kv_heads / (4 * c.num_threads);
    return std::max<int64_t>(1, std::min<int64_t>(heads, share));
  }

  void attend(int64_t index, std::atomic<int>& refusal) {
    if (refusal != kNone) return;
    const Item& item = items_[index];
    Scratch own;
    begin(item, own);
    const bool decodes = item.count <= kFewRows;
    const void *keys[kTileEntries], *values[kTileEntries];
    Ahead ahead;
    const int key_bytes = dim_ * sizeof(Key);
    alignas(64) T decoded[2][kTileEntries * kMaxHeadDim];
    Scales scales;
    if (kLevels) clear(item, own, scales);
    for (int64_t at = item.start(); at < item.end; at = item.behind(at)) {
      int count = std::min<int64_t>(kTileEntries, item.end - at);
      int skipped = std::max<int64_t>(0, item.seen - at), always = at ? 0 : item.always;
      if (skipped >= count) count = skipped = always;  // what is always seen lies in a tile of its own
      if constexpr (kFew) {
        if (!attend_few(item, own, scales, at, skipped, count, ahead, refusal)) return;
      } else {
        const int width = (count + W - 1) / W * W;
        const int coded = std::max<int64_t>(0, std::min<int64_t>(count, num_coded(item) - at));
        if (!decode(item, at, coded, keys, values, decoded, refusal)) return;
        const int known = std::max(coded, skipped);
        if (!find(item, at, always, keys, values, refusal)) return;
        if (!find(item, at + known, count - known, keys + known, values + known, refusal)) return;
        for (int i = always; i < skipped; ++i) keys[i] = keys[skipped], values[i] = values[skipped];
        for (int i = count; i < width; ++i) keys[i] = keys[0];
        for (int i = count; i & 3; ++i) values[i] = values[count - 1];  // of weight 0, met by twos or fours
        if (decodes) find_behind(index, item.behind(at), ahead);
        for (int h = 0; h < item.heads; ++h) {
          const int64_t offset = h * head_step_;
          const int first = h * item.count, last = first + item.count;
          if (kLevels) find_scales(item, h, at, skipped, count, scales);
          if (std::is_same_v<Key, float> && item.count <= kFewQueries && !call_.log_sums) {
            few_dots<kFewQueries>(own, first, item.count, keys, offset, width, ahead);
          } else {
            for (int v = 0; v < width; v += 2 * W) {
              const int both = std::min(2 * W, width - v);
              for (int half = v; half < v + both; half += W)
                columns_of<W>(keys + half, offset, key_bytes, own.columns + half, kTileEntries, ahead);
              if (!decodes)
                few_of<0>(own, first, last, v, both, scales, ahead);
              else if (item.count <= 4)
                few_of<2>(own, first, last, v, both, scales, ahead);
              else
                few_of<1>(own, first, last, v, both, scales, ahead);
            }
          }
          if (call_.soft_cap > 0.0f) cap(own, first, last, width);
          for (int i = first; i < last; ++i)
            soften(own, i, own.always[i] - at, own.first[i] - at, own.last[i] + 1 - at, own.newer[i] - at, width);
          add_values(own, first, item.count, values, offset, count, scales, ahead);
        }
      }
    }
    for (int i = 0; i < item.rows(); ++i) {
      if (item.parts == 1) {
        write(item, i, own.sums + i * dim_, own.largest[i], own.total[i], own.recent[i]);
        continue;
      }
      float* kept = partial(item, item.part, i);
      kept[0] = own.largest[i];
      kept[1] = own.total[i];
      kept[2] = own.recent[i];
      std::memcpy(kept + kKept, own.sums + i * dim_, dim_ * sizeof(float));
    }
  }

  // Where row i of an item lies in query and out, in heads.
  int64_t token(const Item& item, int i) const {
    return call_.starts[item.chunk] + (item.first + i % item.count) / group_;
  }
  int64_t head(const Item& item, int i) const {
    return kv_head(item, i) * group_ + (item.first + i % item.count) % group_;
  }
  static int64_t kv_head(const Item& item, int i) { return item.kv_head + i / item.count; }

  void begin(const Item& item, Scratch& own) const {
    const int64_t* last = last_of(item.kv_head);
    for (int i = 0; i < item.rows(); ++i) {
      own.last[i] = last[token(item, i)];
      own.first[i] = call_.first ? first_of(item.kv_head)[token(item, i)] : 0;
      own.always[i] = call_.always ? always_of(item.kv_head)[token(item, i)] : 0;
      own.newer[i] = call_.shares ? own.last[i] + 1 - call_.recent[token(item, i)] : INT64_MAX;
      own.largest[i] = -INFINITY;
      own.total[i] = own.recent[i] = 0.0f;
      const T* from = static_cast<const T*>(call_.query) + token(item, i) * call_.query_stride +
                      head(item, i) * dim_;
      for (int d = 0; d < dim_; d += W)
        X::store(own.query + i * kMaxHeadDim + d, X::load(from + d) * call_.scale);
      if constexpr (C::kWhole) {
        std::memcpy(own.pairs + i * kMaxHeadDim, from, dim_ * sizeof(T));
        own.steps[i] = call_.scale;
      } else if constexpr (C::kWidens) {  // four numbers, for both halves of a column
        auto* to = reinterpret_cast<uint64_t*>(own.pairs + i * kMaxHeadDim);
        for (int d = 0; d < dim_; d += 4, to += 2) {
          std::memcpy(to, from + d, sizeof *to);
          to[1] = to[0];
        }
        own.steps[i] = call_.scale;
      }
    }
    std::memset(own.sums, 0, item.rows() * dim_ * sizeof(float));
    if (call_.remainder_bias && item.part == 0) begin_with_remainder(item, own);
    if constexpr (C::kRounds)
      for (int i = 0; i < item.rows(); ++i) round_query(own, i);
  }

  // One part of a context begins with the row's remainder instead of nothing.
  void begin_with_remainder(const Item& item, Scratch& own) const {
    for (int i = 0; i < item.rows(); ++i) {
      const int64_t place = call_.rows[item.chunk] * call_.num_kv_heads + kv_head(item, i);
      const float bias = call_.remainder_bias[place];
      const bool sees = own.last[i] >= 0 || begun_sum(item, i) > -INFINITY;
      if (bias == -INFINITY || !sees) continue;
      const float* key = call_.remainder_keys + place * dim_;
      const float* value = call_.remainder_values + place * dim_;
      F logit = {};
      for (int d = 0; d < dim_; d += W) logit += X::load(own.query + i * kMaxHeadDim + d) * X::load(key + d);
      const float product = X::total(logit), cap = call_.soft_cap;
      own.largest[i] = (cap > 0.0f ? cap * std::tanh(product / cap) : product) + bias;
      own.total[i] = 1.0f;
      for (int d = 0; d < dim_; d += W)
        X::store(own.sums + i * dim_ + d, X::load(value + d));
    }
  }

  int64_t lane(const Item& item) const {
    return call_.rows[item.chunk] * call_.tables_per_row + item.kv_head / heads_per_table_;
  }
  int64_t num_coded(const Item& item) const { return call_.coded ? call_.coded[lane(item)] : 0; }

  // Addresses of coded entries [at, at + count): vectors of the codebook, or in `decoded` if they
  // have to be rotated or scaled. False if a reference is wrong.
  bool decode(const Item& item, int64_t at, int count, const void** keys, const void** values,
              T (*decoded)[kTileEntries * kMaxHeadDim], std::atomic<int>& refusal) const {
    const PagedAttention& c = call_;
    const int32_t* blocks = count ? c.slot_tables + lane(item) * c.slot_columns : nullptr;
    for (int i = 0; i < count; ++i) {
      const int64_t column = (at + i) / c.slots_per_block;
      if (column >= c.slot_columns) return refuse_one(kEntry, item, at + i, refusal);
      const int64_t block = blocks[column];
      if (block < 1 || block >= c.num_blocks) return refuse_one(kBlock, item, block, refusal);
      const Slot& slot = c.slots[block * c.slots_per_block + (at + i) % c.slots_per_block];
      if (std::abs((int64_t)slot.distance) >= c.num_turns)
        return refuse_one(kDistance, item, slot.distance, refusal);
      const T* key = vector(item, slot.key, refusal);
      const T* value = vector(item, slot.value, refusal);
      if (!key || !value) return false;
      keys[i] = key;
      values[i] = value;
      const float key_scale = half_to_float(slot.key_scale);
      const float value_scale = half_to_float(slot.value_scale);
      if (slot.distance || key_scale != 1.0f) {
        T* to = decoded[0] + i * dim_;
        turn_by(slot.distance, key_scale, key, to);
        keys[i] = to;
      }
      if (value_scale != 1.0f) {
        T* to = decoded[1] + i * dim_;
        for (int d = 0; d < dim_; d += W) X::store(to + d, X::load(value + d) * value_scale);
        values[i] = to;
      }
    }
    return true;
  }

  // A vector of a lane's codebook; null if it is not there.
  const T* vector(const Item& item, uint32_t number, std::atomic<int>& refusal) const {
    const PagedAttention& c = call_;
    const uint32_t per_block = 2 * c.block_size, column = number / per_block;
    if (column >= c.vector_columns) {
      refuse_one(kVector, item, number, refusal);
      return nullptr;
    }
    const int64_t block = c.vector_tables[lane(item) * c.vector_columns + column];
    if (block < 1 || block >= c.num_blocks) {
      refuse_one(kBlock, item, block, refusal);
      return nullptr;
    }
    return static_cast<const T*>(c.vectors) + (block * per_block + number % per_block) * dim_;
  }

  // A key rotated by distance positions more, and scaled.
  void turn_by(int distance, float scale, const T* from, T* to) const {
    const int half = dim_ / 2;
    const float* cosines = call_.turns + (int64_t)std::abs(distance) * dim_;
    const float sign = distance < 0 ? -1.0f : 1.0f;
    for (int d = 0; d < half; d += W) {
      const int count = std::min(W, half - d);
      const F cosine = X::load(cosines + d, count);
      const F sine = X::load(cosines + half + d, count) * sign;
      const F left = X::load(from + d, count), right = X::load(from + half + d, count);
      X::store(to + d, (left * cosine - right * sine) * scale, count);
      X::store(to + half + d, (right * cosine + left * sine) * scale, count);
    }
  }

  bool refuse_one(Refusal why, const Item& item, int64_t number, std::atomic<int>& refusal) const {
    int none = kNone;
    if (refusal.compare_exchange_strong(none, why)) refuse(why, item.chunk, number);
    return false;
  }

  // visit(i, key, value) for the entries [at, at + count), up to a column that names no block.
  template <typename Visit>
  __attribute__((always_inline)) inline const int32_t* each_entry(const Item& item, int64_t at,
                                                                  int count, Visit visit) const {
    const PagedAttention& c = call_;
    const int32_t* blocks = c.tables + lane(item) * c.columns;
    const int64_t head = item.kv_head % heads_per_table_ * head_step_;
    int64_t offset = at % c.block_size, column = at / c.block_size;
    for (int i = 0; i < count; ++column, offset = 0) {
      const int64_t block = blocks[column];
      if (block < 1 || block >= c.num_blocks) return blocks + column;
      const int64_t place = block * block_step_ + head;
      for (; i < count && offset < c.block_size; ++i, ++offset)
        visit(i, static_cast<const char*>(c.keys) + place + offset * key_step_,
              static_cast<const char*>(c.values) + place + offset * value_step_);
    }
    return nullptr;
  }

  // Addresses of entries [at, at + count); false if a column in use names no block.
  bool find(const Item& item, int64_t at, int count, const void** keys, const void** values,
            std::atomic<int>& refusal) const {
    const int32_t* wrong = each_entry(item, at, count, [=](int i, const char* key, const char* value) {
      keys[i] = key;
      values[i] = value;
    });
    return !wrong || refuse_one(kBlock, item, *wrong, refusal);
  }

  // What is read next: the item from entry `at` on, or the next item's first tile. Vectors of coded
  // entries are not fetched.
  void find_behind(int64_t index, int64_t at, Ahead& ahead) const {
    ahead.begin();
    if (at >= items_[index].end) {
      if (++index == (int64_t)items_.size()) return;
      at = items_[index].begin;
    }
    const Item& item = items_[index];
    const PagedAttention& c = call_;
    const int32_t* blocks = c.tables + lane(item) * c.columns;
    const int64_t end = std::min(at + kTileEntries, item.end);
    const int64_t head = item.kv_head % heads_per_table_ * head_step_;
    while (at < end) {
      const int64_t block = blocks[at / c.block_size], offset = at % c.block_size;
      if (block < 1 || block >= c.num_blocks) return;  // it will be refused
      const int64_t run = std::min(end - at, c.block_size - offset);
      const int64_t place = block * block_step_ + head;
      const char* keys = static_cast<const char*>(c.keys) + place + offset * key_step_;
      const char* values = static_cast<const char*>(c.values) + place + offset * value_step_;
      if (kFew && c.lanes) {
        const FewLane &own = lanes_[item.kv_head], &behind = lanes_[item.kv_head + item.heads - 1];
        const int64_t size = c.block_size / kSixteen * behind.bytes();
        ahead.add(static_cast<const char*>(c.keys) + block * block_step_ + own.at,
                  behind.at + size - own.at);
      } else if (kLevels) {
        ahead.add(static_cast<const char*>(c.keys) + place, item.heads * head_step_);
      } else if (item.heads == heads_per_table_) {
        ahead.add(keys, run * key_step_);
        ahead.add(values, run * value_step_);
      } else {
        for (int i = 0; i < run; ++i) ahead.add(keys + i * key_step_, item.heads * head_step_);
        for (int i = 0; i < run; ++i) ahead.add(values + i * value_step_, item.heads * head_step_);
      }
      at += run;
    }
  }

  // Nothing is known of entries yet; what lies behind the last is finite then.
  void clear(const Item& item, const Scratch& own, Scales& scales) const {
    for (float* each : {scales.key_steps, scales.value_steps, scales.value_lows})
      std::fill_n(each, kTileEntries, 0.0f);
    if (!kFew) return;
    for (int i = 0; i < item.rows(); ++i) {
      F sum = {};
      for (int d = 0; d < dim_; d += W) sum += X::load(own.query + i * kMaxHeadDim + d);
      scales.sums[i] = X::total(sum);
    }
  }

  // Steps and lows of those entries [at, at + count) whose blocks are there: all but the `skipped`
  // first.
  void find_scales(const Item& item, int h, int64_t at, int skipped, int count,
                   Scales& scales) const {
    const PagedAttention& c = call_;
    find_numbers(item, h, at, skipped, count, c.key_steps, scales.key_steps);
    find_numbers(item, h, at, skipped, count, c.value_steps, scales.value_steps);
    if (Planes<Value>::kLow)
      find_numbers(item, h, at, skipped, count, c.value_lows, scales.value_lows);
  }
  void find_numbers(const Item& item, int h, int64_t at, int skipped, int count,
                    const uint16_t* numbers, float* to) const {
    const int32_t* blocks = call_.tables + lane(item) * call_.columns;
    const int64_t size = call_.block_size;
    const int64_t head = (item.kv_head % heads_per_table_ + h) * head_step_;
    std::fill_n(to, skipped, 0.0f);
    int64_t offset = (at + skipped) % size, column = (at + skipped) / size;
    for (int i = skipped; i < count; ++column, offset = 0) {
      const uint16_t* place = numbers + (blocks[column] * block_step_ + head) / 2 + offset;
      const int run = std::min<int64_t>(count - i, size - offset);
      widen_run(place, run, to + i);
      i += run;
    }
  }
  static void widen_run(const uint16_t* from, int count, float* to) {
    int i = 0;
    for (; i + W <= count; i += W) X::store(to + i, X::load(reinterpret_cast<const bf16*>(from) + i));
    for (; i < count; ++i) {
      const uint32_t bits = (uint32_t)from[i] << 16;
      std::memcpy(to + i, &bits, sizeof bits);
    }
  }

  // Values of a tile as numbers.
  void widen(const void* const* rows, int count, Scales& scales) const {
    const Steps of = steps_of(scales);
    const int plane = dim_ / kValuePlanes;
    for (int k = 0; k < count; ++k) {
      const Value* row = static_cast<const Value*>(rows[k]);
      for (int p = 0; p < kValuePlanes; ++p)
        for (int j = 0; j < plane; j += W) {
          const int channel = p * plane + j, some = std::min(W, plane - j);
          Value part[W] = {};
          std::memcpy(part, row + j, some * sizeof(Value));
          const F x = number<W>(part, p, of, k);
          X::store(scales.values + k * dim_ + channel, x, some);
        }
    }
  }
  Steps steps_of(const Scales& scales) const {
    return {scales.value_steps, scales.value_lows};
  }

  // All heads of an item over its entries [at, at + count) in few bits, without the `skipped` first.
  bool attend_few(const Item& item, Scratch& own, Scales& scales, int64_t at, int skipped, int count,
                  Ahead& ahead, std::atomic<int>& refusal) const {
    constexpr int kMost = kTileEntries / kSixteen;
    const int num_tiles = (count + kSixteen - 1) / kSixteen, before = skipped / kSixteen;
    const uint8_t *blocks[kMost], *tiles[kMost], *values[kMost];
    int places[kMost];
    if (!find_tiles(item, at, before, num_tiles, blocks, places, refusal)) return false;
    find_behind(&item - items_.data(), item.behind(at), ahead);
    for (int h = 0; h < item.heads; ++h) {
      const FewLane& lane = lanes_[item.kv_head + h];
      const float low = 0.5f - (1 << (lane.keys.bits - 1));
      const int first = h * item.count, last = first + item.count;
      for (int tile = 0; tile < num_tiles; ++tile) {
        tiles[tile] = blocks[tile] + lane.at + places[tile] * lane.bytes();
        values[tile] = tiles[tile] + lane.value_at();
        const uint8_t* codes = tiles[tile] + lane.codes_at();
        const int place = tile * kSixteen;
        scale(codes, lane.key_factor, scales.key_steps + place);
        scale(codes + kSixteen, lane.value_factor, scales.value_steps + place);
        for (int i = first; i < last; i += 4)
          with_bits(lane.keys.bits, [&](auto bits) {
            level_sums_of<bits, !kBf16, 4>(last - i, tiles[tile], lane.keys.width,
                                   own.pairs + i * kMaxHeadDim, kMaxHeadDim,
                                   own.weights + i * kTileEntries + place, kTileEntries, ahead);
          });
      }
      const int width = num_tiles * kSixteen;
      for (int i = first; i < last; ++i)
        for (int v = 0; v < width; v += W) {
          float* row = own.weights + i * kTileEntries + v;
          const F sum = X::load(row) * own.steps[i] + low * scales.sums[i];
          X::store(row, sum * X::load(scales.key_steps + v));
        }
      if (call_.soft_cap > 0.0f) cap(own, first, last, width);
      for (int i = first; i < last; ++i)
        soften(own, i, own.always[i] - at, own.first[i] - at, own.last[i] + 1 - at, own.newer[i] - at, width);
      add_few_values(own, first, item.count, lane.values, values, num_tiles, scales, ahead);
    }
    return true;
  }

  static void scale(const uint8_t* codes, float factor, float* to) {
    Lanes<16>::store(to, scales_of((Lanes<16>::I)unsigned_bytes<16>(codes)) * factor);
  }

  void add_few_values(Scratch& own, int first, int num_rows, const Strips& strips,
                      const uint8_t* const* tiles, int num_tiles, Scales& scales,
                      Ahead& ahead) const {
    float* sums = own.sums + first * dim_;
    const float* weights = own.weights + first * kTileEntries;
    const float low = 0.5f - (1 << (strips.bits - 1));
    const int depth = num_tiles * kSixteen;
    for (int v = 0; v < depth; v += W)
      X::store(scales.value_lows + v, X::load(scales.value_steps + v) * low);
    const Steps of = steps_of(scales);
    if (meets_levels(strips.bits, strips.width, dim_))
      return add_levels<!kBf16>(sums, dim_, num_rows, weights, tiles, num_tiles, strips, of, ahead);
    widen_levels(tiles, num_tiles, strips, dim_, of, scales.values);
    const void* rows[kTileEntries];
    for (int k = 0; k < depth; ++k) rows[k] = scales.values + k * dim_;
    multiply_all<W, float>(sums, dim_, num_rows, dim_, weights, kTileEntries, rows, depth, of, ahead);
  }

  // Blocks of the tiles of entries from `at` on, and the tiles' numbers there; those before number
  // `before` are not there, and stand for others.
  bool find_tiles(const Item& item, int64_t at, int before, int count, const uint8_t** blocks,
                  int* places, std::atomic<int>& refusal) const {
    const PagedAttention& c = call_;
    const int32_t* columns = c.tables + lane(item) * c.columns;
    for (int i = before; i < count; ++i) {
      const int64_t entry = at + i * kSixteen, block = columns[entry / c.block_size];
      if (block < 1 || block >= c.num_blocks) return refuse_one(kBlock, item, block, refusal);
      blocks[i] = static_cast<const uint8_t*>(c.keys) + block * block_step_;
      places[i] = entry % c.block_size / kSixteen;
    }
    for (int i = 0; i < before; ++i) blocks[i] = blocks[before], places[i] = places[before];
    return true;
  }

  // Logits of rows [first, last) are capped; what fills up the last vector means nothing.
  void cap(Scratch& own, int first, int last, int width) const {
    for (int i = first; i < last; ++i)
      for (int at = 0; at < width; at += W) {
        float* logits = own.weights + i * kTileEntries + at;
        X::store(logits, capped(X::load(logits)));
      }
  }

  // soft_cap * tanh(x / soft_cap), by an exponential that stays finite.
  F capped(F x) const {
    F twice = x * (2.0f / call_.soft_cap);
    twice = twice > 40.0f ? F{} + 40.0f : twice;
    twice = twice < -40.0f ? F{} - 40.0f : twice;
    return call_.soft_cap - 2.0f * call_.soft_cap / (X::exp(twice) + 1.0f);
  }

  // Logits of up to Q rows from `first` on, key by key.
  template <int Q>
  void few_dots(Scratch& own, int first, int count, const void* const* keys, int64_t offset,
                int width, Ahead& ahead) const {
    if constexpr (Q > 1)
      if (count < Q) return few_dots<Q - 1>(own, first, count, keys, offset, width, ahead);
    for (int at = 0; at < width; at += W) {
      F sums[Q];
      dots<W, Q>(own.query + first * kMaxHeadDim, kMaxHeadDim, dim_, keys + at, offset, 0, sums,
                 ahead);
      for (int q = 0; q < Q; ++q)
        X::store(own.weights + (first + q) * kTileEntries + at, sums[q]);
    }
  }

  // Logits of rows [first, last) with `width` keys from `at` on, W or 2 W, by columns.
  template <int Lines>
  void few_of(Scratch& own, int first, int last, int at, int width, const Scales& scales,
              Ahead& ahead) const {
    constexpr int kMost = kMaxLanes == 8 ? 3 : 4;  // whose sums registers hold
    for (int i = first; i < last; i += kMost)
      few<kMost, Lines>(own, i, last - i, at, width, scales, ahead);
  }

  // Of up to Q rows from `first` on.
  template <int Q, int Lines>
  void few(Scratch& own, int first, int count, int at, int width, const Scales& scales,
           Ahead& ahead) const {
    if constexpr (Q > 1)
      if (count < Q) return few<Q - 1, Lines>(own, first, count, at, width, scales, ahead);
    if (width > W)
      sums_of<Q, 2, Lines>(own, first, at, scales, ahead);
    else
      sums_of<Q, 1, Lines>(own, first, at, scales, ahead);
  }

  template <int Q, int V, int Lines>
  void sums_of(Scratch& own, int first, int at, const Scales& scales, Ahead& ahead) const {
    constexpr int kApart = kMaxHeadDim * sizeof(float) / sizeof(typename C::Query);
    typename C::Sum sums[Q][V];
    logits_of<C, W, Q, V, Lines>(queries_of(own) + first * kApart, kApart, key_columns_,
                                 own.columns + at, kTileEntries, sums, ahead);
    for (int q = 0; q < Q; ++q)
      for (int v = 0; v < V; ++v) {
        F x = as_float(sums[q][v]);
        if constexpr (C::kPairs) x = x * own.steps[first + q];
        if constexpr (kLevels) x = x * X::load(scales.key_steps + at + v * W);
        X::store(own.weights + (first + q) * kTileEntries + at + v * W, x);
      }
  }

  static F as_float(F x) { return x; }
  static F as_float(typename X::I x) { return __builtin_convertvector(x, F); }

  static const typename C::Query* queries_of(const Scratch& own) {
    if constexpr (C::kPairs)
      return reinterpret_cast<const typename C::Query*>(own.pairs);
    else
      return own.query;
  }

  // Queries in whole steps, the largest number being 32767 of them, as columns meet them: the 16-bit
  // numbers of bytes 0 and 2, then of 1 and 3; or in digits (few_tiles.h). One that is not finite
  // stays so by its step.
  void round_query(Scratch& own, int i) const {
    const float* query = own.query + i * kMaxHeadDim;
    float largest = 0.0f, not_finite = 0.0f;
    for (int d = 0; d < dim_; ++d) {
      largest = std::max(largest, std::abs(query[d]));
      not_finite += query[d] * 0.0f;
    }
    if constexpr (kFew) {
      const double most = largest_whole<!kBf16>();
      own.steps[i] = (float)(largest / most) + not_finite;
      std::memset(own.pairs + i * kMaxHeadDim, 0, kMaxHeadDim * sizeof *own.pairs);
      return write_digits<!kBf16>(query, dim_, largest > 0.0f ? most / largest : 0.0,
                                  own.pairs + i * kMaxHeadDim);
    }
    const float inverse = largest > 0.0f ? 32767.0f / largest : 0.0f;
    own.steps[i] = largest / 32767.0f + not_finite;
    for (int d = 0; d < dim_; d += 4)
      for (int odd = 0; odd < 2; ++odd) {
        const int low = std::lrint(query[d + odd] * inverse);
        const int high = std::lrint(query[d + odd + 2] * inverse);
        own.pairs[i * kMaxHeadDim + d / 2 + odd] = static_cast<uint32_t>(high) << 16 | (low & 0xffff);
      }
  }

  void add_values(Scratch& own, int first, int num_rows, const void** values, int64_t offset,
                  int count, Scales& scales, Ahead& ahead) const {
    float* sums = own.sums + first * dim_;
    const float* weights = own.weights + first * kTileEntries;
    const Steps of = steps_of(scales);
    if (kBf16 && in_pairs<W, Value>(dim_))
      return add_in_pairs<W, Value>(sums, dim_, num_rows, dim_, weights, values, offset, count, of,
                                    ahead);
    if (kBf16 && in_quads<W, Value>(dim_))
      return add_in_quads<Value>(sums, dim_, num_rows, dim_, weights, values, offset, count, of,
                                 ahead);
    const void* rows[kTileEntries];
    for (int k = 0; k < count; ++k) rows[k] = static_cast<const char*>(values[k]) + offset;
    if (kLevels && (num_rows > kFewRows || dim_ / kValuePlanes % W)) {
      widen(rows, count, scales);
      for (int k = 0; k < count; ++k) rows[k] = scales.values + k * dim_;
      multiply_all<W, float>(sums, dim_, num_rows, dim_, weights, kTileEntries, rows, count, of, ahead);
    } else {
      multiply_all<W, Value>(sums, dim_, num_rows, dim_, weights, kTileEntries, rows, count, of, ahead);
    }
  }

  // Logits of pair i become weights relative to its largest logit so far. Those of [0, always) and of
  // [first, visible) count; those from `newer` on are added up apart.
  void soften(Scratch& own, int i, int64_t always, int64_t first, int64_t visible, int64_t newer,
              int width) const {
    float* row = own.weights + i * kTileEntries;
    if (visible <= 0 || (first >= width && always <= 0)) {
      std::memset(row, 0, width * sizeof(float));
      return;
    }
    const auto lane = X::count();
    const int seen = std::min<int64_t>(visible, width);
    const int from = std::min<int64_t>(std::max<int64_t>(first, 0), width);
    const int before = std::min<int64_t>(std::max<int64_t>(always, 0), width);
    const bool whole = from == 0 && seen == width;
    F highest = F{} - INFINITY;
    for (int v = 0; v < width; v += W) {
      F x = X::load(row + v);
      if (!whole) x = (lane < seen - v) & ((lane >= from - v) | (lane < before - v)) ? x : F{} - INFINITY;
      highest = x > highest ? x : highest;
    }
    const float largest = std::max(own.largest[i], X::largest(highest));
    F sum = {};
    for (int v = 0; v < width; v += W) {
      F x = X::exp(X::load(row + v) - largest);
      if (!whole) x = (lane < seen - v) & ((lane >= from - v) | (lane < before - v)) ? x : F{};
      X::store(row + v, x);
      sum += x;
    }
    F recent = {};
    if (newer < seen)
      for (int v = 0, newest = std::max<int64_t>(newer, 0); v < width; v += W)
        recent += lane >= newest - v ? X::load(row + v) : F{};
    if (largest != own.largest[i]) {
      const float shrink = std::exp(own.largest[i] - largest);
      own.total[i] *= shrink;
      own.recent[i] *= shrink;
      for (int d = 0; d < dim_; d += W)
        X::store(own.sums + i * dim_ + d, X::load(own.sums + i * dim_ + d) * shrink);
      own.largest[i] = largest;
    }
    own.total[i] += X::total(sum);
    own.recent[i] += X::total(recent);
  }

  float* partial(const Item& item, int part, int i) {
    return partials_.data() + (item.partial + (int64_t)part * item.rows() + i) * (dim_ + kKept);
  }

  void merge(const Item& item) {
    float sums[kMaxHeadDim];
    for (int i = 0; i < item.rows(); ++i) {
      float largest = -INFINITY, total = 0.0f, recent = 0.0f;
      for (int p = 0; p < item.parts; ++p) largest = std::max(largest, partial(item, p, i)[0]);
      std::memset(sums, 0, dim_ * sizeof(float));
      for (int p = 0; p < item.parts; ++p) {
        const float* kept = partial(item, p, i);
        if (kept[1] == 0.0f) continue;  // this part is behind what the query sees
        const float weight = std::exp(kept[0] - largest);
        total += weight * kept[1];
        recent += weight * kept[2];
        for (int d = 0; d < dim_; ++d) sums[d] += weight * kept[kKept + d];
      }
      write(item, i, sums, largest, total, recent);
    }
  }

  // The logarithm of what a row's softmax divides by so far.
  float begun_sum(const Item& item, int i) const {
    if (!call_.begun) return -INFINITY;
    return call_.begun_sums[token(item, i) * call_.num_heads + head(item, i)];
  }

  // Weighted values over the total of their weights, of which the newest entries have `recent`. What
  // was begun is added here, behind all parts: a row's sums do not depend on where its parts end.
  void write(const Item& item, int i, float* sums, float largest, float total, float recent) const {
    const int64_t place = token(item, i) * call_.num_heads + head(item, i);
    const float begun = begun_sum(item, i);
    if (begun > -INFINITY) {
      const float high = std::max(largest, begun);
      const float own = std::exp(largest - high), other = std::exp(begun - high);
      total = total * own + other;
      if (call_.shares) recent = recent * own + other * std::exp(call_.begun_shares[place]);
      const float* more = call_.begun + place * dim_;
      for (int d = 0; d < dim_; d += W)
        X::store(sums + d, X::load(sums + d) * own + X::load(more + d) * other);
      largest = high;
    }
    if (call_.sinks && total > 0.0f) total += std::exp(call_.sinks[head(item, i)] - largest);
    const float factor = total > 0.0f ? 1.0f / total : 0.0f;
    if (call_.shares) call_.shares[place] = total > 0.0f ? std::log(recent / total) : 0.0f;
    if (call_.log_sums) {
      call_.log_sums[place] = total > 0.0f ? largest + std::log(total) : -INFINITY;
      float* to = static_cast<float*>(call_.out) + place * dim_;
      for (int d = 0; d < dim_; d += W) X::store(to + d, X::load(sums + d) * factor);
      return;
    }
    T* to = static_cast<T*>(call_.out) + place * dim_;
    for (int d = 0; d < dim_; d += W) X::store(to + d, X::load(sums + d) * factor);
  }

  const PagedAttention& call_;
  const int dim_, group_, heads_per_table_;
  const int64_t key_step_, value_step_, head_step_, block_step_;  // bytes
  const int key_columns_;  // of four bytes of a key
  std::vector<FewLane> lanes_;  // of few bits, by KV head
  std::vector<Item> items_;
  std::vector<float> partials_;
};

// Tokens behind the last chunk are padding, and see nothing.
template <typename T>
void clear_padding(const PagedAttention& c) {
  const int64_t chunked = c.starts[c.num_chunks];
  if (chunked < 0 || chunked >= c.num_tokens) return;
  const int64_t heads = (c.num_tokens - chunked) * c.num_heads, first = chunked * c.num_heads;
  if (c.log_sums) return;  // the call that goes on reads nothing of them
  std::fill_n(static_cast<T*>(c.out) + first * c.head_dim, heads * c.head_dim, T{});
  if (c.shares) std::fill_n(c.shares + first, heads, 0.0f);
}

template <typename T>
int run(const PagedAttention& call) {
  clear_padding<T>(call);
  constexpr int kPlanes = kFew ? 1 : Planes<typename Stored<T, KVSERVE_VALUE>::type>::kPlanes;
  if (call.head_dim % (kMaxLanes * kPlanes) == 0) return Kernel<T, kMaxLanes>(call).run();
  return Kernel<T, 8>(call).run();
}

}  // namespace

extern "C" int kvserve_paged_attention(const PagedAttention* call) {
  return call->is_bf16 ? run<bf16>(*call) : run<float>(*call);
}

// The vector instructions that this library was compiled with, for people.
extern "C" const char* kvserve_instructions() {
#if defined(__AVX512F__)
  return "AVX-512"
#if defined(__AVX512BF16__)
         ", BF16"
#endif
#if defined(__AVX512VNNI__)
         ", VNNI"
#endif
      ;
#elif defined(__AVX2__)
  return "AVX2";
#elif defined(__ARM_NEON)
  return "NEON";
#else
  return "no vector instructions of its own";
#endif
}
