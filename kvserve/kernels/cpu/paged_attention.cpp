// Attention over a paged cache that reads the blocks where they lie, for CPUs.
//
// A tile is up to kTileRows (query, head) pairs that share one KV head; keys and values are loaded
// once for all of them. It walks its context kTileEntries at a time with an online softmax, in parts
// of kPartEntries whose results are merged in order: neither the number of threads nor other chunks
// change a bit of a row. Arithmetic is float32; bfloat16 is widened as it is loaded.
// Entries held as codes are decoded kTileEntries at a time; what is a vector itself is read in place.
// Each of them says which query heads of its KV head attend to it.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <utility>
#include <vector>

#include "lanes.h"

namespace {

constexpr int kTileRows = 32;
constexpr int kTileEntries = 64;
constexpr int kPartEntries = 1024;
constexpr int kMaxHeadDim = 256;
constexpr int kFewRows = 4;  // for so many, as in decoding, it does not pay to turn the keys
constexpr int kMaxVectors = kMaxLanes / 4;
constexpr int kAhead = 32;  // entries: so long before it is read, a key or a value is asked for

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

// ---- logits[Q, W] = queries[Q, D] . W keys[D] ---------------------------------------------------

// Sums of keys k, k + Step, k + 2 Step, ... below W. Lanes whose numbers are the same below Step
// add up to the logit of one key: k plus that number.
template <int W, int Q, int Step, typename T>
inline void dots(const float* queries, int dim, const T* const* keys, int k,
                 typename Lanes<W>::F* sums) {
  typedef Lanes<W> X;
  typedef typename X::F F;
  if constexpr (Step == W) {
    for (int q = 0; q < Q; ++q) sums[q] = F{};
    for (int d = 0; d < dim; d += W) {
      const F key = X::load(keys[k] + d);
      __builtin_prefetch(keys[k + kAhead] + d, 0, 2);
      for (int q = 0; q < Q; ++q) sums[q] += X::load(queries + q * dim + d) * key;
    }
  } else {
    F others[Q];
    dots<W, Q, 2 * Step>(queries, dim, keys, k, sums);
    dots<W, Q, 2 * Step>(queries, dim, keys, k + Step, others);
    for (int q = 0; q < Q; ++q) {
      swap_corners<W, Step>(sums[q], others[q], std::make_integer_sequence<int, W>());
      sums[q] += others[q];
    }
  }
}

template <int W, int Q, typename T>
void dots_of(float* logits, int stride, const float* queries, int dim, const T* const* keys,
             int width) {
  for (int at = 0; at < width; at += W) {
    typename Lanes<W>::F sums[Q];
    dots<W, Q, 1>(queries, dim, keys + at, 0, sums);
    for (int q = 0; q < Q; ++q) Lanes<W>::store(logits + q * stride + at, sums[q]);
  }
}

// ---- out[Q, V * W] (+)= a[Q, depth] . rows[depth][V * W] ----------------------------------------

template <int W, int Q, int V, bool Add, bool Fetch, typename T>
inline void multiply(float* out, int stride, const float* a, int a_stride, const T* const* rows,
                     int column, int depth) {
  typedef Lanes<W> X;
  typename X::F sum[Q][V] = {};
  if (Add)
    for (int q = 0; q < Q; ++q)
      for (int v = 0; v < V; ++v) sum[q][v] = X::load(out + q * stride + v * W);
  for (int k = 0; k < depth; ++k) {
    const T* row = rows[k] + column;
    typename X::F b[V];
    for (int v = 0; v < V; ++v) {
      b[v] = X::load(row + v * W);
      if (Fetch) __builtin_prefetch(rows[k + kAhead] + column + v * W, 0, 2);
    }
    for (int q = 0; q < Q; ++q)
      for (int v = 0; v < V; ++v) sum[q][v] += a[q * a_stride + k] * b[v];
  }
  for (int q = 0; q < Q; ++q)
    for (int v = 0; v < V; ++v) X::store(out + q * stride + v * W, sum[q][v]);
}

template <int W, int Q, bool Add, bool Fetch, typename T>
void multiply_rows(float* out, int stride, int width, const float* a, int a_stride,
                   const T* const* rows, int depth) {
  int at = 0;
  for (; at + kMaxVectors * W <= width; at += kMaxVectors * W)
    multiply<W, Q, kMaxVectors, Add, Fetch>(out + at, stride, a, a_stride, rows, at, depth);
  for (; at + 2 * W <= width; at += 2 * W)
    multiply<W, Q, 2, Add, Fetch>(out + at, stride, a, a_stride, rows, at, depth);
  if (at < width) multiply<W, Q, 1, Add, Fetch>(out + at, stride, a, a_stride, rows, at, depth);
}

// width: a multiple of W.
template <int W, bool Add, bool Fetch, typename T>
void multiply_all(float* out, int stride, int num_rows, int width, const float* a, int a_stride,
                  const T* const* rows, int depth) {
  for (; num_rows >= 4; num_rows -= 4, out += 4 * stride, a += 4 * a_stride)
    multiply_rows<W, 4, Add, Fetch>(out, stride, width, a, a_stride, rows, depth);
  if (num_rows == 3) multiply_rows<W, 3, Add, Fetch>(out, stride, width, a, a_stride, rows, depth);
  if (num_rows == 2) multiply_rows<W, 2, Add, Fetch>(out, stride, width, a, a_stride, rows, depth);
  if (num_rows == 1) multiply_rows<W, 1, Add, Fetch>(out, stride, width, a, a_stride, rows, depth);
}

}  // namespace

