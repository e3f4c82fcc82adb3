// The protocol of csrc/ held to a plain sum, without a GPU: the kernels' own source run by a thread of the CPU for each
// thread of a block, and the twins over shared memory, with a thread for each rank. Built with sanitizers by
// tests/test_native.py. Prints what was checked; exit code 1 where something is wrong.
//
//     g++ -std=c++20 -O1 -g -fsanitize=thread -I csrc -pthread tests/native/check_reductions.cpp csrc/host_group.cpp
#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "host_group.h"
#include "plain.h"
#include "vector_loops.h"
#include "watch.h"

using namespace fastlr;

namespace {

// ------------------------------------------------------------------------------------------------ a GPU in slow motion
struct BlockOfThreads {
  explicit BlockOfThreads(int threads) : meeting(threads), numbers(threads) {}
  std::barrier<> meeting;
  std::atomic<int> said[2] = {0, 0};
  std::vector<double> numbers;
};

struct Thread : VectorLoops<Thread> {
  int thread_, threads_, block_, blocks_;
  BlockOfThreads* own;
  int asked = 0;

  int thread() const { return thread_; }
  int threads() const { return threads_; }
  int block() const { return block_; }
  int blocks() const { return blocks_; }
  void sync() const { own->meeting.arrive_and_wait(); }
  bool any(bool one) {
    std::atomic<int>& said = own->said[asked++ & 1];
    if (one) said = 1;
    sync();
    const bool found = said != 0;
    sync();
    said = 0;
    return found;
  }
  void fence() const { /* the atomics below order everything that a thread did before */ }
  uint64_t load_acquire(const uint64_t* p) const { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
  void store_release(uint64_t* p, uint64_t v) const { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
  uint64_t now() const { return uint64_t(std::chrono::steady_clock::now().time_since_epoch().count()); }
  uint64_t ended = 0;  // as Call's
  uint32_t relax(int peer) const {
    std::this_thread::yield();
    return ended >> peer & 1 ? kGone : kFine;
  }
  double total(double value) const {
    own->numbers[thread_] = value;
    sync();
    double sum = 0;
    for (double number : own->numbers) sum += number;
    sync();
    return sum;
  }
};

template <typename Work>
void launch(int blocks, int threads, Work work) {
  std::vector<std::unique_ptr<BlockOfThreads>> grid;
  for (int b = 0; b < blocks; ++b) grid.push_back(std::make_unique<BlockOfThreads>(threads));
  std::vector<std::thread> all;
  for (int b = 0; b < blocks; ++b) {
    for (int t = 0; t < threads; ++t) {
      all.emplace_back([&, b, t] {
        Thread m;
        m.thread_ = t, m.threads_ = threads, m.block_ = b, m.blocks_ = blocks, m.own = grid[b].get();
        work(m);
      });
    }
  }
  for (auto& each : all) each.join();
}

struct Pages {  // aligned, zero, so that what nobody wrote is seen
  explicit Pages(int64_t bytes) : data(static_cast<unsigned char*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096))) {
    std::memset(data, 0, (bytes + 4095) / 4096 * 4096);
  }
  ~Pages() { std::free(data); }
  unsigned char* data;
};

template <typename T>
void hold(const char* what, const std::vector<Plan>& plans, int size, const std::vector<std::vector<std::vector<T>>>& out,
          const std::vector<std::vector<double>>& norms) {
  for (size_t call = 0; call < plans.size(); ++call) {
    const Plan& plan = plans[call];
    const auto total = plain_sum<T>(plan, size, int(call));
    double norm = 0;
    for (float x : total) norm += double(x) * double(x);
    for (int r = 0; r < size; ++r) {
      bool right = true;
      if (plan.operation == Operation::kSquaredNorm) {
        right = std::abs(norms[r][call] - norm) <= 1e-13 * norm && norms[r][call] == norms[0][call];
      } else {
        for (int64_t i = 0; i < plan.count; ++i) {
          const float value = plan.operation == Operation::kMean ? total[i] / float(size) : total[i];
          right = right && same(out[r][call][i], T::store(value));
        }
      }
      expect(right, what, size, plan.count);
    }
  }
}

std::vector<Plan> plans() {
  std::vector<Plan> made;
  int k = 0;
  for (int64_t count : {1, 7, 8, 9, 63, 64, 257, 1000}) {
    for (auto operation : {Operation::kSum, Operation::kSquaredNorm, Operation::kMean}) {
      made.push_back({operation, k % 2 ? Algorithm::kOneShot : Algorithm::kTwoShot, count, k % 3});
      ++k;
    }
  }
  return made;
}

template <typename T>
Call call_of(const Plan& plan, const std::vector<unsigned char*>& segments, int64_t half, int rank, uint32_t number,
             T* data, uint64_t* status, double* sums) {
  const Job job{plan.operation, Dtype::kFloat32, data, data, plan.count};
  Call c = next_call<T>(job, {plan.algorithm, half, kMaxBlocks}, 0, segments.data(), rank, int(segments.size()), number, 20.0);
  c.status = status;
  c.sums = sums;
  return c;
}

template <typename T>
void run(Thread& m, const Call& c, const Plan& plan) {
  if (plan.operation == Operation::kSquaredNorm) {
    sum_squared_norm<T>(m, c);
  } else if (plan.algorithm == Algorithm::kOneShot) {
    one_shot<T>(m, c);
  } else {
    two_shot<T>(m, c);
  }
}

template <typename T>
void kernels_are_right(int size, int blocks, int threads) {
  const std::vector<Plan> all = plans();
  const int64_t half = 8192;
  std::vector<std::unique_ptr<Pages>> pages;
  std::vector<unsigned char*> segments;
  for (int r = 0; r < size; ++r) {
    pages.push_back(std::make_unique<Pages>(kHeaderBytes + 2 * half));
    segments.push_back(pages.back()->data);
  }
  std::vector<std::vector<std::vector<T>>> out(size, std::vector<std::vector<T>>(all.size()));
  std::vector<std::vector<double>> norms(size, std::vector<double>(all.size()));
  std::vector<std::thread> ranks;
  for (int r = 0; r < size; ++r) {
    ranks.emplace_back([&, r] {
      std::mt19937 random(r);
      uint64_t status = 0;
      for (size_t k = 0; k < all.size(); ++k) {
        const Plan& plan = all[k];
        Pages memory((plan.count + 16) * sizeof(T));
        T* data = reinterpret_cast<T*>(memory.data) + plan.offset;
        const auto values = drawn<T>(plan.count, r, int(k));
        std::memcpy(data, values.data(), plan.count * sizeof(T));
        std::memset(data + plan.count, 0x5a, 8 * sizeof(T));
        std::vector<double> sums(blocks);
        const Call c = call_of(plan, segments, half, r, uint32_t(k + 1), data, &status, sums.data());
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));  // nobody is in step
        launch(blocks, threads, [&](Thread& m) { run<T>(m, c, plan); });
        out[r][k].assign(data, data + plan.count);
        for (double sum : sums) norms[r][k] += sum;
        bool kept = status == 0;
        for (size_t b = 0; b < 8 * sizeof(T); ++b) {
          kept = kept && reinterpret_cast<unsigned char*>(data + plan.count)[b] == 0x5a;
        }
        expect(kept, "memory beyond the tensor", size, plan.count);
      }
    });
  }
  for (auto& each : ranks) each.join();
  hold(sizeof(T) == 2 ? "kernels, bfloat16" : "kernels, float32", all, size, out, norms);
}

