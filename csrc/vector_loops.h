// The loops of the protocol for a block of threads, in 16-byte vectors. Vector v of a range belongs to one thread of one
// block, the same one in every loop and on every rank, so that a block only waits for the same block of its peers.
#pragma once

#include "protocol.h"

namespace fastlr {

// Self: a machine (see meet() in protocol.h) that also has blocks() and total(double), the sum over its block's threads
// in a fixed order, given to all of them.
template <class Self>
struct VectorLoops {
  FASTLR_DEVICE const Self& self() const { return static_cast<const Self&>(*this); }
  FASTLR_DEVICE int64_t first(Shard s, int lanes) const {
    return s.begin + (int64_t(self().block()) * self().threads() + self().thread()) * lanes;
  }
  FASTLR_DEVICE int64_t stride(int lanes) const { return int64_t(self().blocks()) * self().threads() * lanes; }

  // Memory of the caller: aligned to its elements only, and it ends anywhere. Zeros stand for what is beyond the end.
  template <typename T>
  FASTLR_DEVICE static Vector load(const T* from, int64_t i, int64_t end) {
    if (reinterpret_cast<uintptr_t>(from + i) % kVectorBytes == 0 && i + T::kLanes <= end) {
      return *reinterpret_cast<const Vector*>(from + i);
    }
    float values[T::kLanes];
    FASTLR_UNROLL
    for (int k = 0; k < T::kLanes; ++k) values[k] = i + k < end ? T::load(from[i + k]) : 0.0f;
    return T::pack(values);
  }
  template <typename T>
  FASTLR_DEVICE static void store(T* to, int64_t i, int64_t end, const Vector& v) {
    if (reinterpret_cast<uintptr_t>(to + i) % kVectorBytes == 0 && i + T::kLanes <= end) {
      *reinterpret_cast<Vector*>(to + i) = v;
      return;
    }
    float values[T::kLanes];
    T::unpack(v, values);
    FASTLR_UNROLL
    for (int k = 0; k < T::kLanes; ++k) {
      if (i + k < end) to[i + k] = T::store(values[k]);
    }
  }
  // Staging memory: aligned, in whole vectors.
  template <typename T>
  FASTLR_DEVICE static Vector& at(const Call& c, int rank, int64_t i) {
    return *reinterpret_cast<Vector*>(staged<T>(c, rank) + i);
  }

  // The sums of one vector over ranks, in their order. All loads are issued before the first is used.
  template <typename T>
  FASTLR_DEVICE static void add_up(const Call& c, int64_t i, int64_t end, float* total) {
    Vector part[kMaxRanks];
    FASTLR_UNROLL
    for (int r = 0; r < kMaxRanks; ++r) {
      if (r < c.size) part[r] = r == c.rank ? load(static_cast<const T*>(c.in), i, end) : at<T>(c, r, i);
    }
    T::unpack(part[0], total);
    FASTLR_UNROLL
    for (int r = 1; r < kMaxRanks; ++r) {
      if (r < c.size) {
        float values[T::kLanes];
        T::unpack(part[r], values);
        FASTLR_UNROLL
        for (int k = 0; k < T::kLanes; ++k) total[k] += values[k];
      }
    }
  }

  template <typename T>
  FASTLR_DEVICE void stage(const Call& c, Shard s) const {
    for (int64_t i = first(s, T::kLanes); i < s.end; i += stride(T::kLanes)) {
      at<T>(c, c.rank, i) = load(static_cast<const T*>(c.in), i, s.end);
    }
  }
  template <typename T>
  FASTLR_DEVICE void fetch(const Call& c, int owner, Shard s) const {
    for (int64_t i = first(s, T::kLanes); i < s.end; i += stride(T::kLanes)) {
      store(static_cast<T*>(c.out), i, s.end, at<T>(c, owner, i));
    }
  }
  template <typename T>
  FASTLR_DEVICE void sum(const Call& c, Shard s, bool keep) const {
    for (int64_t i = first(s, T::kLanes); i < s.end; i += stride(T::kLanes)) {
      float total[T::kLanes];
      add_up<T>(c, i, s.end, total);
      if (c.divisor != 1.0f) {
        FASTLR_UNROLL
        for (int k = 0; k < T::kLanes; ++k) total[k] /= c.divisor;
      }
      const Vector v = T::pack(total);
      if (keep) at<T>(c, c.rank, i) = v;
      store(static_cast<T*>(c.out), i, s.end, v);
    }
  }
  template <typename T>
  FASTLR_DEVICE void spoil(const Call& c, Shard s) const {
    float values[T::kLanes];
    FASTLR_UNROLL
    for (int k = 0; k < T::kLanes; ++k) values[k] = from_bits(0x7fc00000u);
    for (int64_t i = first(s, T::kLanes); i < s.end; i += stride(T::kLanes)) {
      store(static_cast<T*>(c.out), i, s.end, T::pack(values));
    }
  }
  template <typename T>
  FASTLR_DEVICE double squares(const Call& c, Shard s) const {
    double own = 0;
    for (int64_t i = first(s, T::kLanes); i < s.end; i += stride(T::kLanes)) {
      float total[T::kLanes];
      add_up<T>(c, i, s.end, total);
      FASTLR_UNROLL
      for (int k = 0; k < T::kLanes; ++k) own += double(total[k]) * double(total[k]);
    }
    return self().total(own);
  }
};

}  // namespace fastlr
