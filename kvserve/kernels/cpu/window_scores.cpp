// How much attention a window of queries, logged in 4 bits, pays to its keys, for CPUs.
//
// A lane is one KV head of one layer and event. Its keys are turned once, into panels of kWidth keys
// that are read front to back. Then kRows queries at a time give a strip of logits, which become
// probabilities and are added to the scores: no [W, n] matrix is held. Arithmetic is float32. Keys of
// bfloat16 are met in pairs by a CPU that multiplies such: the 15 levels of a query are numbers of
// bfloat16, and their scale is applied to its logits, so that products are as exact.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <vector>

#include "lanes.h"

// What the launcher passes; it mirrors these fields. Strides are in elements; E lanes' leading
// dimensions are two, [outer, inner].
extern "C" struct WindowScores {
  const uint8_t* codes;  // [outer, inner, Hq, W, D / 2]
  const float* scales;   // [outer, inner, Hq, W], dense, times the model's scale
  const float* shares;   // [outer, inner, Hq, W], dense; null: the softmax runs over the n keys alone
  const void* keys;      // [outer, inner, Hkv, n + later, D]
  float* out;            // [outer, inner, Hkv, n], dense
  float* log_sums;       // [outer, inner, Hq, W], dense: what each softmax divides by; null: not wanted
  float* given;          // as out, what all queries of a group gave a key; null: not wanted
  int64_t codes_strides[4], key_strides[4];
  int64_t outer, inner, num_heads, num_kv_heads, window, length, later, dim;
  int64_t first, step, span;  // query i's place is first + step * i
  int64_t aggregate, pool, is_bf16, num_threads;
};

namespace {

constexpr int W = kMaxLanes;
constexpr int kRows = kMaxLanes == 8 ? 6 : 4;  // as many sums as registers hold
constexpr int kVectors = kMaxLanes / 4;  // of a row of logits that are computed at a time
constexpr int kWidth = kVectors * W;
constexpr int kLargestDim = 256;
enum Aggregate { kSum, kSquares, kMax };
enum class Pool { kMean, kMax, kRms };  // over a group's heads

typedef Lanes<W> X;
typedef X::F F;

// Whether keys of T are met in pairs.
#if defined(__AVX512BF16__)
template <typename T>
constexpr bool kPairs = std::is_same_v<T, bf16>;

inline F add_product(F sum, uint32_t query, F key) {
  return (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(query), (__m512bh)key);
}
#else
template <typename T>
constexpr bool kPairs = false;
#endif
inline F add_product(F sum, float query, F key) { return sum + query * key; }

// logits[kRows][stride] = queries[kRows][depth] . panels[stride / kWidth][depth][kWidth], of numbers
// or of pairs of them
template <typename Q>
void multiply(float* logits, const Q* queries, const float* panels, int depth, int64_t stride) {
  for (int64_t at = 0; at < stride; at += kWidth) {
    F sum[kRows][kVectors] = {};
    for (int d = 0; d < depth; ++d, panels += kWidth) {
      F key[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) key[v] = X::load(panels + v * W);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v)
          sum[r][v] = add_product(sum[r][v], queries[r * depth + d], key[v]);
    }
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v) X::store(logits + r * stride + at + v * W, sum[r][v]);
  }
}

template <typename T>
class Kernel {
  typedef std::conditional_t<kPairs<T>, uint32_t, float> Query;  // a number, or a pair of them
  static constexpr int kEach = kPairs<T> ? 2 : 1;

 public:
  explicit Kernel(const WindowScores& call)
      : call_(call),
        group_(call.num_heads / call.num_kv_heads),
        held_(call.length + call.later),
        stride_((held_ + kWidth - 1) / kWidth * kWidth) {}

