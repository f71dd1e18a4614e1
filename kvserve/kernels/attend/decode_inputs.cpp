// Where the next tokens of the first rows go, and what they see, in one pass over the rows.

#include <algorithm>
#include <cstdint>

// What the launcher passes; it mirrors these fields.
extern "C" struct DecodeInputs {
  const int32_t* tables;       // [LG, rows, R, columns]
  const int32_t* log_tables;   // [LG, rows, R, log_columns]
  const int64_t* log_from;     // [rows]
  const int64_t* log_span;     // [rows]
  const int64_t* log_stride;   // [rows]
  int64_t* kv_lens;            // [LG, rows, R]
  int64_t* num_computed;       // [rows]
  const int64_t* count;        // one number: rows that decode
  const int64_t* starts;       // [chunks + 1], or null: row i has token i alone
  const int64_t* lengths;      // [chunks], of each chunk's first tokens, which are real
  int64_t* positions;          // [tokens]
  int64_t* slots;              // [LG, R, tokens]
  int64_t* last;               // [LG, R, tokens]
  int64_t* query_slots;        // [LG, R, tokens], or null
  int64_t* recent;             // [tokens], null if query_slots is
  int64_t groups, rows, heads, tokens, chunks, columns, log_columns, block, log_block;
};

namespace {

// The slot of an entry; the null block's if the table has no such column.
inline int64_t slot(const int32_t* table, int64_t columns, int64_t entry, int64_t block) {
  const int64_t column = entry / block;
  return column < columns ? table[column] * block + entry % block : 0;
}

}  // namespace

extern "C" void kvserve_decode_inputs(const DecodeInputs* call) {
  const DecodeInputs& c = *call;
  for (int64_t row = 0; row < c.chunks; ++row) {
    const int64_t start = c.starts ? c.starts[row] : row;
    const int64_t end = c.starts ? c.starts[row + 1] : row + 1;
    const int64_t added = row >= *c.count ? 0 : c.starts ? c.lengths[row] : 1;
    for (int64_t token = start; token < end; ++token) {
      const int64_t offset = token - start;
      const bool real = offset < added;
      const int64_t position = real ? c.num_computed[row] + offset : 0;
      c.positions[token] = position;
      bool logged = false;
      int64_t query = 0;
      if (c.query_slots) {
        const int64_t first = c.log_from[row], stride = c.log_stride[row];
        const int64_t behind = std::max<int64_t>(position - first, 0);
        logged = real && position >= first && behind % stride == stride - 1;
        query = first / stride + behind / stride;
        c.recent[token] = behind % c.log_span[row] + 1;
      }
      for (int64_t group = 0; group < c.groups; ++group)
        for (int64_t head = 0; head < c.heads; ++head) {
          const int64_t place = (group * c.rows + row) * c.heads + head;
          const int64_t target = (group * c.heads + head) * c.tokens + token;
          const int64_t entry = c.kv_lens[place] + offset;
          c.slots[target] =
              real ? slot(c.tables + place * c.columns, c.columns, entry, c.block) : 0;
          c.last[target] = real ? entry : -1;
          if (c.query_slots)
            c.query_slots[target] =
                logged ? slot(c.log_tables + place * c.log_columns, c.log_columns, query,
                              c.log_block)
                       : 0;
        }
    }
    if (!added) continue;
    for (int64_t group = 0; group < c.groups; ++group)
      for (int64_t head = 0; head < c.heads; ++head)
        c.kv_lens[(group * c.rows + row) * c.heads + head] += added;
    c.num_computed[row] += added;
  }
}
