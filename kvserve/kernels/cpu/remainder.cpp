// Merges what events have dropped into what stands for what their rows had dropped before.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "lanes.h"

// What the launcher passes; it mirrors these fields.
extern "C" struct AddRemainders {
  float *keys, *values;                  // [L, num_rows, H, D], dense
  float* bias;                           // [L, num_rows, H], dense
  const int64_t* rows;                   // [E], each once
  const float *more_keys, *more_values;  // [E, L, H, D], dense
  const float* more_bias;                // [E, L, H], dense
  int64_t* fault;                        // the row that was refused
  int64_t events, layers, num_rows, heads, dim;
};

namespace {

// Vectors without a weight may hold anything, and are 0.
void mix(float* vector, bool there, const float* more, bool more_there, float share, int64_t dim) {
  typedef Lanes<8> V;
  for (int64_t d = 0; d < dim; d += 8) {
    const V::F old = there ? V::load(vector + d) : V::F{};
    const V::F apart = (more_there ? V::load(more + d) : V::F{}) - old;
    V::store(vector + d, share < 0.5f ? old + share * apart : old + apart - apart * (1.0f - share));
  }
}

void add(const AddRemainders& c) {
  for (int64_t i = 0; i < c.events * c.layers * c.heads; ++i) {
    const int64_t event = i / (c.layers * c.heads), layer = i / c.heads % c.layers;
    const int64_t lane = (layer * c.num_rows + c.rows[event]) * c.heads + i % c.heads;
    const float old = c.bias[lane], more = c.more_bias[i], high = std::max(old, more);
    const bool there = old > -INFINITY, more_there = more > -INFINITY;
    const float both = there && more_there ? high + std::log1p(std::exp(-std::fabs(old - more))) : high;
    const float share = more_there ? std::exp(more - both) : 0.0f;
    mix(c.keys + lane * c.dim, there, c.more_keys + i * c.dim, more_there, share, c.dim);
    mix(c.values + lane * c.dim, there, c.more_values + i * c.dim, more_there, share, c.dim);
    c.bias[lane] = both;
  }
}

}  // namespace

// 1 for a row that is not there; nothing has been written then.
extern "C" int kvserve_add_remainders(const AddRemainders* call) {
  for (int64_t event = 0; event < call->events; ++event)
    if (call->rows[event] < 0 || call->rows[event] >= call->num_rows)
      return *call->fault = call->rows[event], 1;
  add(*call);
  return 0;
}
