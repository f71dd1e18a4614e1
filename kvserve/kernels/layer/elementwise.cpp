// A model's operations beside its matrix products and attention, each in one pass over its rows.
//
// Arithmetic is float32; bfloat16 is widened as it is loaded, and rounded wherever torch's operators
// would round. A row is computed by one thread, so threads change no bit.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "lanes.h"

// What the launcher passes; it mirrors these fields. Strides are in elements.
extern "C" struct Elementwise {
  const void* x;  // [groups, rows, width], groups x_stride apart, rows dense
  const void* a;  // norms: weight [width]; rotate: cos [groups, width]
  const void* b;  // rotate: sin [groups, width]; add, add_rms_norm: what is added, as x
  void* out;      // dense; argmax: int64 [groups]
  void* whole;    // add_rms_norm: the sum, dense
  int64_t groups, rows, width, x_stride;
  int64_t is_bf16, num_threads;
  double eps;  // scale: the factor
};

namespace {

typedef Lanes<kMaxLanes> X;
typedef X::F F;

// body(i, count) for each vector of a row: `count` elements from i on, all lanes but for the last.
template <int W = kMaxLanes, typename Body>
inline void each_vector(int64_t width, Body body) {
  int64_t i = 0;
  for (; i + W <= width; i += W) body(i, W);
  if (i < width) body(i, width - i);
}

// Weights of more bits than x are applied before anything is rounded.
template <typename T, typename V>
void rms_norm(const T* x, const V* weight, float eps, T* out, int64_t width) {
  typedef std::conditional_t<(sizeof(V) > sizeof(T)), V, T> Between;
  typedef Lanes<8> Half;  // of as many doubles as fill a vector
  Half::D squares = {};   // doubles, so that the mean is right to its last bit
  each_vector<8>(width, [&](int64_t i, int64_t count) {
    const Half::D v = __builtin_convertvector(Half::load(x + i, count), Half::D);
    squares += v * v;
  });
  double sum = 0;
  for (int lane = 0; lane < 8; ++lane) sum += squares[lane];
  const float scale = 1.0f / std::sqrt(static_cast<float>(sum / width) + eps);
  each_vector(width, [&](int64_t i, int64_t count) {
    const F scaled = X::rounded<Between>(X::load(x + i, count) * scale);
    X::store(out + i, X::load(weight + i, count) * scaled, count);
  });
}

// Adds into `whole`, which is normed while it is in the cache.
template <typename T>
void add_rms_norm(const T* x, const T* added, const T* weight, float eps, T* whole, T* out,
                  int64_t width) {
  each_vector(width, [&](int64_t i, int64_t count) {
    X::store(whole + i, X::load(x + i, count) + X::load(added + i, count), count);
  });
  rms_norm(whole, weight, eps, out, width);
}

template <typename T>
void rotate(const T* x, const T* cos, const T* sin, T* out, int64_t width) {
  const int64_t half = width / 2;
  each_vector(half, [&](int64_t i, int64_t count) {
    const int64_t j = i + half;
    const F left = X::load(x + i, count), right = X::load(x + j, count);
    const F cos_left = X::load(cos + i, count), cos_right = X::load(cos + j, count);
    const F sin_left = X::load(sin + i, count), sin_right = X::load(sin + j, count);
    X::store(out + i, X::rounded<T>(left * cos_left) - X::rounded<T>(right * sin_left), count);
    X::store(out + j, X::rounded<T>(right * cos_right) + X::rounded<T>(left * sin_right), count);
  });
}

template <typename T>
void silu_and_mul(const T* x, T* out, int64_t width) {
  each_vector(width, [&](int64_t i, int64_t count) {
    const F gate = X::load(x + i, count), up = X::load(x + i + width, count);
    X::store(out + i, X::rounded<T>(gate / (1.0f + X::exp(-gate))) * up, count);
  });
}

// GELU, approximated by tanh.
template <typename T>
void gelu_and_mul(const T* x, T* out, int64_t width) {
  each_vector(width, [&](int64_t i, int64_t count) {
    const F gate = X::load(x + i, count), up = X::load(x + i + width, count);
    const F twice = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);  // 2 sqrt(2 / pi)
    X::store(out + i, X::rounded<T>(gate / (1.0f + X::exp(-twice))) * up, count);
  });
}

// The first place of the largest of x, which is no NaN.
template <typename T>
int64_t argmax(const T* x, int64_t width) {
  const F lowest = F{} - INFINITY;
  F best = lowest;
  X::I at = {}, places = X::count();
  each_vector(width, [&](int64_t i, int64_t count) {
    const F loaded = X::load(x + i, count);
    const F v = X::count() < static_cast<int32_t>(count) ? loaded : lowest;
    at = v > best ? places : at;
    best = v > best ? v : best;
    places += kMaxLanes;
  });
  const float largest = X::largest(best);
  int32_t first = INT32_MAX;
  for (int lane = 0; lane < kMaxLanes; ++lane)
    if (best[lane] == largest && at[lane] < first) first = at[lane];
  return first;
}

