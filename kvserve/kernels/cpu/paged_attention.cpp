// Attention over a paged cache that reads the blocks in place, for CPUs.
//
// A tile is up to kTileRows (query, head) pairs that share one KV head; keys and values are loaded
// once for all of them. It walks its context kTileEntries at a time with an online softmax, in parts
// of kPartEntries whose results are merged in order: neither the number of threads nor other chunks
// change a bit of a row. Arithmetic is float32; bfloat16 is widened as it is loaded.
// A row's remainder, if it has one, is where its online softmax begins. A head's sink is added to the
// total at the end. Entries before the first one that a token sees are not read; tiles begin where
// they do without them, so that a row's sums are the same in any company.
// Entries held as codes are decoded kTileEntries at a time; one that is a codebook vector itself is
// read in place. Each code says which query heads of its KV head attend to the entry.
//
// KVSERVE_FORMAT says what is stored; there is a library for each. Levels are widened as they are
// loaded: a key's scale is applied to its logits, a value's to its weights. Chunks of many queries,
// which read a tile several times, widen it once. They add up in the same order as few queries do:
// the rounding of a new entry must not depend on whether its token was computed in a chunk.

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

#include "lanes.h"

#define KVSERVE_AUTO 0
#define KVSERVE_INT8 1
#define KVSERVE_K8V4 2
#define KVSERVE_FP8 3
#ifndef KVSERVE_FORMAT
#define KVSERVE_FORMAT KVSERVE_AUTO
#endif

namespace {

// What keys and values are stored as, where numbers are computed as T.
template <typename T>
struct Stored {
#if KVSERVE_FORMAT == KVSERVE_INT8
  typedef int8 Key;
  typedef int8 Value;
#elif KVSERVE_FORMAT == KVSERVE_K8V4
  typedef int8 Key;
  typedef int4x2 Value;
#elif KVSERVE_FORMAT == KVSERVE_FP8
  typedef e4m3 Key;
  typedef e4m3 Value;
#else
  typedef T Key;
  typedef T Value;
#endif
};
constexpr bool kLevels = KVSERVE_FORMAT != KVSERVE_AUTO;
constexpr bool kHasLow = KVSERVE_FORMAT == KVSERVE_K8V4;
// int4 values: sums of both halves are kept side by side, and separated when they are written.
constexpr int kHalves = kHasLow ? 2 : 1;

constexpr int kTileRows = 32;
constexpr int kTileEntries = 64;
constexpr int kPartEntries = 1024;
constexpr int kMaxHeadDim = 256;
constexpr int kKept = 3;  // numbers of a part beside its sums: largest logit, total, and of the newest
constexpr int kFewRows = 4;  // for up to so many, as in decoding, keys are not transposed
constexpr int kMaxVectors = kMaxLanes / 4;
constexpr int kAhead = 32;  // entries: a key or a value is prefetched so long before it is read

constexpr float kHidden = -1e30f;  // the logit of an entry that a query head does not attend to
constexpr uint32_t kAllHeads = ~0u;

// An entry held as a code, as it is stored; scales are float16.
struct Slot {
  uint16_t key, value, key_scale, value_scale, position;
  int16_t distance;
  uint32_t heads;
};

// Of a finite number that is not negative.
inline float half_to_float(uint16_t half) {
  const uint32_t bits = (uint32_t)half << 13;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number * 0x1p112f;
}

template <int W, int Step, int... L>
inline void swap_corners(typename Lanes<W>::F& a, typename Lanes<W>::F& b,
                         std::integer_sequence<int, L...>) {
  typedef typename Lanes<W>::I I;
  const auto upper = __builtin_shuffle(a, b, I{((L & Step) ? W + L - Step : L)...});
  b = __builtin_shuffle(a, b, I{((L & Step) ? W + L : L + Step)...});
  a = upper;
}

template <int W, int Step = W / 2>
inline void transpose(typename Lanes<W>::F* rows) {
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i)
    if (!(i & Step))
      swap_corners<W, Step>(rows[i], rows[i + Step], std::make_integer_sequence<int, W>());
  if constexpr (Step > 1) transpose<W, Step / 2>(rows);
}

// Whether the vector of W numbers from number d on is the first of a cache line; lines of one row.
template <typename T, int W>
inline bool starts_line(int d) {
  constexpr int per_line = 64 / sizeof(T);
  return W >= per_line || d % per_line == 0;
}