// One rank never comes, or calls something else: the others say so within the limit, and their results are NaN.
void kernels_fail_well(Failure failure) {
  const int size = 3;
  const int64_t half = 8192, count = 300;
  for (const Plan& plan : {Plan{Operation::kSum, Algorithm::kOneShot, count, 0},
                           Plan{Operation::kSum, Algorithm::kTwoShot, count, 1},
                           Plan{Operation::kSquaredNorm, Algorithm::kTwoShot, count, 0}}) {
    std::vector<std::unique_ptr<Pages>> pages;
    std::vector<unsigned char*> segments;
    for (int r = 0; r < size; ++r) {
      pages.push_back(std::make_unique<Pages>(kHeaderBytes + 2 * half));
      segments.push_back(pages.back()->data);
    }
    std::vector<std::thread> ranks;
    std::vector<std::vector<Float32>> data(size, std::vector<Float32>(count + 4, Float32{1.0f}));
    std::vector<std::vector<double>> sums(size, std::vector<double>(2, 0.0));
    std::vector<uint64_t> status(size, 0);
    const auto began = std::chrono::steady_clock::now();
    for (int r = 0; r < size; ++r) {
      if ((failure == kTimeout || failure == kGone) && r == 2) continue;
      ranks.emplace_back([&, r] {
        Call c = call_of(plan, segments, half, r, 1, data[r].data() + plan.offset, &status[r], sums[r].data());
        if (failure == kTimeout) c.limit = 50'000'000;
        if (failure == kMismatch && r == 2) c.signature ^= 1;
        launch(2, 4, [&](Thread& m) {
          m.ended = failure == kGone ? 1u << 2 : 0;
          run<Float32>(m, c, plan);
        });
      });
    }
    for (auto& each : ranks) each.join();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    expect(seconds < 5, "the limit of a wait", size, count);
    for (int r = 0; r < 2; ++r) {
      const auto about = uint32_t(status[r] >> 32);
      expect(about == uint32_t(failure), "what a rank reports", size, count);
      expect(failure != kGone || int(status[r] & 0xffff) == 2, "who has ended", size, count);
      bool spoilt = true;
      for (int64_t i = 0; i < count; ++i) spoilt = spoilt && std::isnan(data[r][i + plan.offset].value);
      if (plan.operation == Operation::kSquaredNorm) spoilt = std::isnan(sums[r][0]) && std::isnan(sums[r][1]);
      expect(spoilt, "results after a failure", size, count);
      const int64_t bytes = kHeaderBytes + 2 * half;
      const std::vector<unsigned char> before(segments[r] + kHeaderBytes, segments[r] + bytes);
      std::fill(data[r].begin(), data[r].end(), Float32{7.0f});  // in the same half as the call that failed
      const Call c = call_of(plan, segments, half, r, 3, data[r].data() + plan.offset, &status[r], sums[r].data());
      launch(2, 4, [&](Thread& m) { run<Float32>(m, c, plan); });
      expect(std::equal(before.begin(), before.end(), segments[r] + kHeaderBytes), "a half after a failure", size, count);
      const float first = plan.operation == Operation::kSquaredNorm ? float(sums[r][0]) : data[r][plan.offset].value;
      expect(std::isnan(first), "a call after a failure", size, count);
    }
    const double all_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    expect(all_seconds < 8, "how soon a call after a failure ends", size, count);
  }
}

