#include "host_group.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>

#include "watch.h"

namespace fastlr {
namespace {

// Above this many bytes, reading everything everywhere costs more than a second rendezvous. (Measured on two cores.)
constexpr int64_t kOneShotBytes = 16 << 10;
constexpr int64_t kBlock = 1024;  // elements summed at a time: their floats stay in the first cache
constexpr int kSpins = 64, kYields = 2000;
constexpr uint64_t kIdleEvery = 20'000'000;  // nanoseconds

[[noreturn]] void fail(const std::string& what) { throw GroupError(what + ": " + std::strerror(errno)); }

uint64_t nanoseconds() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return uint64_t(t.tv_sec) * 1'000'000'000u + uint64_t(t.tv_nsec);
}

std::atomic<uint64_t>& atomic(const uint64_t* p) {
  static_assert(sizeof(std::atomic<uint64_t>) == sizeof(uint64_t) && std::atomic<uint64_t>::is_always_lock_free);
  return *reinterpret_cast<std::atomic<uint64_t>*>(const_cast<uint64_t*>(p));
}

// The loops, over kBlock elements at most; T::load and T::store are plain arithmetic, so compilers vectorise them.
template <typename T>
void add_up(const Call& c, int64_t begin, int64_t n, float* __restrict total) {
  for (int r = 0; r < c.size; ++r) {
    const T* __restrict from = (r == c.rank ? static_cast<const T*>(c.in) : staged<T>(c, r)) + begin;
    if (r == 0) {
      for (int64_t i = 0; i < n; ++i) total[i] = T::load(from[i]);
    } else {
      for (int64_t i = 0; i < n; ++i) total[i] += T::load(from[i]);
    }
  }
}

// One thread block of one thread: a process. See meet() for what is asked of a machine.
struct Process {
  const Idle& idle;
  const int* process;  // id of every rank's
  int polls = 0;
  uint64_t asked = nanoseconds();

  int thread() const { return 0; }
  int threads() const { return 1; }
  int block() const { return 0; }
  void sync() const {}
  bool any(bool one) {
    polls = 0;
    return one;
  }
  void fence() const {}  // one thread: what it did before a release is seen after the acquire
  uint64_t load_acquire(const uint64_t* p) const { return atomic(p).load(std::memory_order_acquire); }
  void store_release(uint64_t* p, uint64_t v) const { atomic(p).store(v, std::memory_order_release); }
  uint64_t now() const { return nanoseconds(); }