// ---- logits[Q, W] = queries[Q, D] . W keys[D] ---------------------------------------------------

// Sums of keys k, k + Step, k + 2 Step, ... below W. Lanes whose numbers are the same below Step
// add up to the logit of one key: k plus that number.
template <int W, int Q, int Step, typename T>
inline void dots(const float* queries, int dim, const void* const* keys, int k,
                 typename Lanes<W>::F* sums) {
  typedef Lanes<W> X;
  typedef typename X::F F;
  if constexpr (Step == W) {
    for (int q = 0; q < Q; ++q) sums[q] = F{};
    const T *row = static_cast<const T*>(keys[k]), *next = static_cast<const T*>(keys[k + kAhead]);
    for (int d = 0; d < dim; d += W) {
      const F key = X::load(row + d);
      if (starts_line<T, W>(d)) __builtin_prefetch(next + d, 0, 2);
      for (int q = 0; q < Q; ++q) sums[q] += X::load(queries + q * dim + d) * key;
    }
  } else {
    F others[Q];
    dots<W, Q, 2 * Step, T>(queries, dim, keys, k, sums);
    dots<W, Q, 2 * Step, T>(queries, dim, keys, k + Step, others);
    for (int q = 0; q < Q; ++q) {
      swap_corners<W, Step>(sums[q], others[q], std::make_integer_sequence<int, W>());
      sums[q] += others[q];
    }
  }
}

template <int W, int Q, typename T>
void dots_of(float* logits, int stride, const float* queries, int dim, const void* const* keys,
             int width) {
  for (int at = 0; at < width; at += W) {
    typename Lanes<W>::F sums[Q];
    dots<W, Q, 1, T>(queries, dim, keys + at, 0, sums);
    for (int q = 0; q < Q; ++q) Lanes<W>::store(logits + q * stride + at, sums[q]);
  }
}

// ---- out[Q, V * W] (+)= a[Q, depth] . rows[depth][V * W] ----------------------------------------

// int4: columns are those of both halves in turns, W each.
template <int W, int Q, int V, bool Add, bool Fetch, typename T>
inline void multiply(float* out, int stride, const float* a, int a_stride, const void* const* rows,
                     int column, int depth) {
  constexpr int per_item = std::is_same_v<T, int4x2> ? 2 : 1;
  typedef Lanes<W> X;
  typename X::F sum[Q][V] = {};
  if (Add)
    for (int q = 0; q < Q; ++q)
      for (int v = 0; v < V; ++v) sum[q][v] = X::load(out + q * stride + v * W);
  for (int k = 0; k < depth; ++k) {
    const T* row = static_cast<const T*>(rows[k]) + column / per_item;
    const T* next = static_cast<const T*>(rows[k + (Fetch ? kAhead : 0)]) + column / per_item;
    typename X::F b[V];
    if constexpr (per_item == 2) {
      for (int v = 0; v + 1 < V; v += 2) X::load(row + v / 2 * W, b[v], b[v + 1]);
      if (Fetch) __builtin_prefetch(next, 0, 2);
    } else {
      for (int v = 0; v < V; ++v) {
        b[v] = X::load(row + v * W);
        if (Fetch && starts_line<T, W>(v * W)) __builtin_prefetch(next + v * W, 0, 2);
      }
    }
    for (int q = 0; q < Q; ++q)
      for (int v = 0; v < V; ++v) sum[q][v] += a[q * a_stride + k] * b[v];
  }
  for (int q = 0; q < Q; ++q)
    for (int v = 0; v < V; ++v) X::store(out + q * stride + v * W, sum[q][v]);
}

template <int W, int Q, bool Add, bool Fetch, typename T>
void multiply_rows(float* out, int stride, int width, const float* a, int a_stride,
                   const void* const* rows, int depth) {
  int at = 0;
  for (; at + kMaxVectors * W <= width; at += kMaxVectors * W)
    multiply<W, Q, kMaxVectors, Add, Fetch, T>(out + at, stride, a, a_stride, rows, at, depth);
  for (; at + 2 * W <= width; at += 2 * W)
    multiply<W, Q, 2, Add, Fetch, T>(out + at, stride, a, a_stride, rows, at, depth);
  if constexpr (!std::is_same_v<T, int4x2>)
    if (at < width) multiply<W, Q, 1, Add, Fetch, T>(out + at, stride, a, a_stride, rows, at, depth);
}

