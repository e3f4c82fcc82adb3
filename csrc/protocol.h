// Sums over ranks through peer buffers: the protocol, shared word for word by the CUDA kernels and their CPU twins.
//
// Every rank owns a segment that all ranks have mapped: a header of flags, then two halves of a staging buffer. A call
// works on one chunk that fits a half, and calls alternate between the halves. A rank puts its part into its own
// half, posts a flag in every peer's header, waits for everyone's flag, and then reads what the peers have put there.
//
// Why nobody reads what is already being overwritten: a rank writes to a half again two calls later. Between the two it
// has completed a call, so every peer has posted in that call, and a peer posts in a call only when all its work of
// the call before is done (calls follow each other: a stream on a GPU, the program order on a CPU).
//
// The order of additions is that of the ranks for every element and algorithm, in float; a sum is rounded to the
// element's type once. So one-shot and two-shot, GPU and CPU give the same bits, on every rank and in every run.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define FASTLR_BOTH __host__ __device__ inline
#define FASTLR_DEVICE __device__ inline
#else
#define FASTLR_BOTH inline
#define FASTLR_DEVICE inline
#endif
#ifdef __CUDA_ARCH__
#define FASTLR_UNROLL _Pragma("unroll")
#else
#define FASTLR_UNROLL
#endif