  uint32_t relax(int peer) {
    if (++polls < kSpins) return kFine;
    if (polls < kYields) {
      sched_yield();
      return kFine;
    }
    const timespec pause{0, 50'000};
    nanosleep(&pause, nullptr);
    const uint64_t t = nanoseconds();
    if (t - asked < kIdleEvery) return kFine;
    asked = t;
    if (has_ended(process[peer])) return kGone;
    return idle() ? kFine : kInterrupted;
  }

  template <typename T>
  void stage(const Call& c, Shard s) {
    if (s.end > s.begin) {
      memcpy(staged<T>(c, c.rank) + s.begin, static_cast<const T*>(c.in) + s.begin, (s.end - s.begin) * sizeof(T));
    }
  }
  template <typename T>
  void fetch(const Call& c, int owner, Shard s) {
    if (s.end > s.begin) {
      memcpy(static_cast<T*>(c.out) + s.begin, staged<T>(c, owner) + s.begin, (s.end - s.begin) * sizeof(T));
    }
  }
  template <typename T>
  void sum(const Call& c, Shard s, bool keep) {
    alignas(64) float total[kBlock];
    for (int64_t begin = s.begin; begin < s.end; begin += kBlock) {
      const int64_t n = std::min(kBlock, s.end - begin);
      add_up<T>(c, begin, n, total);
      if (c.divisor != 1.0f) {
        for (int64_t i = 0; i < n; ++i) total[i] /= c.divisor;
      }
      T* out = static_cast<T*>(c.out) + begin;
      for (int64_t i = 0; i < n; ++i) out[i] = T::store(total[i]);
      if (keep) memcpy(staged<T>(c, c.rank) + begin, out, n * sizeof(T));
    }
  }
  template <typename T>
  void spoil(const Call& c, Shard s) {
    for (int64_t i = s.begin; i < s.end; ++i) {
      static_cast<T*>(c.out)[i] = T::store(std::numeric_limits<float>::quiet_NaN());
    }
  }
  template <typename T>
  double squares(const Call& c, Shard s) {
    constexpr int kLanes = 8;
    alignas(64) float total[kBlock];
    alignas(64) double lanes[kLanes] = {};
    for (int64_t begin = s.begin; begin < s.end; begin += kBlock) {
      const int64_t n = std::min(kBlock, s.end - begin);
      add_up<T>(c, begin, n, total);
      for (int64_t i = n; i < (n + kLanes - 1) / kLanes * kLanes; ++i) total[i] = 0;
      for (int64_t i = 0; i < n; i += kLanes) {
        for (int k = 0; k < kLanes; ++k) lanes[k] += double(total[i + k]) * double(total[i + k]);
      }
    }
    double sum = 0;
    for (double lane : lanes) sum += lane;
    return sum;
  }
};

}  // namespace

HostGroup::HostGroup(int rank, int size, int64_t half_bytes, double timeout)
    : rank_(rank), size_(size), half_bytes_((half_bytes + 4095) / 4096 * 4096), timeout_(timeout), segments_(size), processes_(size) {
  std::random_device random;
  const std::string name = "/fastlr-" + std::to_string(getpid()) + "-" + std::to_string(random());
  descriptor_ = shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (descriptor_ < 0) fail("cannot make shared memory");
  shm_unlink(name.c_str());
  // Reserve the pages now: a full /dev/shm is an error here and would be a crash later.
  int error = posix_fallocate(descriptor_, 0, bytes());
  void* data = MAP_FAILED;
  if (error == 0) {
    data = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
    error = errno;
  }
  if (data == MAP_FAILED) {
    close(descriptor_);
    errno = error;
    fail("cannot reserve " + std::to_string(bytes() >> 20) + " MiB of shared memory");
  }
  segments_[rank] = static_cast<unsigned char*>(data);
  processes_[rank] = getpid();
  reinterpret_cast<Header*>(data)->token = uint64_t(random()) << 32 | random();
}

HostGroup::~HostGroup() {
  for (unsigned char* segment : segments_) {
    if (segment != nullptr) munmap(segment, bytes());
  }
  seal();
}

void HostGroup::seal() {
  if (descriptor_ >= 0) close(descriptor_);
  descriptor_ = -1;
}

std::string HostGroup::address() const {
  if (descriptor_ < 0) throw GroupError("the segment is sealed");
  const uint64_t token = reinterpret_cast<Header*>(segments_[rank_])->token;
  return std::to_string(processes_[rank_]) + " " + std::to_string(descriptor_) + " " + std::to_string(token);
}

void HostGroup::open(const std::vector<std::string>& addresses) {
  if (int(addresses.size()) != size_) throw ArgumentError("one address for each rank is needed");
  for (int r = 0; r < size_; ++r) {
    if (segments_[r] != nullptr) continue;
    int process = 0, descriptor = 0;
    unsigned long long token = 0;
    if (sscanf(addresses[r].c_str(), "%d %d %llu", &process, &descriptor, &token) != 3) {
      throw ArgumentError("not an address of shared memory: " + addresses[r]);
    }
    const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(descriptor);
    const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) fail("cannot reach the memory of rank " + std::to_string(r) + " at " + path);
    struct stat found {};
    void* data = MAP_FAILED;
    if (fstat(file, &found) == 0 && S_ISREG(found.st_mode) && found.st_size == bytes()) {
      data = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    }
    close(file);
    if (data == MAP_FAILED || reinterpret_cast<Header*>(data)->token != token) {
      if (data != MAP_FAILED) munmap(data, bytes());
      throw GroupError(path + " is not the memory of rank " + std::to_string(r) + " (another container?)");
    }
    segments_[r] = static_cast<unsigned char*>(data);
    processes_[r] = process;
  }
}

template <typename T>
double HostGroup::run(const Job& job, Algorithm algorithm, const Idle& idle) {
  const std::lock_guard<std::mutex> lock(one_at_a_time_);
  if (status_ != 0) throw GroupError("this group has failed before: " + explain(status_, rank_, timeout_));
  for (const unsigned char* segment : segments_) {
    if (segment == nullptr) throw GroupError("open() has not been called");
  }
  if (algorithm == Algorithm::kAuto) {
    algorithm = job.count * int64_t(sizeof(T)) <= kOneShotBytes ? Algorithm::kOneShot : Algorithm::kTwoShot;
  }
  double total = 0, part = 0;
  const Way way{algorithm, half_bytes_, 1};
  for (int64_t begin = 0; begin < job.count; begin += capacity(half_bytes_, size_, sizeof(T))) {
    Call c = next_call<T>(job, way, begin, segments_.data(), rank_, size_, ++number_, timeout_);
    c.status = &status_;
    c.sums = &part;
    Process m{idle, processes_.data()};
    bool fine;
    if (job.operation == Operation::kSquaredNorm) {
      fine = sum_squared_norm<T>(m, c);
      total += part;
    } else {
      fine = algorithm == Algorithm::kOneShot ? one_shot<T>(m, c) : two_shot<T>(m, c);
    }
    if (!fine) throw GroupError(explain(status_, rank_, timeout_));
  }
  return total;
}

double HostGroup::reduce(const Job& job, Algorithm algorithm, const Idle& idle) {
  return job.dtype == Dtype::kBfloat16 ? run<Bfloat16>(job, algorithm, idle) : run<Float32>(job, algorithm, idle);
}

}  // namespace fastlr
