// Which entry comes to each place of the rows that events leave.

#include <algorithm>
#include <cstdint>

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
