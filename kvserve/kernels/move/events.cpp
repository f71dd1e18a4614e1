// What events do to rows, beside scoring: where their entries lie, which of them comes to each place,
// and what stands for those that rows have lost.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "lanes.h"

// ---- from physical entries to the slots that hold them, for every lane of many rows --------------

// What the launcher passes; it mirrors these fields. Strides are in numbers; they are 0 where one
// entry is for all.
extern "C" struct SlotMapping {
  const int32_t* tables;   // [groups, num_rows, tables_per_row, columns], dense
  const int64_t* rows;     // [E]
  const int64_t* entries;  // [E, L, H, S]; below 0: as 0
  int64_t* out;            // [L, H, E, S], dense
  int64_t* fault;          // the row or the entry that was refused
  int64_t strides[4];
  int64_t num_events, num_layers, num_heads, length;
  int64_t groups, num_rows, tables_per_row, columns, block_tokens;
};

// 1 for a row that is not there, 2 for an entry that no column holds.
extern "C" int kvserve_slot_mapping(const SlotMapping* call) {
  const SlotMapping& c = *call;
  const uint64_t held = c.columns * c.block_tokens;
  const bool alike = c.groups * c.tables_per_row == 1 && !c.strides[1] && !c.strides[2];
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
        for (int64_t i = 0; i < c.length; ++i) {
          const int64_t entry = entries[i * c.strides[3]] < 0 ? 0 : entries[i * c.strides[3]];
          if ((uint64_t)entry >= held) return *c.fault = entry, 2;
          const int64_t column = entry / c.block_tokens;
          *out++ = blocks[column] * c.block_tokens + (entry - column * c.block_tokens);
        }
      }
    }
  return 0;
}

// ---- the slots that entries move between, and those that no place gets --------------------------

// What the launcher passes; it mirrors these fields. Strides are in numbers.
extern "C" struct EventSlots {
  const int64_t* kept;        // [E, L, H, C]
  const int64_t* numbers;     // [7, E, L, H], dense: as of Moves
  const int32_t* tables;      // [groups, num_rows, tables_per_row, columns], dense
  const int64_t* rows;        // [E]
  const int32_t* new_tables;  // [groups, E, tables_per_row, new_columns], dense
  int64_t *src, *dst;         // [L, H, E, moved], dense
  int64_t* dropped;           // [L, H, E, lost], dense
  int64_t* fault;             // the row or the entry that was refused
  int64_t strides[4];
  int64_t events, layers, heads, num_kept, moved, lost;
  int64_t groups, num_rows, tables_per_row, columns, new_columns, block_tokens;
};

// 1 for a row that is not there, 2 for an entry that no column holds.
extern "C" int kvserve_event_slots(const EventSlots* call) {
  const EventSlots& c = *call;
  std::vector<char> stays;
  int64_t *src = c.src, *dst = c.dst, *dropped = c.dropped;
  for (int64_t lane = 0; lane < c.layers * c.heads; ++lane)
    for (int64_t event = 0; event < c.events; ++event) {
      const int64_t layer = lane / c.heads, head = lane % c.heads, row = c.rows[event];
      const int64_t group = layer * c.groups / c.layers, table = head * c.tables_per_row / c.heads;
      if (row < 0 || row >= c.num_rows) return *c.fault = row, 1;
      const auto slot = [&](const int32_t* tables, int64_t rows, int64_t at, int64_t columns,
                            int64_t entry) -> int64_t {
        const int64_t column = std::max<int64_t>(entry, 0) / c.block_tokens;
        if (column >= columns) return *c.fault = entry, -1;
        const int64_t first = ((group * rows + at) * c.tables_per_row + table) * columns;
        return tables[first + column] * c.block_tokens + std::max<int64_t>(entry, 0) % c.block_tokens;
      };
      const auto old_slot = [&](int64_t entry) {
        return slot(c.tables, c.num_rows, row, c.columns, entry);
      };
      const auto number = [&](int64_t which) {
        return c.numbers[((which * c.events + event) * c.layers + layer) * c.heads + head];
      };
      const int64_t* kept = c.kept + event * c.strides[0] + layer * c.strides[1] + head * c.strides[2];
      const int64_t start = number(0), before = number(1), evicted = number(2), count = number(3);
      const int64_t chosen = std::min(number(6), c.num_kept), last = before + chosen;
      for (int64_t place = 0; place < c.moved; ++place, ++src, ++dst) {
        *src = *dst = 0;
        if (place >= count) continue;
        const bool is_kept = place >= before && place < last;
        *src = old_slot(is_kept ? kept[(place - before) * c.strides[3]]
                                : start + place + (place < before ? 0 : evicted));
        *dst = slot(c.new_tables, c.events, event, c.new_columns, start % c.block_tokens + place);
        if (*src < 0 || *dst < 0) return 2;
      }
      const int64_t first = number(4), *end = dropped + c.lost;
      stays.assign(c.lost ? std::max<int64_t>(number(5), 0) : 0, 0);
      for (int64_t i = 0; i < chosen; ++i) {
        const uint64_t place = kept[i * c.strides[3]] - first;
        if (place < stays.size()) stays[place] = 1;
      }
      for (uint64_t place = 0; place < stays.size() && dropped < end; ++place)
        if (!stays[place] && (*dropped++ = old_slot(first + place)) < 0) return 2;
      while (dropped < end)
        if ((*dropped++ = old_slot(first)) < 0) return 2;
    }
  return 0;
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