namespace fastlr {

constexpr int kProtocol = 3;    // ranks work together only if they have the same
constexpr int kMaxRanks = 8;
constexpr int kMaxBlocks = 128;  // thread blocks of a call
constexpr int kVectorBytes = 16;

enum class Dtype : int { kBfloat16 = 0, kFloat32 = 1 };
enum class Operation : int { kSum = 0, kMean = 1, kSquaredNorm = 2 };
enum class Algorithm : int { kAuto = 0, kOneShot = 1, kTwoShot = 2 };

// Why a call failed. The one that notices tells the others, so that they need not wait for their own limit.
enum Failure : uint32_t { kFine = 0, kTimeout = 1, kMismatch = 2, kInterrupted = 3, kGone = 4 };

// Flags live in the memory of the rank that waits for them, so that polling stays local.
// posted[parity of the call][stage][who posted][thread block] = number of the call << 32 | what is being called
struct Header {
  uint64_t posted[2][2][kMaxRanks][kMaxBlocks];
  double partial[2][kMaxRanks][kMaxBlocks];  // [parity][from][thread block], for squared norms
  uint64_t aborted;  // 0, or report() of a rank that gave up
  uint64_t token;    // on a CPU: tells this segment from any other
};
constexpr int64_t kHeaderBytes = (sizeof(Header) + 4095) / 4096 * 4096;

// 0 or who noticed a failure, which, and about whom.
FASTLR_BOTH uint64_t report(uint32_t failure, int noticed_by, int about) {
  return uint64_t(failure) << 32 | uint64_t(noticed_by) << 16 | uint64_t(about);
}

// One call on one chunk, as one rank sees it.
struct Call {
  unsigned char* segment[kMaxRanks];  // every rank's, as mapped here
  const void* in;
  void* out;           // may be in; unused by squared norms
  int64_t count;       // elements of the chunk
  int64_t half;        // bytes from the start of a segment to the half in use
  uint32_t number;     // of the call, the same on all ranks; never the one before
  uint32_t signature;  // of what is called: the same on all ranks unless they disagree
  int rank, size, parity;
  float divisor;  // 1, or the number of ranks for a mean
  uint64_t limit;  // nanoseconds to wait for a peer
  uint64_t* status;  // 0 or report()
  double* sums;      // [thread blocks], results of squared norms
  const uint64_t* ended;  // bit r: the process of rank r has ended; for machines that cannot ask
};

FASTLR_BOTH Header* header(const Call& c, int rank) { return reinterpret_cast<Header*>(c.segment[rank]); }

template <typename T>
FASTLR_BOTH T* staged(const Call& c, int rank) {
  return reinterpret_cast<T*>(c.segment[rank] + c.half);
}

inline uint64_t mixed(uint64_t h, uint64_t value) {
  h += value + 0x9e3779b97f4a7c15u;
  h = (h ^ h >> 30) * 0xbf58476d1ce4e5b9u;
  h = (h ^ h >> 27) * 0x94d049bb133111ebu;
  return h ^ h >> 31;
}

// ------------------------------------------------------------------------------------------------------ element types
struct alignas(kVectorBytes) Vector {
  uint32_t word[4];
};

FASTLR_BOTH float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

FASTLR_BOTH uint32_t to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

// To nearest, ties to even; NaN stays NaN.
FASTLR_BOTH uint32_t round_to_bfloat16(float value) {
  const uint32_t bits = to_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded;
}

struct Bfloat16 {
  uint16_t bits;
  static constexpr int kLanes = kVectorBytes / 2;
  FASTLR_BOTH static void unpack(const Vector& v, float* values) {
    FASTLR_UNROLL
    for (int k = 0; k < 4; ++k) {
      values[2 * k] = from_bits(v.word[k] << 16);
      values[2 * k + 1] = from_bits(v.word[k] & 0xffff0000u);
    }
  }
  FASTLR_BOTH static Vector pack(const float* values) {
    Vector v;
    FASTLR_UNROLL
    for (int k = 0; k < 4; ++k) {
      v.word[k] = round_to_bfloat16(values[2 * k]) | round_to_bfloat16(values[2 * k + 1]) << 16;
    }
    return v;
  }
  FASTLR_BOTH static float load(Bfloat16 x) { return from_bits(uint32_t(x.bits) << 16); }
  FASTLR_BOTH static Bfloat16 store(float x) { return Bfloat16{uint16_t(round_to_bfloat16(x))}; }
};

struct Float32 {
  float value;
  static constexpr int kLanes = kVectorBytes / 4;
  FASTLR_BOTH static void unpack(const Vector& v, float* values) {
    FASTLR_UNROLL
    for (int k = 0; k < 4; ++k) values[k] = from_bits(v.word[k]);
  }
  FASTLR_BOTH static Vector pack(const float* values) {
    Vector v;
    FASTLR_UNROLL
    for (int k = 0; k < 4; ++k) v.word[k] = to_bits(values[k]);
    return v;
  }
  FASTLR_BOTH static float load(Float32 x) { return x.value; }
  FASTLR_BOTH static Float32 store(float x) { return Float32{x}; }
};

// --------------------------------------------------------------------------------------------------------- the chunks
// Shard s of a chunk is [begin, end): whole vectors but for the last one's end; the same number of vectors for each.
struct Shard {
  int64_t begin, end;
};

template <typename T>
FASTLR_BOTH Shard shard(const Call& c, int s) {
  const int64_t vectors = (c.count + T::kLanes - 1) / T::kLanes;
  const int64_t each = (vectors + c.size - 1) / c.size * T::kLanes;
  const int64_t begin = s * each < c.count ? s * each : c.count;
  return {begin, begin + each < c.count ? begin + each : c.count};
}

// Elements of T of which every shard's whole vectors fit a half.
inline int64_t capacity(int64_t half_bytes, int size, int64_t element_bytes) {
  return half_bytes / kVectorBytes / size * size * (kVectorBytes / element_bytes);
}

// What is asked of a group: a whole tensor.
struct Job {
  Operation operation;
  Dtype dtype;
  const void* in;
  void* out;
  int64_t count;
};

// How a group does a job. Who of them differs in any of it would read what is not there yet.
struct Way {
  Algorithm algorithm;
  int64_t half_bytes;
  int blocks;  // at most
};

inline uint32_t signature(const Job& job, const Way& way) {
  uint64_t h = mixed(0, uint64_t(job.operation));
  for (uint64_t value : {uint64_t(job.dtype), uint64_t(job.count), uint64_t(way.algorithm), uint64_t(way.half_bytes),
                         uint64_t(way.blocks)}) {
    h = mixed(h, value);
  }
  return uint32_t(h);
}

// The next call of a job, on the elements from `begin` on; status and sums are the caller's.
template <typename T>
Call next_call(const Job& job, const Way& way, int64_t begin, unsigned char* const* segments, int rank, int size,
               uint32_t number, double seconds) {
  const int64_t half_bytes = way.half_bytes;
  const int64_t most = capacity(half_bytes, size, sizeof(T));
  Call c{};
  for (int r = 0; r < size; ++r) c.segment[r] = segments[r];
  c.in = static_cast<const T*>(job.in) + begin;
  c.out = job.out == nullptr ? nullptr : static_cast<T*>(job.out) + begin;
  c.count = job.count - begin < most ? job.count - begin : most;
  c.number = number;
  c.parity = int(number & 1);
  c.half = kHeaderBytes + c.parity * half_bytes;
  c.signature = signature(job, way);
  c.rank = rank;
  c.size = size;
  c.divisor = job.operation == Operation::kMean ? float(size) : 1.0f;
  c.limit = seconds >= 1e9 ? ~uint64_t(0) : uint64_t(seconds * 1e9);
  return c;
}

// --------------------------------------------------------------------------------------------------------- rendezvous
// A machine M is a block of threads: thread(), threads(), block(), sync() (a barrier of the block), any(bool) (a
// barrier, true if any thread says so), load_acquire, store_release and fence (system scope), now() in nanoseconds,
// relax(peer) between two polls (kFine, or why not to go on), and the loops stage, sum, fetch, spoil and squares.
// Its own header, too: what is queued already does not wait once more.
template <class M>
FASTLR_DEVICE bool give_up(M& m, const Call& c, uint32_t failure, int about) {
  const uint64_t what = report(failure, c.rank, about);
  if (m.load_acquire(c.status) == 0) m.store_release(c.status, what);
  for (int peer = 0; peer < c.size; ++peer) {
    const bool ended = failure == kGone && peer == about;  // its memory may be gone with it
    if (!ended) m.store_release(&header(c, peer)->aborted, what);
  }
  return false;
}

template <class M>
FASTLR_DEVICE bool wait_for(M& m, const Call& c, int stage, int peer) {
  const Header* mine = header(c, c.rank);
  const uint64_t* flag = &mine->posted[c.parity][stage][peer][m.block()];
  const uint64_t began = m.now();
  for (;;) {
    const uint64_t seen = m.load_acquire(flag);
    if (uint32_t(seen >> 32) == c.number) {
      return uint32_t(seen) == c.signature || give_up(m, c, kMismatch, peer);
    }
    const uint64_t aborted = m.load_acquire(&mine->aborted);
    if (aborted != 0) {
      if (m.load_acquire(c.status) == 0) m.store_release(c.status, aborted);
      return false;
    }
    if (m.now() - began > c.limit) return give_up(m, c, kTimeout, peer);
    const uint32_t failure = m.relax(peer);
    if (failure == kFine) continue;
    if (failure == kGone && uint32_t(m.load_acquire(flag) >> 32) == c.number) continue;  // it came, then ended
    return give_up(m, c, failure, failure == kGone ? peer : c.rank);
  }
}

// Everything that this block has written is seen by the same block of every peer, and the other way round.
template <class M>
FASTLR_DEVICE bool meet(M& m, const Call& c, int stage) {
  m.sync();
  const uint64_t word = uint64_t(c.number) << 32 | c.signature;
  for (int peer = m.thread(); peer < c.size; peer += m.threads()) {
    m.fence();
    m.store_release(&header(c, peer)->posted[c.parity][stage][c.rank][m.block()], word);
  }
  bool fine = true;
  for (int peer = m.thread(); peer < c.size && fine; peer += m.threads()) fine = wait_for(m, c, stage, peer);
  return !m.any(!fine);
}

// A rank that has failed writes nothing more into its half: a peer that comes late may still read what it has posted.
template <class M>
FASTLR_DEVICE bool failed_before(M& m, const Call& c) {
  const uint64_t aborted = m.load_acquire(&header(c, c.rank)->aborted);
  if (aborted != 0 && m.load_acquire(c.status) == 0) m.store_release(c.status, aborted);
  return m.any(aborted != 0);
}

// --------------------------------------------------------------------------------------------------------- algorithms
// Small: everyone reads everything. (size - 1) * n read over the links by each rank, one rendezvous.
template <typename T, class M>
FASTLR_DEVICE bool one_shot(M& m, const Call& c) {
  const Shard all{0, c.count};
  bool fine = !failed_before(m, c);
  if (fine) {
    m.template stage<T>(c, all);
    fine = meet(m, c, 0);
  }
  if (fine) {
    m.template sum<T>(c, all, false);
  } else {
    m.template spoil<T>(c, all);
  }
  return fine;
}

// Everyone can read the shards that they add up.
template <typename T, class M>
FASTLR_DEVICE bool offer_shards(M& m, const Call& c) {
  if (failed_before(m, c)) return false;
  for (int s = 0; s < c.size; ++s) {
    if (s != c.rank) m.template stage<T>(c, shard<T>(c, s));
  }
  return meet(m, c, 0);
}

// Large: rank r sums shard r, then everyone fetches all shards. 2 * (size - 1) / size * n read, two rendezvous.
template <typename T, class M>
FASTLR_DEVICE bool two_shot(M& m, const Call& c) {
  bool fine = offer_shards<T>(m, c);
  if (fine) {
    m.template sum<T>(c, shard<T>(c, c.rank), true);
    fine = meet(m, c, 1);
  }
  for (int s = 0; s < c.size; ++s) {
    if (!fine) {
      m.template spoil<T>(c, shard<T>(c, s));
    } else if (s != c.rank) {
      m.template fetch<T>(c, s, shard<T>(c, s));
    }
  }
  return fine;
}

// ||sum over ranks||^2 without writing the sum: (size - 1) / size * n read. sums[block] is this block's part of it.
template <typename T, class M>
FASTLR_DEVICE bool sum_squared_norm(M& m, const Call& c) {
  bool fine = offer_shards<T>(m, c);
  if (fine) {
    const double part = m.template squares<T>(c, shard<T>(c, c.rank));
    for (int peer = m.thread(); peer < c.size; peer += m.threads()) {
      header(c, peer)->partial[c.parity][c.rank][m.block()] = part;
    }
    fine = meet(m, c, 1);
  }
  if (m.thread() == 0) {
    double total = 0;
    for (int r = 0; r < c.size; ++r) total += header(c, c.rank)->partial[c.parity][r][m.block()];
    const float nan = from_bits(0x7fc00000u);
    c.sums[m.block()] = fine ? total : double(nan);
  }
  return fine;
}

}  // namespace fastlr