// ---- what the launcher passes; it mirrors these fields -----------------------------------------

extern "C" struct PagedAttention {
  const void* query;        // [T, Hq, D], tokens query_stride apart
  void* out;                // [T, Hq, D], dense
  const void* keys;         // [num_blocks, B, Hb, D], blocks block_stride apart
  const void* values;
  const int32_t* tables;    // [num_rows, R, M] of this layer group
  const int64_t* rows;      // [S], table row of each chunk
  const int64_t* starts;    // [S + 1], its tokens
  const int64_t* last;      // [R, T], last entry that each token sees; -1: none
  int64_t* fault;           // [2], the chunk and the number that were refused
  // Entries held as codes; coded is null where there can be none. Lanes are [num_rows, R].
  const int64_t* coded;          // how many entries of each lane are codes, from its first on
  const Slot* slots;             // [num_blocks, slots_per_block]
  const void* vectors;           // [num_blocks, 2 * B, D]
  const int32_t* slot_tables;    // [num_rows, R, slot_columns], blocks of slots
  const int32_t* vector_tables;  // [num_rows, R, vector_columns], blocks of vectors
  const float* turns;            // [num_turns, D], cosines and sines by distance
  int64_t slots_per_block, slot_columns, vector_columns, num_turns;
  int64_t query_stride, block_stride;
  int64_t num_tokens, num_chunks, num_blocks, num_rows, columns;
  int64_t block_size, num_heads, num_kv_heads, tables_per_row, head_dim;
  int64_t num_threads;
  float scale;
  int32_t is_bf16;
};

enum Refusal { kNone, kRow, kChunk, kEntry, kBlock, kVector, kDistance };