// width: a multiple of W; of int4, of 2 W.
template <int W, bool Add, bool Fetch, typename T>
void multiply_all(float* out, int stride, int num_rows, int width, const float* a, int a_stride,
                  const void* const* rows, int depth) {
  for (; num_rows >= 4; num_rows -= 4, out += 4 * stride, a += 4 * a_stride)
    multiply_rows<W, 4, Add, Fetch, T>(out, stride, width, a, a_stride, rows, depth);
  if (num_rows == 3) multiply_rows<W, 3, Add, Fetch, T>(out, stride, width, a, a_stride, rows, depth);
  if (num_rows == 2) multiply_rows<W, 2, Add, Fetch, T>(out, stride, width, a, a_stride, rows, depth);
  if (num_rows == 1) multiply_rows<W, 1, Add, Fetch, T>(out, stride, width, a, a_stride, rows, depth);
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
  const float* sinks;       // [Hq], a logit without a value for each query head; null: none
  int64_t* fault;           // [2], the chunk and the number that were refused
  float* shares;            // [T, Hq]: logarithm of what the newest entries got; null: not wanted
  const int64_t* recent;    // [T], how many entries are the newest
  // What stands for entries that a row has lost, [num_rows, Hkv, D] and [num_rows, Hkv]; null: nothing.
  const void* remainder_keys;
  const void* remainder_values;
  const float* remainder_bias;   // -inf: nothing
  // Entries held as codes; coded is null where there can be none. Lanes are [num_rows, R].
  const int64_t* coded;          // how many entries of each lane are codes, from its first on
  const Slot* slots;             // [num_blocks, slots_per_block]
  const void* vectors;           // [num_blocks, 2 * B, D]
  const int32_t* slot_tables;    // [num_rows, R, slot_columns], blocks of slots
  const int32_t* vector_tables;  // [num_rows, R, vector_columns], blocks of vectors
  const float* turns;            // [num_turns, D], cosines and sines by distance
  // Of levels: bfloat16, an entry each. Here [num_blocks, Hb, B] for levels too, blocks block_stride
  // and heads head_stride bytes apart.
  const uint16_t* key_scales;
  const uint16_t* value_scales;
  const uint16_t* value_lows;    // of int4
  int64_t head_stride;
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

// Rows [first, first + count) of chunk's (query, head) pairs, over one part of their context.
struct Item {
  int chunk, kv_head, first, count, part, parts;
  int64_t begin, seen, end;  // entries: those from `seen` on are read, tiles count from `begin`
  int64_t partial;     // where the first of its parts is kept, if there are several
};

struct Scratch {
  alignas(64) float query[kTileRows * kMaxHeadDim];
  alignas(64) float sums[kTileRows * kMaxHeadDim];
  alignas(64) float keys[kTileEntries * kMaxHeadDim];
  alignas(64) float weights[kTileRows * kTileEntries];
  float largest[kTileRows], total[kTileRows], recent[kTileRows];
  int64_t first[kTileRows], last[kTileRows], newer[kTileRows];  // newer: the newest begin there
  const void* key_rows[kMaxHeadDim];
  uint32_t heads[kTileEntries];  // that attend to each coded entry of the tile
};

// Beside it where levels are held: of the tile's entries, and what int4's lows have added up to.
struct Scales {
  alignas(64) float keys[kTileEntries * kMaxHeadDim];  // levels as floats, for chunks
  alignas(64) float values[kTileEntries * kMaxHeadDim];
  alignas(64) float key[kTileEntries], value[kTileEntries], low[kTileEntries];
  const void *key_rows[kTileEntries + kAhead], *value_rows[kTileEntries];
  float lows[kTileRows];
};

template <typename T, int W>
class Kernel {
  typedef typename Stored<T>::Key Key;
  typedef typename Stored<T>::Value Value;

 public:
  explicit Kernel(const PagedAttention& call)
      : call_(call),
        dim_(call.head_dim),
        group_(call.num_heads / call.num_kv_heads),
        heads_per_table_(call.num_kv_heads / call.tables_per_row),
        key_step_((kLevels ? 1 : heads_per_table_) * dim_ * sizeof(Key)),
        value_step_((kLevels ? 1 : heads_per_table_) * dim_ * sizeof(Value) / kHalves),
        head_step_(kLevels ? call.head_stride : dim_ * sizeof(T)),
        block_step_(call.block_stride * (kLevels ? 1 : sizeof(T))) {}

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

  // Check every chunk, and cut it into items.
  int plan() {
    const PagedAttention& c = call_;
    int64_t partials = 0;
    for (int64_t s = 0; s < c.num_chunks; ++s) {
      const int64_t begin = c.starts[s], end = c.starts[s + 1];
      if (c.rows[s] < 0 || c.rows[s] >= c.num_rows) return refuse(kRow, s, c.rows[s]);
      if (begin < 0 || end < begin || end > c.num_tokens) return refuse(kChunk, s, end);
      const int64_t pairs = (end - begin) * group_;
      for (int h = 0; h < c.num_kv_heads; ++h) {
        const int64_t* last = last_of(h);
        for (int64_t first = 0; first < pairs; first += kTileRows) {
          const int count = std::min<int64_t>(kTileRows, pairs - first);
          int64_t furthest = -1, nearest = c.first ? INT64_MAX : 0;
          const int64_t stop = begin + (first + count - 1) / group_;
          for (int64_t t = begin + first / group_; t <= stop; ++t) {
            if (last[t] < -1 || last[t] >= c.columns * c.block_size)
              return refuse(kEntry, s, last[t]);
            furthest = std::max(furthest, last[t]);
            if (c.first && last[t] >= 0) {
              const int64_t from = first_of(h)[t];
              if (from < 0 || from > last[t]) return refuse(kEntry, s, from);
              nearest = std::min(nearest, from);
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
            items_.push_back({(int)s, h, (int)first, count, part, parts, from, seen, to, partials});
          }
          if (parts > 1) partials += parts * count;
        }
      }
    }
    partials_.resize(partials * (dim_ + kKept));
    return kNone;
  }

  void attend(int64_t index, std::atomic<int>& refusal) {
    if (refusal != kNone) return;
    const Item& item = items_[index];
    Scratch own;
    begin(item, own);
    const bool decodes = item.count <= kFewRows;
    const void* rows[2 * kTileEntries + kAhead];  // in the order in which they are read
    std::fill(std::begin(rows), std::end(rows), call_.keys);
    alignas(64) T decoded[2][kTileEntries * kMaxHeadDim];
    Scales scales;
    if (kLevels) clear(item, scales);
    for (int64_t at = item.begin; at < item.end; at += kTileEntries) {
      const int count = std::min<int64_t>(kTileEntries, item.end - at);
      const int width = (count + W - 1) / W * W;
      const void **keys = rows, **values = rows + width;
      const int skipped = std::max<int64_t>(0, item.seen - at);
      const int coded = std::max<int64_t>(0, std::min<int64_t>(count, num_coded(item) - at));
      if (!decode(item, at, coded, keys, values, decoded, own.heads, refusal)) return;
      const int known = std::max(coded, skipped);
      if (!find(item, at + known, count - known, keys + known, values + known, refusal)) return;
      if (kLevels) find_scales(item, at, skipped, count, scales);
      for (int i = 0; i < skipped; ++i) keys[i] = keys[skipped], values[i] = values[skipped];
      if (decodes) find_behind(index, at + count, values + count);
      score(item, own, keys, count, width, scales);
      hide(item, own, coded);
      for (int i = 0; i < item.count; ++i)
        soften(own, i, own.first[i] - at, own.last[i] + 1 - at, own.newer[i] - at, width, scales);
      if (kLevels) weigh(item, own, width, scales);
      if (decodes) {
        multiply_all<W, true, true, Value>(own.sums, dim_, item.count, dim_, own.weights,
                                           kTileEntries, values, count);
      } else if (kLevels) {
        widen<Value>(values, count, scales.values, scales.value_rows);
        multiply_all<W, true, false, float>(own.sums, dim_, item.count, dim_, own.weights,
                                            kTileEntries, scales.value_rows, count);
      } else {
        multiply_all<W, true, false, Value>(own.sums, dim_, item.count, dim_, own.weights,
                                            kTileEntries, values, count);
      }
    }
    if (kHasLow)
      for (int i = 0; i < item.count; ++i)
        for (int d = 0; d < dim_; d += W)
          X::store(own.sums + i * dim_ + d, X::load(own.sums + i * dim_ + d) + scales.lows[i]);
    if (item.parts == 1) {
      for (int i = 0; i < item.count; ++i)
        write(item, i, own.sums + i * dim_, own.largest[i], own.total[i], own.recent[i]);
      return;
    }
    for (int i = 0; i < item.count; ++i) {
      float* kept = partial(item, item.part, i);
      kept[0] = own.largest[i];
      kept[1] = own.total[i];
      kept[2] = own.recent[i];
      std::memcpy(kept + kKept, own.sums + i * dim_, dim_ * sizeof(float));
    }
  }

  // Where pair i of an item lies in query and out, in heads.
  int64_t token(const Item& item, int i) const {
    return call_.starts[item.chunk] + (item.first + i) / group_;
  }
  int64_t head(const Item& item, int i) const {
    return (int64_t)item.kv_head * group_ + (item.first + i) % group_;
  }

  void begin(const Item& item, Scratch& own) const {
    const int64_t* last = last_of(item.kv_head);
    for (int i = 0; i < item.count; ++i) {
      own.last[i] = last[token(item, i)];
      own.first[i] = call_.first ? first_of(item.kv_head)[token(item, i)] : 0;
      own.newer[i] = call_.shares ? own.last[i] + 1 - call_.recent[token(item, i)] : INT64_MAX;
      own.largest[i] = -INFINITY;
      own.total[i] = own.recent[i] = 0.0f;
      const T* from = static_cast<const T*>(call_.query) + token(item, i) * call_.query_stride +
                      head(item, i) * dim_;
      for (int d = 0; d < dim_; d += W)
        X::store(own.query + i * dim_ + d, X::load(from + d) * call_.scale);
    }
    std::memset(own.sums, 0, item.count * dim_ * sizeof(float));
    if (call_.remainder_bias && item.part == 0) begin_with_remainder(item, own);
  }

  // One part of a context begins with the row's remainder instead of nothing.
  void begin_with_remainder(const Item& item, Scratch& own) const {
    const int64_t place = call_.rows[item.chunk] * call_.num_kv_heads + item.kv_head;
    const float bias = call_.remainder_bias[place];
    if (bias == -INFINITY) return;
    const T* key = static_cast<const T*>(call_.remainder_keys) + place * dim_;
    const T* value = static_cast<const T*>(call_.remainder_values) + place * dim_;
    for (int i = 0; i < item.count; ++i) {
      if (own.last[i] < 0) continue;  // it sees nothing
      F logit = {};
      for (int d = 0; d < dim_; d += W) logit += X::load(own.query + i * dim_ + d) * X::load(key + d);
      const float product = X::total(logit), cap = call_.soft_cap;
      own.largest[i] = (cap > 0.0f ? cap * std::tanh(product / cap) : product) + bias;
      own.total[i] = 1.0f;
      for (int d = 0; d < dim_; d += W)
        X::store(own.sums + i * dim_ + d, X::load(value + written(d)));
    }
  }

  int64_t lane(const Item& item) const {
    return call_.rows[item.chunk] * call_.tables_per_row + item.kv_head / heads_per_table_;
  }
  int64_t num_coded(const Item& item) const { return call_.coded ? call_.coded[lane(item)] : 0; }

  // Addresses of coded entries [at, at + count): vectors of the codebook, or in `decoded` if they
  // have to be rotated or scaled; and which heads attend to them. False if a reference is wrong.
  bool decode(const Item& item, int64_t at, int count, const void** keys, const void** values,
              T (*decoded)[kTileEntries * kMaxHeadDim], uint32_t* heads,
              std::atomic<int>& refusal) const {
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
      heads[i] = slot.heads;
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

  // The raw keys that are read next, from entry `at` of an item or the next item's first on. Vectors
  // of coded entries are not prefetched.
  void find_behind(int64_t index, int64_t at, const void** keys) const {
    if (at >= items_[index].end) {
      if (++index == (int64_t)items_.size()) return;
      at = items_[index].begin;
    }
    const Item& item = items_[index];
    const int count = std::min<int64_t>(kAhead, item.end - at);
    each_entry(item, at, count, [=](int i, const char* key, const char*) { keys[i] = key; });
  }

  // Nothing is known of entries yet; what lies behind the last is finite then.
  void clear(const Item& item, Scales& scales) const {
    for (float* each : {scales.key, scales.value, scales.low}) std::fill_n(each, kTileEntries, 0.0f);
    std::fill_n(scales.lows, item.count, 0.0f);
    std::fill(std::begin(scales.key_rows), std::end(scales.key_rows), scales.keys);
  }

  // Scales of those entries [at, at + count) whose blocks are there: all but the `skipped` first.
  void find_scales(const Item& item, int64_t at, int skipped, int count, Scales& scales) const {
    const PagedAttention& c = call_;
    const int32_t* blocks = c.tables + lane(item) * c.columns;
    const int64_t head = item.kv_head % heads_per_table_ * head_step_;
    at += skipped;
    for (float* each : {scales.key, scales.value, scales.low}) std::fill_n(each, skipped, 0.0f);
    int64_t offset = at % c.block_size, column = at / c.block_size;
    for (int i = skipped; i < count; ++column, offset = 0) {
      const int64_t place = (blocks[column] * block_step_ + head) / 2 + offset;
      const int run = std::min<int64_t>(count - i, c.block_size - offset);
      widen_run(c.key_scales + place, run, scales.key + i);
      widen_run(c.value_scales + place, run, scales.value + i);
      if (kHasLow) widen_run(c.value_lows + place, run, scales.low + i);
      i += run;
    }
  }
  static void widen_run(const uint16_t* from, int count, float* to) {
    for (int i = 0; i < count; ++i) {
      const uint32_t bits = (uint32_t)from[i] << 16;
      std::memcpy(to + i, &bits, sizeof bits);
    }
  }

  // Weights become those of levels; what they make of int4's lows is kept aside.
  void weigh(const Item& item, Scratch& own, int width, Scales& scales) const {
    for (int i = 0; i < item.count; ++i) {
      float* row = own.weights + i * kTileEntries;
      F lows = {};
      for (int v = 0; v < width; v += W) {
        const F weight = X::load(row + v);
        if (kHasLow) lows += weight * X::load(scales.low + v);
        X::store(row + v, weight * X::load(scales.value + v));
      }
      if (kHasLow) scales.lows[i] += X::total(lows);
    }
  }

  // Levels of a tile as floats; of int4, W of either half in turns.
  template <typename Levels>
  void widen(const void* const* from, int count, float* to, const void** rows) const {
    for (int k = 0; k < count; ++k, to += dim_) {
      const Levels* row = static_cast<const Levels*>(from[k]);
      rows[k] = to;
      if constexpr (std::is_same_v<Levels, int4x2>) {
        for (int d = 0; d < dim_; d += 2 * W) {
          F low, high;
          X::load(row + d / 2, low, high);
          X::store(to + d, low);
          X::store(to + d + W, high);
        }
      } else {
        for (int d = 0; d < dim_; d += W) X::store(to + d, X::load(row + d));
      }
    }
  }

  // Logits of all pairs with `count` keys; what fills up the last vector means nothing.
  void score(const Item& item, Scratch& own, const void** keys, int count, int width,
             Scales& scales) const {
    if (item.count <= kFewRows) {
      for (int i = count; i < width; ++i) keys[i] = keys[0];
      few<kFewRows, Key>(own, 0, item.count, keys, width);
    } else if (kLevels) {
      widen<Key>(keys, count, scales.keys, scales.key_rows);
      for (int i = count; i < width; ++i) scales.key_rows[i] = scales.keys;
      for (int i = 0; i < item.count; i += kFewRows)
        few<kFewRows, float>(own, i, item.count - i, scales.key_rows, width);
    } else {
      turn(keys, count, width, own.keys);
      for (int d = 0; d < dim_; ++d) own.key_rows[d] = own.keys + d * kTileEntries;
      multiply_all<W, false, false, float>(own.weights, kTileEntries, item.count, width, own.query,
                                           dim_, own.key_rows, dim_);
    }
    if (kLevels)
      for (int i = 0; i < item.count; ++i)
        for (int at = 0; at < width; at += W) {
          float* logits = own.weights + i * kTileEntries + at;
          X::store(logits, X::load(logits) * X::load(scales.key + at));
        }
    if (call_.soft_cap > 0.0f)
      for (int i = 0; i < item.count; ++i)
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

  // Of up to Q pairs from `first` on.
  template <int Q, typename Numbers>
  void few(Scratch& own, int first, int count, const void* const* keys, int width) const {
    if constexpr (Q > 1)
      if (count < Q) return few<Q - 1, Numbers>(own, first, count, keys, width);
    dots_of<W, Q, Numbers>(own.weights + first * kTileEntries, kTileEntries,
                           own.query + first * dim_, dim_, keys, width);
  }

  // Keys [count, D] -> [D, width]; what fills up the last vector is zero.
  void turn(const void* const* keys, int count, int width, float* out) const {
    if constexpr (!kLevels)
      for (int at = 0; at < width; at += W)
        for (int d = 0; d < dim_; d += W) {
          F tile[W];
          for (int i = 0; i < W; ++i)
            tile[i] = at + i < count ? X::load(static_cast<const T*>(keys[at + i]) + d) : F{};
          transpose<W>(tile);
          for (int i = 0; i < W; ++i) X::store(out + (d + i) * kTileEntries + at, tile[i]);
        }
  }

  // Hide from each pair those of the tile's first `coded` entries that its head does not attend to.
  void hide(const Item& item, Scratch& own, int coded) const {
    if (std::all_of(own.heads, own.heads + coded, [](uint32_t heads) { return heads == kAllHeads; }))
      return;
    for (int i = 0; i < item.count; ++i) {
      const int bit = (item.first + i) % group_;
      float* row = own.weights + i * kTileEntries;
      for (int k = 0; k < coded; ++k)
        if (!(own.heads[k] >> bit & 1)) row[k] = kHidden;
    }
  }

  // Logits of pair i become weights relative to its largest logit so far. Those of [first, visible)
  // count; those from `newer` on are added up apart.
  void soften(Scratch& own, int i, int64_t first, int64_t visible, int64_t newer, int width,
              Scales& scales) const {
    float* row = own.weights + i * kTileEntries;
    if (visible <= 0 || first >= width) {
      std::memset(row, 0, width * sizeof(float));
      return;
    }
    const auto lane = X::count();
    const int seen = std::min<int64_t>(visible, width), from = std::max<int64_t>(first, 0);
    F highest = F{} - INFINITY;
    for (int v = 0; v < width; v += W) {
      const F x = (lane < seen - v) & (lane >= from - v) ? X::load(row + v) : F{} - INFINITY;
      highest = x > highest ? x : highest;
    }
    const float largest = std::max(own.largest[i], X::largest(highest));
    F sum = {};
    for (int v = 0; v < width; v += W) {
      const F logit = X::load(row + v), weight = X::exp(logit - largest);
      const F x = (lane < seen - v) & (lane >= from - v) & (logit > kHidden) ? weight : F{};
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
      if (kHasLow) scales.lows[i] *= shrink;
      for (int d = 0; d < dim_; d += W)
        X::store(own.sums + i * dim_ + d, X::load(own.sums + i * dim_ + d) * shrink);
      own.largest[i] = largest;
    }
    own.total[i] += X::total(sum);
    own.recent[i] += X::total(recent);
  }

  float* partial(const Item& item, int part, int i) {
    return partials_.data() + (item.partial + (int64_t)part * item.count + i) * (dim_ + kKept);
  }

  void merge(const Item& item) {
    float sums[kMaxHeadDim];
    for (int i = 0; i < item.count; ++i) {
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

  // Weighted values over the total of their weights, of which the newest entries have `recent`.
  void write(const Item& item, int i, const float* sums, float largest, float total,
             float recent) const {
    const int64_t place = token(item, i) * call_.num_heads + head(item, i);
    if (call_.sinks && total > 0.0f) total += std::exp(call_.sinks[head(item, i)] - largest);
    const float factor = total > 0.0f ? 1.0f / total : 0.0f;
    if (call_.shares) call_.shares[place] = total > 0.0f ? std::log(recent / total) : 0.0f;
    T* to = static_cast<T*>(call_.out) + place * dim_;
    for (int d = 0; d < dim_; d += W) X::store(to + written(d), X::load(sums + d) * factor);
  }

  // Where the sums from number d on are written.
  int written(int d) const {
    const int half = d / W % kHalves;
    return (d - half * W) / kHalves + half * (dim_ / 2);
  }

  const PagedAttention& call_;
  const int dim_, group_, heads_per_table_;
  const int64_t key_step_, value_step_, head_step_, block_step_;  // bytes
  std::vector<Item> items_;
  std::vector<float> partials_;
};

template <typename T>
int run(const PagedAttention& call) {
  if (call.head_dim % (kMaxLanes * kHalves) == 0) return Kernel<T, kMaxLanes>(call).run();
  return Kernel<T, 8>(call).run();
}

}  // namespace

extern "C" int kvserve_paged_attention(const PagedAttention* call) {
  return call->is_bf16 ? run<bf16>(*call) : run<float>(*call);
}
