// Writes new keys and values to their slots in a paged cache: one pass instead of a dozen operators.

#include <cstdint>
#include <cstring>

// What the launcher passes; it mirrors these fields. Strides and widths are in bytes.
extern "C" struct StoreKV {
  const char* key;       // [T, R * width], tokens key_stride apart
  const char* value;
  char* keys;            // [num_blocks, B * width], blocks block_stride apart
  char* values;
  const int64_t* slots;  // [R, T]
  int64_t* fault;        // the slot that was refused
  int64_t key_stride, value_stride, block_stride;
  int64_t num_tokens, num_blocks, block_size, num_tables, width;
};

extern "C" int kvserve_store_kv(const StoreKV* call) {
  const StoreKV& c = *call;
  for (int64_t i = 0; i < c.num_tables * c.num_tokens; ++i)
    if (c.slots[i] < 0 || c.slots[i] >= c.num_blocks * c.block_size) {
      *c.fault = c.slots[i];
      return 1;
    }
  for (int64_t r = 0; r < c.num_tables; ++r)
    for (int64_t t = 0; t < c.num_tokens; ++t) {
      const int64_t slot = c.slots[r * c.num_tokens + t];
      const int64_t place =
          slot / c.block_size * c.block_stride + slot % c.block_size * c.width;
      std::memcpy(c.keys + place, c.key + t * c.key_stride + r * c.width, c.width);
      std::memcpy(c.values + place, c.value + t * c.value_stride + r * c.width, c.width);
    }
  return 0;
}
