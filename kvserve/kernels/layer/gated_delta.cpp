// Layers with states of the gated delta rule: a short convolution, the rule, its norm, and the gate of
// attention beside it.
//
// A call has the chunks of all rows of a step. A row's tokens are computed one after the other by one
// thread for some channels, or for a head, so neither threads, other rows nor how a prompt is cut change
// a bit. Arithmetic is float32; numbers of bfloat16 are rounded where torch's operators would round.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "lanes.h"

// What the launchers pass; they mirror these fields. Strides are in elements. `rows [count]` of the states
// have the tokens from starts[i] to starts[i + 1]; at `fault` are a chunk that was refused, and its row or
// its last token.
extern "C" struct Convolution {
  const void* x;        // [tokens, channels], rows x_stride apart
  const void* weight;   // [taps, channels]
  void* tails;          // [num_rows, channels, taps - 1], dense: each row's newest inputs
  void* out;            // [tokens, channels], dense
  const int64_t* rows;
  const int64_t* starts;
  int64_t* fault;
  int64_t count, tokens, num_rows;
  int64_t channels, taps, x_stride, is_bf16, num_threads;
};

extern "C" struct DeltaRule {
  const void* x;       // [tokens, 2 key_heads * key_dim + heads * value_dim]: queries, keys, values
  const void* b;       // [tokens, heads], rows ab_stride apart; a too
  const void* a;
  const float* decay;  // [2, heads]: logarithms of rates, and biases of time steps
  float* states;       // [num_rows, heads, key_dim, value_dim], dense
  void* out;           // [tokens, heads, value_dim], dense
  const int64_t* rows;
  const int64_t* starts;
  int64_t* fault;
  int64_t count, tokens, num_rows;
  int64_t key_heads, heads, key_dim, value_dim, x_stride, ab_stride, is_bf16, num_threads;
};

extern "C" struct Gated {
  const void* x;       // [groups, heads, width], dense
  const void* gate;    // [groups, heads * width], rows gate_stride apart
  const void* weight;  // [width]; null: x is no more than multiplied by the sigmoid of its gate
  void* out;           // as x
  int64_t groups, heads, width, gate_stride, is_bf16, num_threads;
  double eps;
};

namespace {

typedef Lanes<kMaxLanes> X;
typedef X::F F;

constexpr int64_t kMaxTaps = 8, kMaxDim = 256;  // of keys and of values
constexpr int64_t kPiece = 16;       // tokens whose keys and queries are made at once
constexpr int kRows = 4;             // of a state at once
constexpr int64_t kChannels = 256;   // of a convolution, that are a thread's piece of work
constexpr float kLeastLength = 1e-6f;

// 0, or the reason why a chunk cannot be computed; those of rows below zero are left out.
template <typename Call>
int refused(const Call& c) {
  for (int64_t i = 0; i < c.count; ++i) {
    const bool row = c.rows[i] >= c.num_rows;
    if (!row && c.starts[i] >= 0 && c.starts[i] <= c.starts[i + 1] && c.starts[i + 1] <= c.tokens) continue;
    c.fault[0] = i, c.fault[1] = row ? c.rows[i] : c.starts[i + 1];
    return row ? 1 : 2;
  }
  return 0;
}

template <typename T>
inline float number(const T* from) {
  return X::load(from, 1)[0];
}
template <typename T>
inline float rounded(float x) {
  return X::rounded<T>(F{} + x)[0];
}
// body(i, count) for each vector of `width` numbers: `count` from i on, all lanes but for the last.
template <typename Body>
inline void each_vector(int64_t width, Body body) {
  int64_t i = 0;
  for (; i + kMaxLanes <= width; i += kMaxLanes) body(i, kMaxLanes);
  if (i < width) body(i, width - i);
}
inline F sigmoid(F x) { return 1.0f / (1.0f + X::exp(-x)); }

// ---- the convolution ----------------------------------------------------------------------------

// Of the tokens first to end, `lanes` channels from `at` on.
template <typename T>
void convolve(const Convolution& c, int64_t row, int64_t first, int64_t end, int64_t at, int64_t lanes) {
  const int64_t held = c.taps - 1;
  T* tail = static_cast<T*>(c.tails) + (row * c.channels + at) * held;
  const T* weight = static_cast<const T*>(c.weight) + at;
  F window[kMaxTaps] = {}, weights[kMaxTaps] = {};
  for (int64_t j = 0; j < c.taps; ++j) weights[j] = X::load(weight + j * c.channels, lanes);
  for (int64_t lane = 0; lane < lanes; ++lane)
    for (int64_t j = 0; j < held; ++j) window[j][lane] = number(tail + lane * held + j);
  for (int64_t t = first; t < end; ++t) {
    window[held] = X::load(static_cast<const T*>(c.x) + t * c.x_stride + at, lanes);
    F sum = {};
    for (int64_t j = 0; j < c.taps; ++j) sum += weights[j] * window[j];
    sum = X::rounded<T>(sum);
    X::store(static_cast<T*>(c.out) + t * c.channels + at, sum * sigmoid(sum), lanes);
    for (int64_t j = 0; j < held; ++j) window[j] = window[j + 1];
  }
  T inputs[kMaxLanes];
  for (int64_t j = 0; j < held; ++j) {
    X::store(inputs, window[j]);
    for (int64_t lane = 0; lane < lanes; ++lane) tail[lane * held + j] = inputs[lane];
  }
}

template <typename T>
void convolve_all(const Convolution& c) {
  const int64_t pieces = (c.channels + kChannels - 1) / kChannels;
#pragma omp parallel for collapse(2) schedule(static) num_threads(c.num_threads) if (c.num_threads > 1)
  for (int64_t i = 0; i < c.count; ++i)
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const int64_t end = c.rows[i] < 0 ? 0 : std::min(c.channels, (piece + 1) * kChannels);
      for (int64_t at = piece * kChannels; at < end; at += kMaxLanes)
        convolve<T>(c, c.rows[i], c.starts[i], c.starts[i + 1], at,
                    std::min<int64_t>(kMaxLanes, end - at));
    }
}

