// What a decoder layer does between its matrix products, each in one pass over its rows.
//
// Arithmetic is float32; bfloat16 is widened as it is loaded, and rounded wherever torch's operators
// would round. A row is computed by one thread, so threads change no bit.

#include <cmath>
#include <cstdint>
#include <cstring>

// What the launcher passes; it mirrors these fields. Strides are in elements.
extern "C" struct Elementwise {
  const void* x;  // [groups, rows, width], groups x_stride apart, rows dense
  const void* a;  // rms_norm: weight [width]; rotate: cos [groups, width]
  const void* b;  // rotate: sin [groups, width]
  void* out;      // dense
  int64_t groups, rows, width, x_stride;
  int64_t is_bf16, num_threads;
  double eps;
};

namespace {

constexpr int kLanes = 16;

struct bf16 {
  uint16_t bits;
};

template <typename To, typename From>
inline To bits_of(From from) {
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline float widen(float x) { return x; }
inline float widen(bf16 x) { return bits_of<float>(uint32_t{x.bits} << 16); }

inline void round_to(float* to, float x) { *to = x; }
inline void round_to(bf16* to, float x) {  // to nearest, ties to even
  const uint32_t bits = bits_of<uint32_t>(x);
  to->bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

template <typename T>
inline float rounded(float x) {
  T y;
  round_to(&y, x);
  return widen(y);
}

// exp to about 2e-7 relative, without branches, so that loops over it become vectors.
inline float exp_bounded(float x) {
  x = x > 88.0f ? 88.0f : x;
  x = x < -87.0f ? -87.0f : x;
  const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to whole numbers
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * bits_of<float>((static_cast<int32_t>(n) + 127) << 23);
}

template <typename T>
void rms_norm(const T* x, const T* weight, float eps, T* out, int64_t width) {
  double squares[kLanes] = {};  // so that the mean is right to its last bit
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) {
      const double v = widen(x[i + lane]);
      squares[lane] += v * v;
    }
  double sum = 0;
  for (; i < width; ++i) sum += static_cast<double>(widen(x[i])) * widen(x[i]);
  for (double square : squares) sum += square;
  const float scale = 1.0f / std::sqrt(static_cast<float>(sum / width) + eps);
  for (i = 0; i < width; ++i)
    round_to(&out[i], widen(weight[i]) * rounded<T>(widen(x[i]) * scale));
}

template <typename T>
void rotate(const T* x, const T* cos, const T* sin, T* out, int64_t width) {
  const int64_t half = width / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float left = widen(x[i]), right = widen(x[i + half]);
    round_to(&out[i], rounded<T>(left * widen(cos[i])) - rounded<T>(right * widen(sin[i])));
    round_to(&out[i + half], rounded<T>(right * widen(cos[i + half])) +
                                 rounded<T>(left * widen(sin[i + half])));
  }
}

template <typename T>
void silu_and_mul(const T* x, T* out, int64_t width) {
  for (int64_t i = 0; i < width; ++i) {
    const float gate = widen(x[i]);
    round_to(&out[i], rounded<T>(gate / (1.0f + exp_bounded(-gate))) * widen(x[i + width]));
  }
}

template <typename T, typename Row>
void each_row(const Elementwise& c, Row row) {
  const int64_t count = c.groups * c.rows;
#pragma omp parallel for schedule(static) num_threads(c.num_threads)
  for (int64_t i = 0; i < count; ++i) row(i / c.rows, i % c.rows);
}

template <typename T>
void norm_rows(const Elementwise& c) {
  const T *x = static_cast<const T*>(c.x), *weight = static_cast<const T*>(c.a);
  T* out = static_cast<T*>(c.out);
  each_row<T>(c, [=](int64_t group, int64_t row) {
    rms_norm(x + group * c.x_stride + row * c.width, weight, static_cast<float>(c.eps),
             out + (group * c.rows + row) * c.width, c.width);
  });
}

template <typename T>
void rotate_rows(const Elementwise& c) {
  const T *x = static_cast<const T*>(c.x), *cos = static_cast<const T*>(c.a),
          *sin = static_cast<const T*>(c.b);
  T* out = static_cast<T*>(c.out);
  each_row<T>(c, [=](int64_t group, int64_t row) {
    rotate(x + group * c.x_stride + row * c.width, cos + group * c.width, sin + group * c.width,
           out + (group * c.rows + row) * c.width, c.width);
  });
}

template <typename T>
void activate_rows(const Elementwise& c) {
  const T* x = static_cast<const T*>(c.x);
  T* out = static_cast<T*>(c.out);
  each_row<T>(c, [=](int64_t group, int64_t) {
    silu_and_mul(x + group * c.x_stride, out + group * c.width, c.width);
  });
}

}  // namespace

extern "C" void kvserve_rms_norm(const Elementwise* c) {
  c->is_bf16 ? norm_rows<bf16>(*c) : norm_rows<float>(*c);
}

extern "C" void kvserve_rotate(const Elementwise* c) {
  c->is_bf16 ? rotate_rows<bf16>(*c) : rotate_rows<float>(*c);
}

extern "C" void kvserve_silu_and_mul(const Elementwise* c) {
  c->is_bf16 ? activate_rows<bf16>(*c) : activate_rows<float>(*c);
}
