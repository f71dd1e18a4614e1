// Writes new keys and values, and queries to be logged, to their slots in a paged cache: one pass
// instead of a dozen operators.

#include <cstdint>
#include <cstring>

#include "lanes.h"

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

namespace {

// Whether a slot is not in the pool; nothing has been written then.
template <typename Call>
bool refused(const Call& c) {
  for (int64_t i = 0; i < c.num_tables * c.num_tokens; ++i)
    if (c.slots[i] < 0 || c.slots[i] >= c.num_blocks * c.block_size) {
      *c.fault = c.slots[i];
      return true;
    }
  return false;
}

}  // namespace

extern "C" int kvserve_store_kv(const StoreKV* call) {
  const StoreKV& c = *call;
  if (refused(c)) return 1;
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

// Strides are in elements.
extern "C" struct StoreQueries {
  const void* query;     // [T, R * heads * group, dim], tokens query_stride apart
  void* log;             // [num_blocks, B, heads, dim], blocks block_stride apart
  const int64_t* slots;  // [R, T]
  int64_t* fault;        // the slot that was refused
  int64_t query_stride, block_stride;
  int64_t num_tokens, num_blocks, block_size, num_tables, heads, group, dim, is_bf16;
};

namespace {

// The mean of `group` vectors that stand one behind the other.
template <typename T>
void mean(const T* from, T* to, int64_t group, int64_t dim) {
  using V = Lanes<8>;
  for (int64_t i = 0; i < dim; i += 8) {
    const int64_t count = dim - i < 8 ? dim - i : 8;
    V::F sum = V::load(from + i, count);
    for (int64_t g = 1; g < group; ++g) sum += V::load(from + g * dim + i, count);
    V::store(to + i, sum / (float)group, count);
  }
}

template <typename T>
void store_queries(const StoreQueries& c) {
  const T* query = static_cast<const T*>(c.query);
  T* log = static_cast<T*>(c.log);
  for (int64_t r = 0; r < c.num_tables; ++r)
    for (int64_t t = 0; t < c.num_tokens; ++t) {
      const int64_t slot = c.slots[r * c.num_tokens + t];
      if (slot < c.block_size) continue;  // block 0 takes queries that are not logged
      T* to = log + slot / c.block_size * c.block_stride + slot % c.block_size * c.heads * c.dim;
      const T* from = query + t * c.query_stride + r * c.heads * c.group * c.dim;
      for (int64_t h = 0; h < c.heads; ++h)
        mean(from + h * c.group * c.dim, to + h * c.dim, c.group, c.dim);
    }
}

}  // namespace

extern "C" int kvserve_store_queries(const StoreQueries* call) {
  if (refused(*call)) return 1;
  call->is_bf16 ? store_queries<bf16>(*call) : store_queries<float>(*call);
  return 0;
}