// ---- the rule -----------------------------------------------------------------------------------

// Some tokens of one head.
template <typename T>
struct Piece {
  int64_t tokens, key_dim, value_dim, x_stride, out_stride;
  const T* values;  // the first token's
  T* out;
  float* state;  // [key_dim, value_dim]
  float keys[kPiece][kMaxDim], queries[kPiece][kMaxDim];
  float decay[kPiece], beta[kPiece], both[kPiece];  // both: the product of query and key
  float by_key[kMaxDim], by_query[kMaxDim], change[kMaxDim];  // of one token, by column of the state
};

// x over its length, in float32.
template <typename T>
void normalize(const T* x, float* out, int64_t width, float factor) {
  F squares = {};
  each_vector(width, [&](int64_t i, int64_t count) {
    const F part = X::load(x + i, count);
    squares += part * part;
  });
  const float scale = factor / std::sqrt(X::total(squares) + kLeastLength);
  each_vector(width, [&](int64_t i, int64_t count) {
    X::store(out + i, X::load(x + i, count) * scale, count);
  });
}

// Over R rows of a state, front to back: what the token before has changed, and sums of what this one
// reads. A state is passed once a token, and once more at the end of a piece.
template <int R, bool Updates, bool Reads, typename T>
inline void pass_rows(Piece<T>& p, int64_t t, int64_t i) {
  float before[R], key[R], query[R], decay = Updates ? p.decay[t - 1] : 1.0f;
  for (int r = 0; r < R; ++r) {
    before[r] = Updates ? p.keys[t - 1][i + r] : 0.0f;
    key[r] = Reads ? p.keys[t][i + r] : 0.0f;
    query[r] = Reads ? p.queries[t][i + r] : 0.0f;
  }
  float* state = p.state + i * p.value_dim;
  each_vector(p.value_dim, [&](int64_t at, int64_t count) {
    const F change = Updates ? X::load(p.change + at) : F{};
    F by_key = Reads ? X::load(p.by_key + at) : F{}, by_query = Reads ? X::load(p.by_query + at) : F{};
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      F held = X::load(state + r * p.value_dim + at, count);
      if (Updates) {
        held = decay * held + before[r] * change;
        X::store(state + r * p.value_dim + at, held, count);
      }
      by_key += key[r] * held;
      by_query += query[r] * held;
    }
    if (Reads) X::store(p.by_key + at, by_key), X::store(p.by_query + at, by_query);
  });
}

template <bool Updates, bool Reads, typename T>
void pass(Piece<T>& p, int64_t t) {
  int64_t i = 0;
  for (; i + kRows <= p.key_dim; i += kRows) pass_rows<kRows, Updates, Reads>(p, t, i);
  for (; i < p.key_dim; ++i) pass_rows<1, Updates, Reads>(p, t, i);
}

// With the state S before a token, its value v becomes d = beta (v - decay S' k), the state
// decay S + k d', and what the token reads of it decay S' q + (k' q) d.
template <typename T>
void advance(Piece<T>& p) {
  for (int64_t t = 0; t < p.tokens; ++t) {
    std::fill(p.by_key, p.by_key + kMaxDim, 0.0f);
    std::fill(p.by_query, p.by_query + kMaxDim, 0.0f);
    t ? pass<true, true>(p, t) : pass<false, true>(p, t);
    const float decay = p.decay[t], beta = p.beta[t], both = p.both[t];
    each_vector(p.value_dim, [&](int64_t at, int64_t count) {
      const F value = X::load(p.values + t * p.x_stride + at, count);
      const F change = (value - decay * X::load(p.by_key + at)) * beta;
      X::store(p.change + at, change);
      X::store(p.out + t * p.out_stride + at, decay * X::load(p.by_query + at) + both * change, count);
    });
  }
  if (p.tokens) pass<true, false>(p, p.tokens);
}

