// Keys scored by where the queries of their heads usually point, for CPUs.
//
// A lane is one KV head of one layer and event. Its keys are read once: each gives the products with
// all vectors of the group's heads, and those of its magnitudes. Then each head's scores are
// normalised, and the best head's are kept. Arithmetic is float32; sums over keys are double.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "lanes.h"

// What the launcher passes; it mirrors these fields.
extern "C" struct CentreScores {
  const void* keys;      // [E, L, Hkv, n, D], strides in elements
  const float* vectors;  // [E, L, Hq, V, D], dense
  const float* spread;   // [L, Hq, D / 2], dense
  float* out;            // [E, L, Hkv, n], dense
  int64_t key_strides[4];
  int64_t events, layers, heads, kv_heads, futures, length, dim;
  int64_t normalise, is_bf16, num_threads;
};

namespace {

constexpr int W = 8;  // the launcher takes dimensions that 16 divides
constexpr int kLargestHalf = 128;
constexpr float kSmallest = 1e-6f;
typedef Lanes<W> X;
typedef X::F F;

inline F root(F x) {
#if defined(__AVX__)
  return (F)_mm256_sqrt_ps((__m256)x);
#else
  for (int i = 0; i < W; ++i) x[i] = std::sqrt(x[i]);
  return x;
#endif
}

template <typename T>
class Kernel {
 public:
  explicit Kernel(const CentreScores& call)
      : c_(call), group_(call.heads / call.kv_heads), half_(call.dim / 2) {}

  void run() const {
    const int64_t lanes = c_.events * c_.layers * c_.kv_heads;
    const int threads = std::max<int64_t>(1, std::min(c_.num_threads, lanes));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      std::vector<float> scores(group_ * c_.length);
#pragma omp for schedule(dynamic)
      for (int64_t lane = 0; lane < lanes; ++lane) score(lane, scores.data());
    }
  }

 private:
  void score(int64_t lane, float* scores) const {
    const int64_t head = lane % c_.kv_heads, event = lane / c_.kv_heads / c_.layers;
    const int64_t layer = lane / c_.kv_heads % c_.layers;
    const T* keys = static_cast<const T*>(c_.keys) + event * c_.key_strides[0] +
                    layer * c_.key_strides[1] + head * c_.key_strides[2];
    const float* vectors = c_.vectors + lane * group_ * c_.futures * c_.dim;
    const float* spread = c_.spread + (layer * c_.heads + head * group_) * half_;
    for (int64_t i = 0; i < c_.length; ++i)
      of_key(keys + i * c_.key_strides[3], vectors, spread, scores + i);
    float* out = c_.out + lane * c_.length;
    for (int64_t member = 0; member < group_; ++member) {
      const float* own = scores + member * c_.length;
      double mean = 0.0, factor = 1.0;
      if (c_.normalise) {
        double squares = 0.0;
        for (int64_t i = 0; i < c_.length; ++i) mean += own[i];
        mean /= c_.length;
        for (int64_t i = 0; i < c_.length; ++i) squares += (own[i] - mean) * (own[i] - mean);
        factor = 1.0 / std::max<double>(std::sqrt(squares / c_.length), kSmallest);
      }
      for (int64_t i = 0; i < c_.length; ++i) {
        const float x = (own[i] - mean) * factor;
        out[i] = member && out[i] > x ? out[i] : x;
      }
    }
  }

  // One key's scores for all heads of the group, `length` apart.
  void of_key(const T* key, const float* vectors, const float* spread, float* scores) const {
    alignas(32) float low[kLargestHalf], high[kLargestHalf], magnitude[kLargestHalf];
    for (int64_t d = 0; d < half_; d += W) {
      const F a = X::load(key + d), b = X::load(key + half_ + d);
      X::store(low + d, a);
      X::store(high + d, b);
      X::store(magnitude + d, root(a * a + b * b));
    }
    for (int64_t member = 0; member < group_; ++member) {
      float best = -INFINITY;
      for (int64_t v = 0; v < c_.futures; ++v, vectors += c_.dim) {
        F sum = {};
        for (int64_t d = 0; d < half_; d += W)
          sum += X::load(low + d) * X::load(vectors + d) +
                 X::load(high + d) * X::load(vectors + half_ + d);
        best = std::max(best, X::total(sum));
      }
      F rest = {};
      for (int64_t d = 0; d < half_; d += W)
        rest += X::load(magnitude + d) * X::load(spread + member * half_ + d);
      scores[member * c_.length] = best + X::total(rest);
    }
  }

  const CentreScores& c_;
  const int64_t group_, half_;
};

}  // namespace

extern "C" void kvserve_centre_scores(const CentreScores* call) {
  call->is_bf16 ? Kernel<bf16>(*call).run() : Kernel<float>(*call).run();
}