namespace {

// Rows [first, first + count) of chunk's (query, head) pairs, over one part of their context.
struct Item {
  int chunk, kv_head, first, count, part, parts;
  int64_t begin, end;  // entries
  int64_t partial;     // where the first of its parts is kept, if there are several
};

struct Scratch {
  alignas(64) float query[kTileRows * kMaxHeadDim];
  alignas(64) float sums[kTileRows * kMaxHeadDim];
  alignas(64) float keys[kTileEntries * kMaxHeadDim];
  alignas(64) float weights[kTileRows * kTileEntries];
  float largest[kTileRows], total[kTileRows];
  int64_t last[kTileRows];
  const float* key_rows[kMaxHeadDim];
  uint32_t heads[kTileEntries];  // that attend to each coded entry of the tile
};

template <typename T, int W>
class Kernel {
 public:
  explicit Kernel(const PagedAttention& call)
      : call_(call),
        dim_(call.head_dim),
        group_(call.num_heads / call.num_kv_heads),
        heads_per_table_(call.num_kv_heads / call.tables_per_row),
        row_stride_(heads_per_table_ * call.head_dim) {}

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
          int64_t furthest = -1;
          const int64_t stop = begin + (first + count - 1) / group_;
          for (int64_t t = begin + first / group_; t <= stop; ++t) {
            if (last[t] < -1 || last[t] >= c.columns * c.block_size)
              return refuse(kEntry, s, last[t]);
            furthest = std::max(furthest, last[t]);
          }
          const int parts = std::max<int64_t>(1, (furthest + kPartEntries) / kPartEntries);
          for (int part = 0; part < parts; ++part) {
            const int64_t from = (int64_t)part * kPartEntries;
            const int64_t to = std::min<int64_t>(furthest + 1, from + kPartEntries);
            items_.push_back({(int)s, h, (int)first, count, part, parts, from, to, partials});
          }
          if (parts > 1) partials += parts * count;
        }
      }
    }
    partials_.resize(partials * (dim_ + 2));
    return kNone;
  }

  void attend(int64_t index, std::atomic<int>& refusal) {
    if (refusal != kNone) return;
    const Item& item = items_[index];
    Scratch own;
    begin(item, own);
    const bool decodes = item.count <= kFewRows;
    const T* rows[2 * kTileEntries + kAhead];  // in the order in which they are read
    std::fill(std::begin(rows), std::end(rows), static_cast<const T*>(call_.keys));
    alignas(64) T decoded[2][kTileEntries * kMaxHeadDim];
    for (int64_t at = item.begin; at < item.end; at += kTileEntries) {
      const int count = std::min<int64_t>(kTileEntries, item.end - at);
      const int width = (count + W - 1) / W * W;
      const T **keys = rows, **values = rows + width;
      const int coded = std::max<int64_t>(0, std::min<int64_t>(count, num_coded(item) - at));
      if (!decode(item, at, coded, keys, values, decoded, own.heads, refusal)) return;
      if (!find(item, at + coded, count - coded, keys + coded, values + coded, refusal)) return;
      if (decodes) find_behind(index, at + count, values + count);
      score(item, own, keys, count, width);
      hide(item, own, coded);
      for (int i = 0; i < item.count; ++i) soften(own, i, own.last[i] + 1 - at, width);
      const auto add = decodes ? multiply_all<W, true, true, T> : multiply_all<W, true, false, T>;
      add(own.sums, dim_, item.count, dim_, own.weights, kTileEntries, values, count);
    }
    if (item.parts == 1) {
      for (int i = 0; i < item.count; ++i)
        write(item, i, own.sums + i * dim_, own.total[i] > 0.0f ? 1.0f / own.total[i] : 0.0f);
      return;
    }
    for (int i = 0; i < item.count; ++i) {
      float* kept = partial(item, item.part, i);
      kept[0] = own.largest[i];
      kept[1] = own.total[i];
      std::memcpy(kept + 2, own.sums + i * dim_, dim_ * sizeof(float));
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
      own.largest[i] = -INFINITY;
      own.total[i] = 0.0f;
      const T* from = static_cast<const T*>(call_.query) + token(item, i) * call_.query_stride +
                      head(item, i) * dim_;
      for (int d = 0; d < dim_; d += W)
        X::store(own.query + i * dim_ + d, X::load(from + d) * call_.scale);
    }
    std::memset(own.sums, 0, item.count * dim_ * sizeof(float));
  }

  int64_t lane(const Item& item) const {
    return call_.rows[item.chunk] * call_.tables_per_row + item.kv_head / heads_per_table_;
  }
  int64_t num_coded(const Item& item) const { return call_.coded ? call_.coded[lane(item)] : 0; }

  // Addresses of coded entries [at, at + count): vectors of the codebook, or what becomes of them
  // in decoded; and who attends to them. False if something that codes refer to is not there.
  bool decode(const Item& item, int64_t at, int count, const T** keys, const T** values,
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
      keys[i] = vector(item, slot.key, refusal);
      values[i] = vector(item, slot.value, refusal);
      if (!keys[i] || !values[i]) return false;
      const float key_scale = half_to_float(slot.key_scale);
      const float value_scale = half_to_float(slot.value_scale);
      if (slot.distance || key_scale != 1.0f) {
        T* to = decoded[0] + i * dim_;
        turn_by(slot.distance, key_scale, keys[i], to);
        keys[i] = to;
      }
      if (value_scale != 1.0f) {
        T* to = decoded[1] + i * dim_;
        for (int d = 0; d < dim_; d += W) X::store(to + d, X::load(values[i] + d) * value_scale);
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
    const int64_t head = item.kv_head % heads_per_table_ * dim_;
    int64_t offset = at % c.block_size, column = at / c.block_size;
    for (int i = 0; i < count; ++column, offset = 0) {
      const int64_t block = blocks[column];
      if (block < 1 || block >= c.num_blocks) return blocks + column;
      const int64_t place = block * c.block_stride + head;
      for (; i < count && offset < c.block_size; ++i, ++offset)
        visit(i, static_cast<const T*>(c.keys) + place + offset * row_stride_,
              static_cast<const T*>(c.values) + place + offset * row_stride_);
    }
    return nullptr;
  }

  // Addresses of entries [at, at + count); false if a column in use names no block.
  bool find(const Item& item, int64_t at, int count, const T** keys, const T** values,
            std::atomic<int>& refusal) const {
    const int32_t* wrong = each_entry(item, at, count, [=](int i, const T* key, const T* value) {
      keys[i] = key;
      values[i] = value;
    });
    return !wrong || refuse_one(kBlock, item, *wrong, refusal);
  }

  // The raw keys that are read next, from entry `at` of an item or the next item's first on; what is
  // held as codes is not asked for.
  void find_behind(int64_t index, int64_t at, const T** keys) const {
    if (at >= items_[index].end) {
      if (++index == (int64_t)items_.size()) return;
      at = items_[index].begin;
    }
    const Item& item = items_[index];
    const int count = std::min<int64_t>(kAhead, item.end - at);
    each_entry(item, at, count, [=](int i, const T* key, const T*) { keys[i] = key; });
  }

  // Logits of all pairs with `count` keys; what fills up the last vector means nothing.
  void score(const Item& item, Scratch& own, const T** keys, int count, int width) const {
    if (item.count <= kFewRows) {
      for (int i = count; i < width; ++i) keys[i] = keys[0];
      few<kFewRows>(item, own, keys, width);
      return;
    }
    turn(keys, count, width, own.keys);
    for (int d = 0; d < dim_; ++d) own.key_rows[d] = own.keys + d * kTileEntries;
    multiply_all<W, false, false>(own.weights, kTileEntries, item.count, width, own.query, dim_,
                                  own.key_rows, dim_);
  }

  template <int Q>
  void few(const Item& item, Scratch& own, const T* const* keys, int width) const {
    if constexpr (Q > 1)
      if (item.count < Q) return few<Q - 1>(item, own, keys, width);
    dots_of<W, Q>(own.weights, kTileEntries, own.query, dim_, keys, width);
  }

  // Keys [count, D] -> [D, width]; what fills up the last vector is zero.
  void turn(const T* const* keys, int count, int width, float* out) const {
    for (int at = 0; at < width; at += W)
      for (int d = 0; d < dim_; d += W) {
        F tile[W];
        for (int i = 0; i < W; ++i) tile[i] = at + i < count ? X::load(keys[at + i] + d) : F{};
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

  // Logits of pair i become weights relative to its largest logit so far; visible: how many count.
  void soften(Scratch& own, int i, int64_t visible, int width) const {
    float* row = own.weights + i * kTileEntries;
    if (visible <= 0) {
      std::memset(row, 0, width * sizeof(float));
      return;
    }
    const auto lane = X::count();
    const int seen = std::min<int64_t>(visible, width);
    F highest = F{} - INFINITY;
    for (int v = 0; v < width; v += W) {
      const F x = lane < seen - v ? X::load(row + v) : F{} - INFINITY;
      highest = x > highest ? x : highest;
    }
    const float largest = std::max(own.largest[i], X::largest(highest));
    F sum = {};
    for (int v = 0; v < width; v += W) {
      const F logit = X::load(row + v), weight = X::exp(logit - largest);
      const F x = (lane < seen - v) & (logit > kHidden) ? weight : F{};
      X::store(row + v, x);
      sum += x;
    }
    if (largest != own.largest[i]) {
      const float shrink = std::exp(own.largest[i] - largest);
      own.total[i] *= shrink;
      for (int d = 0; d < dim_; d += W)
        X::store(own.sums + i * dim_ + d, X::load(own.sums + i * dim_ + d) * shrink);
      own.largest[i] = largest;
    }
    own.total[i] += X::total(sum);
  }

  float* partial(const Item& item, int part, int i) {
    return partials_.data() + (item.partial + (int64_t)part * item.count + i) * (dim_ + 2);
  }

  void merge(const Item& item) {
    float sums[kMaxHeadDim];
    for (int i = 0; i < item.count; ++i) {
      float largest = -INFINITY, total = 0.0f;
      for (int p = 0; p < item.parts; ++p) largest = std::max(largest, partial(item, p, i)[0]);
      std::memset(sums, 0, dim_ * sizeof(float));
      for (int p = 0; p < item.parts; ++p) {
        const float* kept = partial(item, p, i);
        if (kept[1] == 0.0f) continue;  // this part is behind what the query sees
        const float weight = std::exp(kept[0] - largest);
        total += weight * kept[1];
        for (int d = 0; d < dim_; ++d) sums[d] += weight * kept[2 + d];
      }
      write(item, i, sums, total > 0.0f ? 1.0f / total : 0.0f);
    }
  }

  void write(const Item& item, int i, const float* sums, float factor) const {
    const int64_t place = token(item, i) * call_.num_heads + head(item, i);
    T* to = static_cast<T*>(call_.out) + place * dim_;
    for (int d = 0; d < dim_; d += W) X::store(to + d, X::load(sums + d) * factor);
  }

  const PagedAttention& call_;
  const int dim_, group_, heads_per_table_;
  const int64_t row_stride_;
  std::vector<Item> items_;
  std::vector<float> partials_;
};

template <typename T>
int run(const PagedAttention& call) {
  if (call.head_dim % kMaxLanes == 0) return Kernel<T, kMaxLanes>(call).run();
  return Kernel<T, 8>(call).run();
}

}  // namespace

extern "C" int kvserve_paged_attention(const PagedAttention* call) {
  return call->is_bf16 ? run<bf16>(*call) : run<float>(*call);
}