// What the tokens of a piece have of one head beside their values.
template <typename T>
void prepare(const DeltaRule& c, Piece<T>& p, int64_t first, int64_t head) {
  const int64_t key_head = head / (c.heads / c.key_heads), keys = c.key_heads * c.key_dim;
  const float rate = -std::exp(c.decay[head]), bias = c.decay[c.heads + head];
  const float scale = 1.0f / std::sqrt(static_cast<float>(c.key_dim));
  for (int64_t t = 0; t < p.tokens; ++t) {
    const T* x = static_cast<const T*>(c.x) + (first + t) * c.x_stride + key_head * c.key_dim;
    normalize(x, p.queries[t], c.key_dim, scale);
    normalize(x + keys, p.keys[t], c.key_dim, 1.0f);
    F both = {};
    each_vector(c.key_dim, [&](int64_t i, int64_t count) {
      both += X::load(p.queries[t] + i, count) * X::load(p.keys[t] + i, count);
    });
    const int64_t place = (first + t) * c.ab_stride + head;
    const float step = number(static_cast<const T*>(c.a) + place) + bias;
    const float softplus = step > 20.0f ? step : std::log1p(std::exp(step));
    p.both[t] = X::total(both);
    p.decay[t] = std::exp(rate * softplus);
    p.beta[t] = rounded<T>(1.0f / (1.0f + std::exp(-number(static_cast<const T*>(c.b) + place))));
  }
}

template <typename T>
void apply_rule(const DeltaRule& c) {
#pragma omp parallel for collapse(2) schedule(static) num_threads(c.num_threads) if (c.num_threads > 1)
  for (int64_t i = 0; i < c.count; ++i)
    for (int64_t head = 0; head < c.heads; ++head) {
      if (c.rows[i] < 0) continue;
      Piece<T> p;
      p.key_dim = c.key_dim, p.value_dim = c.value_dim;
      p.x_stride = c.x_stride, p.out_stride = c.heads * c.value_dim;
      p.state = c.states + (c.rows[i] * c.heads + head) * c.key_dim * c.value_dim;
      for (int64_t first = c.starts[i]; first < c.starts[i + 1]; first += kPiece) {
        p.tokens = std::min(kPiece, c.starts[i + 1] - first);
        prepare(c, p, first, head);
        const int64_t value = 2 * c.key_heads * c.key_dim + head * c.value_dim;
        p.values = static_cast<const T*>(c.x) + first * c.x_stride + value;
        p.out = static_cast<T*>(c.out) + first * p.out_stride + head * c.value_dim;
        advance(p);
      }
    }
}

// ---- gates --------------------------------------------------------------------------------------

// A norm, times its weight, times the SiLU of a gate; without a weight: x times a gate's sigmoid.
template <typename T>
void gate_row(const T* x, const T* gate, const T* weight, float eps, T* out, int64_t width) {
  float scale = 1.0f;
  if (weight) {
    F squares = {};
    each_vector(width, [&](int64_t i, int64_t count) {
      const F part = X::load(x + i, count);
      squares += part * part;
    });
    scale = 1.0f / std::sqrt(X::total(squares) / width + eps);
  }
  each_vector(width, [&](int64_t i, int64_t count) {
    const F part = X::load(x + i, count), by = X::load(gate + i, count), open = sigmoid(by);
    if (weight) {
      const F normed = X::load(weight + i, count) * X::rounded<T>(part * scale);
      X::store(out + i, X::rounded<T>(normed) * (by * open), count);
    } else {
      X::store(out + i, part * X::rounded<T>(open), count);
    }
  });
}

template <typename T>
void gate_rows(const Gated& c) {
  const T* weight = static_cast<const T*>(c.weight);
  const float eps = c.eps;
#pragma omp parallel for schedule(static) num_threads(c.num_threads) if (c.num_threads > 1)
  for (int64_t i = 0; i < c.groups * c.heads; ++i) {
    const int64_t group = i / c.heads, head = i % c.heads;
    const T* gate = static_cast<const T*>(c.gate) + group * c.gate_stride + head * c.width;
    gate_row(static_cast<const T*>(c.x) + i * c.width, gate, weight, eps,
             static_cast<T*>(c.out) + i * c.width, c.width);
  }
}

}  // namespace

extern "C" int kvserve_causal_convolution(const Convolution* c) {
  if (const int why = refused(*c)) return why;
  c->is_bf16 ? convolve_all<bf16>(*c) : convolve_all<float>(*c);
  return 0;
}

extern "C" int kvserve_gated_delta_rule(const DeltaRule* c) {
  if (const int why = refused(*c)) return why;
  c->is_bf16 ? apply_rule<bf16>(*c) : apply_rule<float>(*c);
  return 0;
}

extern "C" void kvserve_gate(const Gated* c) {
  c->is_bf16 ? gate_rows<bf16>(*c) : gate_rows<float>(*c);
}
