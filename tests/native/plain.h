// What the checks of csrc/ hold it to: drawn numbers and their plain sum over the ranks; and the account of what was wrong.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "protocol.h"

namespace fastlr {

inline std::atomic<int> failures = 0, checked = 0;

inline void expect(bool right, const char* what, int size, int64_t count) {
  ++checked;
  if (right) return;
  ++failures;
  std::printf("WRONG: %s, %d ranks, %lld elements\n", what, size, static_cast<long long>(count));
}

struct Plan {
  Operation operation;
  Algorithm algorithm;
  int64_t count;
  int offset;  // of the tensor's first element from an aligned address
};

template <typename T>
std::vector<T> drawn(int64_t count, int rank, int call) {
  std::mt19937 random(rank * 1000 + call);
  std::normal_distribution<float> normal;
  std::vector<T> values(count);
  for (T& value : values) value = T::store(normal(random));
  return values;
}

template <typename T>
std::vector<float> plain_sum(const Plan& plan, int size, int call) {
  std::vector<float> total(plan.count);
  for (int r = 0; r < size; ++r) {
    const auto part = drawn<T>(plan.count, r, call);
    for (int64_t i = 0; i < plan.count; ++i) total[i] = r == 0 ? T::load(part[i]) : total[i] + T::load(part[i]);
  }
  return total;
}

template <typename T>
bool same(const T& a, const T& b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

}  // namespace fastlr
