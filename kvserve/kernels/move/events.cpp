// What events do to rows, beside scoring: where their entries lie, which of them comes to each place,
// and what stands for those that rows have lost.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "lanes.h"

// ---- from physical entries to the slots that hold them, for every lane of many rows --------------

// What the launcher passes; it mirrors these fields. Strides are in numbers; they are 0 where one
// number is for all.
extern "C" struct SlotMapping {
  const int32_t* tables;   // [groups, num_rows, tables_per_row, columns], dense
  const int64_t* rows;     // [E]
  const int64_t* entries;  // [E, L, H, S]; below 0: as 0
  const int64_t* counts;   // [E, L, H], how many exist, others get slot 0; null: all do
  int64_t* out;            // [L, H, E, S], dense
  int64_t* fault;          // the row or the entry that was refused
  int64_t strides[4], counts_strides[3];
  int64_t num_events, num_layers, num_heads, length;
  int64_t groups, num_rows, tables_per_row, columns, block_tokens;
};

// 1 for a row that is not there, 2 for an entry that no column holds.
extern "C" int kvserve_slot_mapping(const SlotMapping* call) {
  const SlotMapping& c = *call;
  const uint64_t held = c.columns * c.block_tokens;
  const bool alike = !c.counts && c.groups * c.tables_per_row == 1 && !c.strides[1] && !c.strides[2];
  int64_t* out = c.out;
  for (int64_t layer = 0; layer < c.num_layers; ++layer)
    for (int64_t head = 0; head < c.num_heads; ++head) {
      const int64_t group = layer * c.groups / c.num_layers;
      const int64_t table = head * c.tables_per_row / c.num_heads;
      if (alike && layer + head) {  // the first lane's are every lane's
        out = std::copy_n(c.out, c.num_events * c.length, out);
        continue;
      }
      for (int64_t event = 0; event < c.num_events; ++event) {
        const int64_t row = c.rows[event];
        if (row < 0 || row >= c.num_rows) return *c.fault = row, 1;
        const int32_t* blocks =
            c.tables + ((group * c.num_rows + row) * c.tables_per_row + table) * c.columns;
        const int64_t* entries =
            c.entries + event * c.strides[0] + layer * c.strides[1] + head * c.strides[2];
        int64_t count = c.length;
        if (c.counts)
          count = c.counts[event * c.counts_strides[0] + layer * c.counts_strides[1] +
                           head * c.counts_strides[2]];
        for (int64_t i = 0; i < c.length; ++i) {
          if (i >= count) {
            *out++ = 0;
            continue;
          }
          const int64_t entry = entries[i * c.strides[3]] < 0 ? 0 : entries[i * c.strides[3]];
          if ((uint64_t)entry >= held) return *c.fault = entry, 2;
          const int64_t column = entry / c.block_tokens;
          *out++ = blocks[column] * c.block_tokens + (entry - column * c.block_tokens);
        }
      }
    }
  return 0;
}

// ---- which entry comes to each place of the rows that events leave -------------------------------

// What the launcher passes; it mirrors these fields. Strides are in numbers.
extern "C" struct MovedEntries {
  const int64_t* kept;     // [E, L, H, C]
  const int64_t* numbers;  // [5, E, L, H], dense: start, before, chosen, evicted, counts
  int64_t* out;            // [E, L, H, length], dense
  int64_t strides[4];
  int64_t events, layers, heads, num_kept, length;
};

extern "C" void kvserve_moved_entries(const MovedEntries* call) {
  const MovedEntries& c = *call;
  const int64_t lanes = c.events * c.layers * c.heads;
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const int64_t event = lane / (c.layers * c.heads);
    const int64_t layer = lane / c.heads % c.layers, head = lane % c.heads;
    const int64_t* kept =
        c.kept + event * c.strides[0] + layer * c.strides[1] + head * c.strides[2];
    const auto number = [&](int64_t which) { return c.numbers[which * lanes + lane]; };
    const int64_t start = number(0), before = number(1), evicted = number(3);
    const int64_t last_chosen = c.num_kept ? before + number(2) : 0, count = number(4);
    int64_t* out = c.out + lane * c.length;
    for (int64_t place = 0; place < c.length; ++place) {
      if (place >= count)
        out[place] = 0;
      else if (place < before)
        out[place] = start + place;
      else if (place < last_chosen)
        out[place] = kept[std::min(place - before, c.num_kept - 1) * c.strides[3]];
      else
        out[place] = start + place + evicted;
    }
  }
}

// ---- which entries no place gets -----------------------------------------------------------------

// What the launcher passes; it mirrors these fields. Strides are in numbers.
extern "C" struct DroppedEntries {
  const int64_t* kept;     // [E, L, H, C]
  const int64_t* numbers;  // [3, E, L, H], dense: first, held, how many of kept count
  int64_t* out;            // [E, L, H, length], dense
  int64_t strides[4];
  int64_t events, layers, heads, num_kept, length;
};

extern "C" void kvserve_dropped_entries(const DroppedEntries* call) {
  const DroppedEntries& c = *call;
  const int64_t lanes = c.events * c.layers * c.heads;
  std::vector<char> stays;
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const int64_t event = lane / (c.layers * c.heads);
    const int64_t layer = lane / c.heads % c.layers, head = lane % c.heads;
    const int64_t* kept =
        c.kept + event * c.strides[0] + layer * c.strides[1] + head * c.strides[2];
    const int64_t first = c.numbers[lane], held = c.numbers[lanes + lane];
    const int64_t count = std::min(c.numbers[2 * lanes + lane], c.num_kept);
    stays.assign(std::max<int64_t>(held, 0), 0);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t place = kept[i * c.strides[3]] - first;
      if (place >= 0 && place < held) stays[place] = 1;
    }
    int64_t *out = c.out + lane * c.length, *end = out + c.length;
    for (int64_t place = 0; place < held && out < end; ++place)
      if (!stays[place]) *out++ = first + place;
    std::fill(out, end, first);
  }
}

// ---- what events drop is merged into what stands for what their rows had dropped before ----------

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