  void run() {
    const int64_t lanes = call_.outer * call_.inner * call_.num_kv_heads;
    const int threads = std::max<int64_t>(1, std::min(call_.num_threads, lanes));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      std::vector<float> scratch((call_.dim + kRows + 3) * stride_ + W);
      // Vectors are loaded whole from addresses that 64 divides.
      const auto skip = (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) / sizeof(float);
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < lanes; ++i) score(i, scratch.data() + skip % W);
    }
  }

 private:
  void score(int64_t lane, float* keys) const {
    float* logits = keys + call_.dim * stride_;
    float *share = logits + kRows * stride_, *pooled = share + stride_, *given = pooled + stride_;
    const Pool pool = static_cast<Pool>(call_.pool);
    turn(lane, keys);
    std::fill(pooled, pooled + 2 * stride_, 0.0f);
    for (int member = 0; member < group_; ++member) {
      std::fill(share, share + stride_, 0.0f);
      for (int64_t row = 0; row < call_.window; row += kRows) {
        const int count = std::min<int64_t>(kRows, call_.window - row);
        alignas(64) Query queries[kRows * kLargestDim];
        read(lane, member, row, count, queries);
        multiply(logits, queries, keys, call_.dim / kEach, stride_);
        if (kPairs<T>) scale(logits, call_.scales + (lane * group_ + member) * call_.window + row, count);
        for (int r = 0; r < count; ++r) {
          const int64_t query = (lane * group_ + member) * call_.window + row + r;
          const Sum sum = soften(logits + r * stride_, query, row + r);
          add(logits + r * stride_, 1.0f / sum.total, share, call_.given ? given : nullptr);
          if (call_.log_sums) call_.log_sums[query] = sum.high + std::log(sum.total);
        }
      }
      for (int64_t j = 0; j < stride_; ++j)
        pooled[j] = pool == Pool::kMax    ? std::max(pooled[j], share[j])
                    : pool == Pool::kMean ? pooled[j] + share[j]
                                          : pooled[j] + share[j] * share[j];
    }
    const float factor = pool == Pool::kMax ? 1.0f : 1.0f / group_;
    float* out = call_.out + lane * call_.length;
    for (int64_t j = 0; j < call_.length; ++j)
      out[j] = pool == Pool::kRms ? std::sqrt(pooled[j] * factor) : pooled[j] * factor;
    if (call_.given) std::copy_n(given, call_.length, call_.given + lane * call_.length);
  }

  // Keys [n + later, D] -> panels; what fills up the last one is zero.
  void turn(int64_t lane, float* to) const {
    const int64_t* strides = call_.key_strides;
    const int64_t event = lane / call_.num_kv_heads, head = lane % call_.num_kv_heads;
    const T* from = static_cast<const T*>(call_.keys) + event / call_.inner * strides[0] +
                    event % call_.inner * strides[1] + head * strides[2];
    const int depth = call_.dim / kEach;
    alignas(64) float row[kLargestDim];
    for (int64_t j = 0; j < stride_; ++j) {
      float* column = to + j / kWidth * depth * kWidth + j % kWidth;
      const T* key = from + j * strides[3];
      if (j >= held_)
        std::fill(row, row + depth, 0.0f);
      else if (kPairs<T>)
        std::memcpy(row, key, call_.dim * sizeof(T));
      else
        for (int d = 0; d < call_.dim; d += 8) Lanes<8>::store(row + d, Lanes<8>::load(key + d));
      for (int d = 0; d < depth; ++d) column[place(d) * kWidth] = row[d];
    }
  }

  // Numbers of even dimensions come before those of odd ones, as they are in a query's bytes.
  int place(int dim) const { return kPairs<T> ? dim : dim % 2 * (call_.dim / 2) + dim / 2; }

  // Queries [row, row + count) of a head; others are zero.
  void read(int64_t lane, int member, int64_t row, int count, Query* to) const {
    const int64_t* strides = call_.codes_strides;
    const int64_t event = lane / call_.num_kv_heads, half = call_.dim / 2;
    const int64_t head = lane % call_.num_kv_heads * group_ + member;
    const uint8_t* from = call_.codes + event / call_.inner * strides[0] +
                          event % call_.inner * strides[1] + head * strides[2];
    const float* scales = call_.scales + (lane * group_ + member) * call_.window;
    for (int r = 0; r < kRows; ++r) {
      const uint8_t* codes = from + (row + r) * strides[3];
      if constexpr (kPairs<T>) {
        for (int d = 0; d < half; ++d) {
          const int both = r < count ? codes[d] : 0x88;
          to[r * half + d] = upper_half((both >> 4) - 8) << 16 | upper_half((both & 15) - 8);
        }
      } else if (r >= count) {
        std::fill_n(to + r * call_.dim, call_.dim, 0.0f);
      } else {
        for (int64_t d = 0; d < half; d += W) {
          const int some = std::min<int64_t>(W, half - d);
          F low, high;
          X::load(reinterpret_cast<const packed<4>*>(codes + d), some, low, high);
          X::store(to + r * call_.dim + d, (low - 8.0f) * scales[row + r], some);
          X::store(to + r * call_.dim + half + d, (high - 8.0f) * scales[row + r], some);
        }
      }
    }
  }
  // A whole number of few bits as bfloat16.
  static uint32_t upper_half(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits >> 16;
  }

  // Logits of levels become those of the queries that they stand for.
  void scale(float* logits, const float* scales, int count) const {
    for (int r = 0; r < count; ++r)
      for (int64_t j = 0; j < stride_; j += W) {
        float* to = logits + r * stride_ + j;
        X::store(to, X::load(to) * scales[r]);
      }
  }

  struct Sum {
    float high, total;  // exp(high) * total
  };

  // A row of logits becomes powers of e, relative to their highest; returns what they add up to,
  // where they count.
  Sum soften(float* row, int64_t query, int64_t index) const {
    const bool absolute = call_.shares != nullptr;
    const int64_t own = absolute ? call_.first + call_.step * index : -1;
    const int64_t first = absolute ? own - (uint32_t)own % (uint32_t)call_.span : 0;
    const int64_t end = absolute ? held_ : call_.length;
    const auto lane = X::count();
    F highest = F{} - INFINITY;
    for (int64_t j = 0; j < end; j += W) {
      F x = X::load(row + j);
      if (j + W > end) x = lane < (int)(end - j) ? x : F{} - INFINITY;
      highest = x > highest ? x : highest;
    }
    const float high = X::largest(highest);
    F all = {}, later = {}, recent = {};  // keys behind the query's own place are new to it
    for (int64_t j = 0; j < end; j += W) {
      const F power = X::exp(X::load(row + j) - high);
      X::store(row + j, power);
      const bool old = j + W <= first, known = j >= first && j + W <= own + 1;
      if (j + W <= end && (j > own || old || known)) {  // most are on one side, as a whole
        all += power;
        if (j > own) later += power;
        if (known) recent += power;
        continue;
      }
      const F counts = lane < (int)(end - j) ? power : F{};
      all += counts;
      later += lane > (int)(own - j) ? counts : F{};
      recent += (lane <= (int)(own - j)) & (lane >= (int)(first - j)) ? counts : F{};
    }
    const float window = X::total(all);
    if (!absolute) return {high, window};
    // A query with hardly any share does not vote; exp(80) is far from infinite.
    const float elsewhere = std::exp(std::min(-call_.shares[query], 80.0f));
    return {high, std::max(window, X::total(later) + X::total(recent) * elsewhere)};
  }

  // Adds the n probabilities that these powers are, times factor, to the scores; to `given` as they
  // are.
  void add(const float* row, float factor, float* share, float* given) const {
    for (int64_t j = 0; j < call_.length; j += W) {
      const F x = X::load(row + j) * factor, old = X::load(share + j);
      if (call_.aggregate == kMax)
        X::store(share + j, x > old ? x : old);
      else
        X::store(share + j, old + (call_.aggregate == kSquares ? x * x : x));
      if (given) X::store(given + j, X::load(given + j) + x);
    }
  }

  const WindowScores& call_;
  const int group_;
  const int64_t held_, stride_;
};

}  // namespace

extern "C" void kvserve_window_scores(const WindowScores* call) {
  call->is_bf16 ? Kernel<bf16>(*call).run() : Kernel<float>(*call).run();
}