// A peer that posts and ends between a look at its flag and the question whether it lives has come.
struct Late {
  uint64_t* flag;
  uint64_t word;
  int asked = 0;
  int block() const { return 0; }
  uint64_t now() const { return 0; }
  uint64_t load_acquire(const uint64_t* p) const { return *p; }
  void store_release(uint64_t* p, uint64_t v) const { *p = v; }
  uint32_t relax(int) {
    ++asked;
    *flag = word;
    return kGone;
  }
};

void who_came_and_ended_has_come() {
  Pages mine(kHeaderBytes + 8192), peers(kHeaderBytes + 8192);
  uint64_t status = 0;
  Float32 data[8] = {};
  const Plan plan{Operation::kSum, Algorithm::kOneShot, 8, 0};
  const Call c = call_of(plan, {mine.data, peers.data}, 4096, 0, 1, data, &status, static_cast<double*>(nullptr));
  Late m{&header(c, 0)->posted[c.parity][0][1][0], uint64_t(c.number) << 32 | c.signature};
  expect(wait_for(m, c, 0, 1) && m.asked == 1 && status == 0, "a peer that came, then ended", 2, 8);
}

void processes_are_watched() {
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  uint64_t ended = 0;
  const auto seen = [&ended] { return __atomic_load_n(&ended, __ATOMIC_ACQUIRE); };
  Watch watch;
  watch.start({getpid(), child}, &ended);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  expect(seen() == 0, "processes that live", 2, 0);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  for (int k = 0; k < 500 && seen() == 0; ++k) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  expect(seen() == 2, "a process that has ended", 2, 0);
  watch.stop();
}

