// Memory that will be read soon, run by run. It is fetched a few lines at a time, as many as are read
// meanwhile: a core waits for more of them at once, and memory that is not asked for in time is idle.

#pragma once

#include <cstdint>

namespace {

constexpr int kMaxRuns = 128;

class Ahead {
 public:
  Ahead() { begin(); }

  void begin() {
    count_ = run_ = 0;
    next();
  }
  void add(const char* from, int64_t bytes) {
    from_[count_] = from;
    bytes_[count_++] = bytes;
    if (now_ == nothing_) next();
  }

  template <int Lines>
  inline void fetch() {
#pragma GCC unroll 8
    for (int i = 0; i < Lines; ++i) {
      __builtin_prefetch(now_, 0, 2);
      now_ += 64;
      if (__builtin_expect(now_ >= stop_, 0)) next();
    }
  }

 private:
  void next() {
    now_ = run_ < count_ ? from_[run_] : nothing_;
    stop_ = run_ < count_ ? now_ + bytes_[run_++] : nothing_;
  }

  const char *now_, *stop_;
  int count_, run_;
  const char* from_[kMaxRuns];
  int64_t bytes_[kMaxRuns];
  char nothing_[64];
};

}  // namespace
