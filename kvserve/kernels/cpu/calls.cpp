// Plays a tape: calls of other kernels, one after the other.

#include <cstdint>

// What the launcher passes; it mirrors these fields.
extern "C" struct Item {
  const void* function;  // of one argument
  const void* call;      // what it is given
  int64_t refuses;       // whether it returns an int, 0 if it did its work; else it returns nothing
};

// 0, or what the first call that was refused returned, and its place at `refused`.
extern "C" int kvserve_play(const Item* items, int64_t count, int64_t* refused) {
  for (int64_t i = 0; i < count; ++i) {
    const Item& item = items[i];
    if (!item.refuses) {
      reinterpret_cast<void (*)(const void*)>(item.function)(item.call);
    } else if (const int code = reinterpret_cast<int (*)(const void*)>(item.function)(item.call)) {
      *refused = i;
      return code;
    }
  }
  return 0;
}