// row(x, out, group) for each row of x, and where its result goes.
template <typename T, typename Row>
void each_row(const Elementwise& c, Row row) {
  const T* x = static_cast<const T*>(c.x);
  T* out = static_cast<T*>(c.out);
  const int64_t count = c.groups * c.rows;
#pragma omp parallel for schedule(static) num_threads(c.num_threads)
  for (int64_t i = 0; i < count; ++i)
    row(x + i / c.rows * c.x_stride + i % c.rows * c.width, out + i * c.width, i / c.rows);
}

template <typename T, typename V = T>
void norm_rows(const Elementwise& c) {
  const V* weight = static_cast<const V*>(c.a);
  const float eps = c.eps;
  each_row<T>(c, [=](const T* x, T* out, int64_t) { rms_norm(x, weight, eps, out, c.width); });
}

template <typename T>
void add_and_norm_rows(const Elementwise& c) {
  const T *weight = static_cast<const T*>(c.a), *added = static_cast<const T*>(c.b);
  T* whole = static_cast<T*>(c.whole);
  const float eps = c.eps;
  each_row<T>(c, [=](const T* x, T* out, int64_t group) {
    const int64_t at = group * c.width;
    add_rms_norm(x, added + at, weight, eps, whole + at, out, c.width);
  });
}

template <typename T>
void rotate_rows(const Elementwise& c) {
  const T *cos = static_cast<const T*>(c.a), *sin = static_cast<const T*>(c.b);
  each_row<T>(c, [=](const T* x, T* out, int64_t group) {
    rotate(x, cos + group * c.width, sin + group * c.width, out, c.width);
  });
}

template <typename T>
void activate_rows(const Elementwise& c, void (*activate)(const T*, T*, int64_t)) {
  each_row<T>(c, [=](const T* x, T* out, int64_t) { activate(x, out, c.width); });
}

template <typename T>
void scale_rows(const Elementwise& c) {
  const float factor = c.eps;
  each_row<T>(c, [=](const T* x, T* out, int64_t) {
    each_vector(c.width, [&](int64_t i, int64_t count) {
      X::store(out + i, X::load(x + i, count) * factor, count);
    });
  });
}

template <typename T>
void add_rows(const Elementwise& c) {
  const T* added = static_cast<const T*>(c.b);
  each_row<T>(c, [=](const T* x, T* out, int64_t group) {
    each_vector(c.width, [&](int64_t i, int64_t count) {
      const F more = X::load(added + group * c.width + i, count);
      X::store(out + i, X::load(x + i, count) + more, count);
    });
  });
}

template <typename T>
void largest_of_rows(const Elementwise& c) {
  int64_t* places = static_cast<int64_t*>(c.out);
  each_row<T>(c, [=](const T* x, T*, int64_t group) { places[group] = argmax(x, c.width); });
}

}  // namespace

extern "C" {
void kvserve_rms_norm(const Elementwise* c) {
  c->is_bf16 ? norm_rows<bf16>(*c) : norm_rows<float>(*c);
}
void kvserve_add_rms_norm(const Elementwise* c) {
  c->is_bf16 ? add_and_norm_rows<bf16>(*c) : add_and_norm_rows<float>(*c);
}
// The weight is float32, whatever x is.
void kvserve_wide_rms_norm(const Elementwise* c) {
  c->is_bf16 ? norm_rows<bf16, float>(*c) : norm_rows<float>(*c);
}
void kvserve_rotate(const Elementwise* c) {
  c->is_bf16 ? rotate_rows<bf16>(*c) : rotate_rows<float>(*c);
}
void kvserve_silu_and_mul(const Elementwise* c) {
  c->is_bf16 ? activate_rows<bf16>(*c, silu_and_mul) : activate_rows<float>(*c, silu_and_mul);
}
void kvserve_gelu_and_mul(const Elementwise* c) {
  c->is_bf16 ? activate_rows<bf16>(*c, gelu_and_mul) : activate_rows<float>(*c, gelu_and_mul);
}
void kvserve_scale(const Elementwise* c) {
  c->is_bf16 ? scale_rows<bf16>(*c) : scale_rows<float>(*c);
}
void kvserve_add(const Elementwise* c) { c->is_bf16 ? add_rows<bf16>(*c) : add_rows<float>(*c); }
void kvserve_argmax(const Elementwise* c) {
  c->is_bf16 ? largest_of_rows<bf16>(*c) : largest_of_rows<float>(*c);
}
}  // extern "C"

// The width is in bytes.
extern "C" struct TakeRows {
  const char* table;       // [rows, width]
  const int64_t* places;   // [count]
  char* out;               // [count, width]
  int64_t* fault;          // the place that was refused
  int64_t count, rows, width;
};

extern "C" int kvserve_take_rows(const TakeRows* call) {
  const TakeRows& c = *call;
  for (int64_t i = 0; i < c.count; ++i) {
    const int64_t place = c.places[i];
    if (place < 0 || place >= c.rows) {
      *c.fault = place;
      return 1;
    }
    std::memcpy(c.out + i * c.width, c.table + place * c.width, c.width);
  }
  return 0;
}
