// How much attention a window of queries, logged in 4 bits, pays to its keys, for CPUs.
//
// A lane is one KV head of one layer and event. Its keys are turned once, into panels of kWidth keys
// that are read front to back. Then kRows queries at a time give a strip of logits, which become
// probabilities and are added to the scores: no [W, n] matrix is held. The 15 levels of a query meet
// keys as they are: numbers of float32; pairs of bfloat16, or levels of a byte by fours, on a CPU that
// multiplies such. Steps and scales are applied to the sums, which are float32 or exact.

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
  const void* keys;      // [outer, inner, Hkv, n + later, D]: float32, bfloat16, or levels, int8
  const float* steps;    // [outer, inner, Hkv, n + later], dense, of levels
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
constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;
enum Aggregate { kSum, kSquares, kMax };
enum class Pool { kMean, kMax, kRms };  // over a group's heads

typedef Lanes<W> X;
typedef X::F F;
typedef X::I I;

// How many numbers of T a product takes at once; levels that are not met as such are widened.
template <typename T>
constexpr int kEach = 1;
#if defined(__AVX512BF16__)
template <>
constexpr int kEach<bf16> = 2;
#endif
#if defined(__AVX512VNNI__)
template <>
constexpr int kEach<int8> = 4;
#endif

// Sums of products of one query with W keys; what is met by twos or fours has 32 bits of each.
template <int Each>
struct Product {
  typedef std::conditional_t<Each == 1, float, uint32_t> Query;
  typedef std::conditional_t<Each == 4, I, F> Sum;

  static inline Sum add(Sum sum, Query query, F key) {
#if defined(__AVX512BF16__)
    if constexpr (Each == 2)
      return (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(query), (__m512bh)key);
#endif
#if defined(__AVX512VNNI__)
    if constexpr (Each == 4)
      return (I)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(query), (__m512i)key);
#endif
    if constexpr (Each == 1) return sum + query * key;
    return sum;
  }
};

inline F larger(F a, F b) { return a > b ? a : b; }

// 2 to the power of x, to about 3e-6 relative; beyond float32's range it may stay what it is there.
inline F power_of_two(F x) {
#if defined(__AVX512DQ__)
  const F r = (F)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);  // from 0 to 1
  F p = r * 0.013534168f + 0.05201146f;
  p = p * r + 0.24144275f;
  p = p * r + 0.69300383f;
  p = p * r + 1.0000026f;
  return (F)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
  return X::exp(x * kLn2);
#endif
}

template <typename T>
class Kernel {
  static constexpr int kEach = ::kEach<T>;
  static constexpr bool kWidens = kEach == 1;
  typedef Product<kEach> P;
  typedef typename P::Query Query;
  typedef typename P::Sum Sum;

 public:
  explicit Kernel(const WindowScores& call)
      : call_(call),
        group_(call.num_heads / call.num_kv_heads),
        held_(call.length + call.later),
        depth_(call.dim / kEach),
        stride_((held_ + kWidth - 1) / kWidth * kWidth) {}

