// One entry for what an event drops: means by attention, and the weight that makes a group's queries
// give it as much as they gave to all that it stands for. Queries are logged in 4 bits.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "lanes.h"

// What the launcher passes; it mirrors these fields. Strides are in elements; E lanes' leading
// dimensions are two, [outer, inner].
extern "C" struct FittedRemainder {
  const uint8_t* codes;    // [outer, inner, Hq, W, D / 2]
  const float* scales;     // [outer, inner, Hq, W], dense, times the model's scale
  const float* log_sums;   // [outer, inner, Hq, W], dense: what each query's softmax divides by
  const float* given;      // [outer, inner, Hkv, n], dense: what a group gave each key
  const uint8_t* dropped;  // [outer, inner, Hkv, n], dense
  const void *keys, *values;                 // [outer, inner, Hkv, n, D]
  float *out_keys, *out_values, *bias;       // [outer, inner, Hkv, D], the bias [outer, inner, Hkv]
  int64_t codes_strides[4], key_strides[4], value_strides[4];
  int64_t outer, inner, num_heads, num_kv_heads, window, length, dim, is_bf16, num_threads;
};

namespace {

constexpr int W = kMaxLanes;
constexpr int kLargestDim = 256;
typedef Lanes<W> X;
typedef X::F F;

const char* at(const void* from, const FittedRemainder& c, const int64_t* strides, int64_t lane,
               int64_t head, size_t width) {
  const int64_t event = lane / c.num_kv_heads;
  const int64_t place = event / c.inner * strides[0] + event % c.inner * strides[1];
  return static_cast<const char*>(from) + (place + head * strides[2]) * width;
}

// The sum of weight * vector over the entries of a lane that are dropped.
template <typename T>
void add_up(const FittedRemainder& c, const void* from, const int64_t* strides, int64_t lane,
            float* sum) {
  const T* vectors =
      reinterpret_cast<const T*>(at(from, c, strides, lane, lane % c.num_kv_heads, sizeof(T)));
  const float* given = c.given + lane * c.length;
  const uint8_t* dropped = c.dropped + lane * c.length;
  std::fill(sum, sum + c.dim, 0.0f);
  for (int64_t i = 0; i < c.length; ++i) {
    if (!dropped[i]) continue;
    const T* vector = vectors + i * strides[3];
    for (int64_t d = 0; d < c.dim; d += 8) {
      typedef Lanes<8> V;
      V::store(sum + d, V::load(sum + d) + given[i] * V::load(vector + d));
    }
  }
}

// The logarithm of what a group's queries give to one key: of the sum of exp(q . key - log_sum) over
// its queries. Where all of them point elsewhere the sum itself may be less than any float.
float log_given_to_one(const FittedRemainder& c, int64_t lane, const float* key,
                   std::vector<float>& logits) {
  const int64_t group = c.num_heads / c.num_kv_heads, half = c.dim / 2;
  const int64_t count = group * c.window, first = lane % c.num_kv_heads * group;
  alignas(64) float even[kLargestDim / 2 + W] = {}, odd[kLargestDim / 2 + W] = {};
  float base = 0.0f;  // codes count from 8
  for (int64_t d = 0; d < half; ++d) {
    even[d] = key[2 * d], odd[d] = key[2 * d + 1];
    base += 8 * (even[d] + odd[d]);
  }
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t* code = reinterpret_cast<const uint8_t*>(
        at(c.codes, c, c.codes_strides, lane, first + i / c.window, 1));
    code += i % c.window * c.codes_strides[3];
    F sum = {};
    for (int64_t d = 0; d < half; d += W) {
      F low, high;
      X::load(reinterpret_cast<const packed<4>*>(code + d), std::min<int64_t>(W, half - d), low, high);
      sum += low * X::load(even + d);
      sum += high * X::load(odd + d);
    }
    const int64_t query = lane * count + i;
    logits[i] = (X::total(sum) - base) * c.scales[query] - c.log_sums[query];
  }
  const float high = *std::max_element(logits.begin(), logits.begin() + count);
  F total = {};
  for (int64_t i = 0; i < count; i += W) {
    const F powers = X::exp(X::load(logits.data() + i) - high);
    total += i + W <= count || X::count() < (int)(count - i) ? powers : F{};
  }
  return high + std::log(X::total(total));
}

template <typename T>
void fit(const FittedRemainder& c) {
  const int64_t lanes = c.outer * c.inner * c.num_kv_heads;
  const int threads = std::max<int64_t>(1, std::min(c.num_threads, lanes));
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t lane = 0; lane < lanes; ++lane) {
    std::vector<float> logits(c.num_heads / c.num_kv_heads * c.window + W);
    float *key = c.out_keys + lane * c.dim, *value = c.out_values + lane * c.dim;
    add_up<T>(c, c.keys, c.key_strides, lane, key);
    add_up<T>(c, c.values, c.value_strides, lane, value);
    float mass = 0.0f;
    for (int64_t i = lane * c.length; i < (lane + 1) * c.length; ++i)
      if (c.dropped[i]) mass += c.given[i];
    c.bias[lane] = -INFINITY;
    if (!(mass > 0.0f)) continue;
    for (int64_t d = 0; d < c.dim; ++d) key[d] /= mass, value[d] /= mass;
    c.bias[lane] = std::log(mass) - log_given_to_one(c, lane, key, logits);
  }
}

}  // namespace

extern "C" void kvserve_fitted_remainder(const FittedRemainder* call) {
  call->is_bf16 ? fit<bf16>(*call) : fit<float>(*call);
}
