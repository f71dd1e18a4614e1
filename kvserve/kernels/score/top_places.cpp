// The best of many scores, in the order of their places, for CPUs: linear in their number, where a
// stable sort is not.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

// What the launcher passes; it mirrors these fields.
extern "C" struct TopPlaces {
  const float* scores;  // [rows, length], dense
  int64_t* out;         // [rows, stride]: the first `count` of each row are written
  int64_t rows, length, count, stride, num_threads;
};

namespace {

// As numbers compare, NaN above all; both zeros are equal.
inline uint32_t rank_of(float x) {
  if (x != x) return UINT32_MAX;
  x += 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

void choose(const TopPlaces& c, int64_t row, std::vector<uint32_t>& ranks) {
  const float* scores = c.scores + row * c.length;
  int64_t* out = c.out + row * c.stride;
  ranks.resize(c.length);
  for (int64_t i = 0; i < c.length; ++i) ranks[i] = rank_of(scores[i]);
  const auto last = ranks.begin() + (c.count - 1);
  std::nth_element(ranks.begin(), last, ranks.end(), std::greater<uint32_t>());
  const uint32_t least = *last;
  // Among those equal to the last one, the older ones are taken.
  int64_t equal = 1 + std::count(ranks.begin(), last, least);
  for (int64_t i = 0, at = 0; at < c.count; ++i) {
    const uint32_t rank = rank_of(scores[i]);
    if (rank > least || (rank == least && equal-- > 0)) out[at++] = i;
  }
}

}  // namespace

extern "C" void kvserve_top_places(const TopPlaces* call) {
  const TopPlaces& c = *call;
  const int threads = std::max<int64_t>(1, std::min(c.num_threads, c.rows));
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<uint32_t> ranks;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < c.rows; ++row) choose(c, row, ranks);
  }
}