  void run() {
    const int64_t lanes = call_.outer * call_.inner * call_.num_kv_heads;
    const int threads = std::max<int64_t>(1, std::min(call_.num_threads, lanes));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      std::vector<float> scratch((depth_ + kRows + 5) * stride_ + W);
      // Vectors are loaded whole from addresses that 64 divides.
      const auto skip = (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) / sizeof(float);
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < lanes; ++i) score(i, scratch.data() + skip % W);
    }
  }

 private:
  // A lane's keys as they are multiplied, and what was turned beside them.
  struct Keys {
    float* panels;  // [stride / kWidth, depth, kWidth]
    float* steps;   // of levels
    int32_t* starts;  // of levels: what sums of codes, which count from 8, begin with
  };

  void score(int64_t lane, float* scratch) const {
    const Keys keys = {scratch, scratch + depth_ * stride_,
                       reinterpret_cast<int32_t*>(scratch + (depth_ + 1) * stride_)};
    float* logits = scratch + (depth_ + 2) * stride_;
    float *share = logits + kRows * stride_, *pooled = share + stride_, *given = pooled + stride_;
    const Pool pool = static_cast<Pool>(call_.pool);
    turn(lane, keys);
    std::fill(pooled, pooled + 2 * stride_, 0.0f);
    for (int member = 0; member < group_; ++member) {
      std::fill(share, share + stride_, 0.0f);
      for (int64_t row = 0; row < call_.window; row += kRows) {
        const int count = std::min<int64_t>(kRows, call_.window - row);
        alignas(64) Query queries[kRows * kLargestDim];
        float highest[kRows], factors[kRows] = {};
        read(lane, member, row, count, queries);
        multiply(queries, keys, logits, highest);
        for (int r = 0; r < count; ++r) {
          const int64_t query = (lane * group_ + member) * call_.window + row + r;
          const float scale = call_.scales[query] * kLog2E, high = highest[r] * scale;
          const float total = soften(logits + r * stride_, scale, high, query, row + r);
          factors[r] = 1.0f / total;
          if (call_.log_sums) call_.log_sums[query] = high * kLn2 + std::log(total);
        }
        add(logits, factors, share);
        if (call_.given) add_up<kSum>(logits, factors, given);
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

  // Keys [n + later, D] -> panels; the last key fills up the last one.
  void turn(int64_t lane, const Keys& to) const {
    const int64_t* strides = call_.key_strides;
    const int64_t event = lane / call_.num_kv_heads, head = lane % call_.num_kv_heads;
    const T* from = static_cast<const T*>(call_.keys) + event / call_.inner * strides[0] +
                    event % call_.inner * strides[1] + head * strides[2];
    alignas(64) float row[kLargestDim];
    for (int64_t j = 0; j < stride_; ++j) {
      const int64_t at = std::min(j, held_ - 1);
      const T* key = from + at * strides[3];
      float* column = to.panels + j / kWidth * depth_ * kWidth + j % kWidth;
      const float step = call_.steps ? call_.steps[lane * held_ + at] : 1.0f;
      if constexpr (kEach == 2) {
        std::memcpy(row, key, call_.dim * sizeof(T));
      } else if constexpr (kEach == 4) {
        int8_t* levels = reinterpret_cast<int8_t*>(row);
        int32_t sum = 0;
        for (int d = 0; d < call_.dim; ++d) {
          levels[d % 2 * (call_.dim / 2) + d / 2] = key[d].level;
          sum += key[d].level;
        }
        to.steps[j] = step, to.starts[j] = -8 * sum;
      } else {
        for (int d = 0; d < call_.dim; d += 8)
          Lanes<8>::store(row + d, Lanes<8>::load(key + d) * step);
      }
      for (int d = 0; d < depth_; ++d) column[place(d) * kWidth] = row[d];
    }
  }

  // Numbers of even dimensions come before those of odd ones, as they are in a query's bytes.
  int place(int dim) const {
    return kWidens ? dim % 2 * (call_.dim / 2) + dim / 2 : dim;
  }

  // The levels of queries [row, row + count) of a head; others are zero.
  void read(int64_t lane, int member, int64_t row, int count, Query* to) const {
    const int64_t* strides = call_.codes_strides;
    const int64_t event = lane / call_.num_kv_heads, half = call_.dim / 2;
    const int64_t head = lane % call_.num_kv_heads * group_ + member;
    const uint8_t* from = call_.codes + event / call_.inner * strides[0] +
                          event % call_.inner * strides[1] + head * strides[2];
    uint8_t none[kLargestDim / 2];
    if (count < kRows) std::fill_n(none, half, 0x88);
    for (int r = 0; r < kRows; ++r, to += depth_) {
      const uint8_t* codes = r < count ? from + (row + r) * strides[3] : none;
      if constexpr (kEach == 2) {
        for (int d = 0; d < half; ++d)
          to[d] = upper_half((codes[d] >> 4) - 8) << 16 | upper_half((codes[d] & 15) - 8);
      } else if constexpr (kEach == 4) {
        uint8_t* bytes = reinterpret_cast<uint8_t*>(to);
        for (int64_t d = 0; d < half; d += 4) {  // a vector is a multiple of 8
          uint32_t some;
          std::memcpy(&some, codes + d, sizeof some);
          const uint32_t low = some & 0x0f0f0f0f, high = some >> 4 & 0x0f0f0f0f;
          std::memcpy(bytes + d, &low, sizeof low), std::memcpy(bytes + half + d, &high, sizeof high);
        }
      } else {
        for (int64_t d = 0; d < half; d += W) {
          const int some = std::min<int64_t>(W, half - d);
          F low, high;
          X::load(reinterpret_cast<const packed<4>*>(codes + d), some, low, high);
          X::store(to + d, low - 8.0f, some);
          X::store(to + half + d, high - 8.0f, some);
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

  // logits[kRows][stride] = queries[kRows][depth] . keys, and the highest of each row
  void multiply(const Query* queries, const Keys& keys, float* logits, float* highest) const {
    const float* panel = keys.panels;
    F high[kRows];
    for (int r = 0; r < kRows; ++r) high[r] = F{} - INFINITY;
    for (int64_t at = 0; at < stride_; at += kWidth) {
      Sum sum[kRows][kVectors] = {};
      if constexpr (kEach == 4)
        for (int v = 0; v < kVectors; ++v) {
          std::memcpy(&sum[0][v], keys.starts + at + v * W, sizeof(Sum));
          for (int r = 1; r < kRows; ++r) sum[r][v] = sum[0][v];
        }
      for (int d = 0; d < depth_; ++d, panel += kWidth) {
        F key[kVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) key[v] = X::load(panel + v * W);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v)
            sum[r][v] = P::add(sum[r][v], queries[r * depth_ + d], key[v]);
      }
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const F step = kEach == 4 ? X::load(keys.steps + at + v * W) : F{};
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          F x;
          if constexpr (kEach == 4)
            x = __builtin_convertvector(sum[r][v], F) * step;
          else
            x = sum[r][v];
          high[r] = larger(x, high[r]);
          X::store(logits + r * stride_ + at + v * W, x);
        }
      }
    }
    for (int r = 0; r < kRows; ++r) highest[r] = X::largest(high[r]);
  }

  // A row of logits, times scale, becomes powers of two, relative to 2^high; returns what they add up
  // to, where they count.
  float soften(float* row, float scale, float high, int64_t query, int64_t index) const {
    const bool absolute = call_.shares != nullptr;
    const int64_t own = absolute ? call_.first + call_.step * index : -1;
    const int64_t first = absolute ? own - (uint32_t)own % (uint32_t)call_.span : 0;
    const auto power = [=](int64_t j) {
      const F x = power_of_two(X::load(row + j) * scale - high);
      X::store(row + j, x);
      return x;
    };
    // What came before those that its share is of, these up to its own place, and what is new to it.
    const int64_t ends[3] = {first, own + 1, held_};
    const auto lane = X::count();
    F part[3] = {};
    for (int64_t k = 0, j = 0; k < 3; ++k) {
      F sum = {};
      for (; j + W <= ends[k]; j += W) sum += power(j);
      part[k] += sum;
      if (j >= ends[k]) continue;
      const F x = power(j);  // of several parts
      for (int64_t begin = 0, i = k; i < 3; begin = ends[i++] - j)
        part[i] += (lane >= (int)begin) & (lane < (int)(ends[i] - j)) ? x : F{};
      j += W;
    }
    const float old = X::total(part[0]), recent = X::total(part[1]), later = X::total(part[2]);
    if (!absolute) return later;
    // A query with hardly any share does not vote; exp(80) is far from infinite.
    const float elsewhere = std::exp(std::min(-call_.shares[query], 80.0f));
    return std::max(old + recent + later, later + recent * elsewhere);
  }

  // Adds the n probabilities that powers are, times their rows' factors, to the scores.
  void add(const float* powers, const float* factors, float* share) const {
    switch (call_.aggregate) {
      case kSquares: return add_up<kSquares>(powers, factors, share);
      case kMax: return add_up<kMax>(powers, factors, share);
      default: return add_up<kSum>(powers, factors, share);
    }
  }

  template <int How>
  void add_up(const float* powers, const float* factors, float* share) const {
    for (int64_t j = 0; j < call_.length; j += W) {
      F all = X::load(share + j);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const F x = X::load(powers + r * stride_ + j) * factors[r];
        if (How == kMax)
          all = larger(x, all);
        else
          all += How == kSquares ? x * x : x;
      }
      X::store(share + j, all);
    }
  }

  const WindowScores& call_;
  const int group_;
  const int64_t held_, depth_, stride_;
};

}  // namespace

extern "C" void kvserve_window_scores(const WindowScores* call) {
  if (call->steps)
    Kernel<int8>(*call).run();
  else if (call->is_bf16)
    Kernel<bf16>(*call).run();
  else
    Kernel<float>(*call).run();
}