// ------------------------------------------------------------------------------------------------ twins over memory
template <typename T>
void twins_are_right(int size) {
  std::vector<Plan> all = plans();
  for (int64_t count : {5000, 20001}) {  // several chunks
    all.push_back({Operation::kSum, Algorithm::kOneShot, count, 0});
    all.push_back({Operation::kMean, Algorithm::kTwoShot, count, 1});
    all.push_back({Operation::kSquaredNorm, Algorithm::kTwoShot, count, 1});
  }
  const Dtype dtype = sizeof(T) == 2 ? Dtype::kBfloat16 : Dtype::kFloat32;
  std::vector<std::unique_ptr<HostGroup>> groups;
  std::vector<std::string> addresses;
  for (int r = 0; r < size; ++r) {
    groups.push_back(std::make_unique<HostGroup>(r, size, 4096, 20.0));
    addresses.push_back(groups.back()->address());
  }
  for (auto& group : groups) group->open(addresses);
  for (auto& group : groups) group->seal();
  std::vector<std::vector<std::vector<T>>> out(size, std::vector<std::vector<T>>(all.size()));
  std::vector<std::vector<double>> norms(size, std::vector<double>(all.size()));
  std::vector<std::thread> ranks;
  for (int r = 0; r < size; ++r) {
    ranks.emplace_back([&, r] {
      const Idle idle = [] { return true; };
      for (size_t k = 0; k < all.size(); ++k) {
        const Plan& plan = all[k];
        std::vector<T> data(plan.count + plan.offset);
        const auto values = drawn<T>(plan.count, r, int(k));
        std::copy(values.begin(), values.end(), data.begin() + plan.offset);
        T* at = data.data() + plan.offset;
        norms[r][k] = groups[r]->reduce({plan.operation, dtype, at, at, plan.count}, plan.algorithm, idle);
        out[r][k].assign(at, at + plan.count);
      }
    });
  }
  for (auto& each : ranks) each.join();
  hold(sizeof(T) == 2 ? "twins, bfloat16" : "twins, float32", all, size, out, norms);
}

void twins_fail_well() {
  HostGroup one(0, 2, 4096, 0.05), other(1, 2, 4096, 0.05);
  const std::vector<std::string> addresses = {one.address(), other.address()};
  one.open(addresses);
  std::vector<Float32> data(10, Float32{1.0f});
  const auto thrown = [&](HostGroup& group, const Idle& idle) {
    try {
      group.reduce({Operation::kSum, Dtype::kFloat32, data.data(), data.data(), 10}, Algorithm::kAuto, idle);
    } catch (const GroupError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  expect(thrown(other, [] { return true; }).find("open()") != std::string::npos, "a group that is not open", 2, 10);
  expect(thrown(one, [] { return true; }).find("rank 1 did not arrive") == 0, "a rank that does not come", 2, 10);
  expect(std::isnan(data[3].value), "the result then", 2, 10);
  expect(thrown(one, [] { return true; }).find("failed before") != std::string::npos, "a call after that", 2, 10);
  other.open(addresses);
  expect(thrown(other, [] { return true; }).find("(noticed by rank 0)") != std::string::npos, "the other rank", 2, 10);
  expect(std::isnan(data[3].value), "what it would have got of a rank that gave up", 2, 10);
  bool refused = false;
  HostGroup third(1, 2, 4096, 1.0);
  try {
    std::vector<std::string> wrong = addresses;
    wrong[0].back() = wrong[0].back() == '1' ? '2' : '1';
    third.open(wrong);
  } catch (const GroupError&) {
    refused = true;
  }
  expect(refused, "an address of something else", 2, 0);
}

void rounding_is_right() {
  for (uint64_t k = 0; k < (1u << 20); ++k) {  // every sign and exponent, with all kinds of endings
    const uint32_t bits = uint32_t(k * 4099u + (k << 12));
    const float value = from_bits(bits);
    const float rounded = Bfloat16::load(Bfloat16::store(value));
    if (std::isnan(value)) {
      expect(std::isnan(rounded), "rounding of NaN", 1, bits);
      continue;
    }
    const float below = from_bits(bits & 0xffff0000u), above = from_bits((bits & 0xffff0000u) + 0x10000u);
    const double down = std::abs(double(value) - below), up = std::abs(double(above) - value);
    const bool even = (bits >> 16 & 1) == 0;
    const float nearest = std::isinf(above) ? rounded : down < up || (down == up && even) ? below : above;
    expect(same(rounded, nearest), "rounding", 1, bits);
  }
}

}  // namespace

int main() {
  processes_are_watched();  // first, as it forks
  for (int size : {2, 3, 8}) {
    kernels_are_right<Bfloat16>(size, 2, size == 8 ? 8 : 5);
    kernels_are_right<Float32>(size, 3, size == 8 ? 8 : 4);
    twins_are_right<Bfloat16>(size);
    twins_are_right<Float32>(size);
  }
  kernels_fail_well(kTimeout);
  kernels_fail_well(kMismatch);
  kernels_fail_well(kGone);
  who_came_and_ended_has_come();
  twins_fail_well();
  rounding_is_right();
  std::printf("%d checks, %d wrong\n", checked.load(), failures.load());
  return failures == 0 ? 0 : 1;
}
