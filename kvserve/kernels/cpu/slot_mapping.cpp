// From physical entries to the slots of the paged cache that hold them, for every lane of many rows.

#include <cstdint>

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
  int64_t* out = c.out;
  for (int64_t layer = 0; layer < c.num_layers; ++layer)
    for (int64_t head = 0; head < c.num_heads; ++head) {
      const int64_t group = layer * c.groups / c.num_layers;
      const int64_t table = head * c.tables_per_row / c.num_heads;
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
