// The host side of the extension's GPU part, csrc/device_group.cu, in several processes without a GPU: over the stand-in of
// the CUDA runtime in stand_in/, with the kernels' own bodies. Built and run by tests/distributed/test_native.py. Prints
// what was checked; exit code 1 where something is wrong. With "quick": two ranks, few sizes.
//
//     g++ -std=c++20 -O1 -I tests/native/stand_in -I csrc -pthread tests/native/check_device_group.cpp
//         tests/native/stand_in/runtime.cpp csrc/host_group.cpp -x c++ csrc/device_group.cu
#include <cuda_runtime.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "device_group.h"
#include "host_group.h"
#include "plain.h"

using namespace fastlr;

namespace {

constexpr int64_t kHalf = 4096;
constexpr int kCalls = 128;

// ---------------------------------------------------------------------------------------------------------- processes
struct Board {  // memory of all processes of a check
  std::atomic<int> arrived, checked;
  char address[kMaxRanks][256];
  size_t length[kMaxRanks];
  double norm[kMaxRanks][kCalls];
};

struct Rank {
  int rank, size;
  Board* board;

  void meet(int times) const {  // the times-th meeting of all ranks
    ++board->arrived;
    while (board->arrived < times * size) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::vector<std::string> share(const std::string& address, int times) const {
    std::memcpy(board->address[rank], address.data(), address.size());
    board->length[rank] = address.size();
    meet(times);
    std::vector<std::string> all;
    for (int r = 0; r < size; ++r) all.emplace_back(board->address[r], board->length[r]);
    return all;
  }
};

// A process for each rank. One that is killed by this check is no failure, one that hangs is.
void in_processes(const char* what, int size, const std::function<void(const Rank&)>& work, int killed = -1) {
  void* shared = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  Board* board = new (shared) Board{};
  std::fflush(stdout);
  std::vector<pid_t> ranks;
  for (int r = 0; r < size; ++r) {
    ranks.push_back(fork());
    if (ranks.back() != 0) continue;
    alarm(60);
    failures = checked = 0;
    work({r, size, board});
    board->checked += checked;
    std::fflush(stdout);
    _exit(failures != 0);
  }
  for (int left = size; left > 0; --left) {
    int status = 0;
    const pid_t ended = waitpid(-1, &status, 0);
    const bool meant = killed >= 0 && ended == ranks[killed];
    expect(meant ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL : status == 0, what, size, status);
  }
  checked += board->checked;
  munmap(shared, sizeof(Board));
}

std::unique_ptr<DeviceGroup> opened(const Rank& self, double timeout, int64_t half = kHalf) {
  auto group = std::make_unique<DeviceGroup>(self.rank, self.size, 0, half, timeout);
  group->open(self.share(group->address(), 1));
  self.meet(2);
  return group;
}

// -------------------------------------------------------------------------------------------------------- what is told
template <typename Call>
std::string thrown(Call call) {
  try {
    call();
  } catch (const GroupError& error) {
    return error.what();
  } catch (const ArgumentError& error) {
    return std::string("argument: ") + error.what();
  }
  return "";
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

void says(const std::string& text, const std::string& part) {
  expect(has(text, part), part.c_str(), 0, 0);
  if (!has(text, part)) std::printf("  but: '%s'\n", text.c_str());
}

double seconds_of(const std::function<void()>& work) {
  const auto began = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

// ----------------------------------------------------------------------------------------------------------- a tensor
template <typename T>
struct Tensor {
  int64_t count;
  T* all = nullptr;
  T* data;
  Tensor(const std::vector<T>& values, int offset) : count(int64_t(values.size())) {
    cudaMalloc(reinterpret_cast<void**>(&all), (count + offset + 8) * sizeof(T));
    data = all + offset;
    std::copy(values.begin(), values.end(), data);
    std::memset(data + count, 0x5a, 8 * sizeof(T));
  }
  ~Tensor() { cudaFree(all); }
  Job job(Operation operation) const {
    const Dtype dtype = sizeof(T) == 2 ? Dtype::kBfloat16 : Dtype::kFloat32;
    return {operation, dtype, data, operation == Operation::kSquaredNorm ? nullptr : data, count};
  }
  bool kept_beyond() const {
    const auto* end = reinterpret_cast<const unsigned char*>(data + count);
    for (size_t b = 0; b < 8 * sizeof(T); ++b) {
      if (end[b] != 0x5a) return false;
    }
    return true;
  }
  bool spoilt() const {
    for (int64_t i = 0; i < count; ++i) {
      if (!std::isnan(T::load(data[i]))) return false;
    }
    return true;
  }
};

Tensor<Float32> ones(int64_t count) { return {std::vector<Float32>(count, Float32{1.0f}), 0}; }

// ----------------------------------------------------------------------------------------------------------- right sums
std::vector<Plan> plans(bool quick) {
  std::vector<int64_t> counts = {0, 1, 7, 64, 5000};  // the last in several chunks
  if (!quick) counts.insert(counts.end(), {8, 9, 257, 1000, 1024, 20001});
  std::vector<Plan> made;
  for (int64_t count : counts) {
    for (auto operation : {Operation::kSum, Operation::kSquaredNorm, Operation::kMean}) {
      const int k = int(made.size());
      const Algorithm algorithms[] = {Algorithm::kOneShot, Algorithm::kTwoShot, Algorithm::kAuto};
      made.push_back({operation, operation == Operation::kSquaredNorm ? Algorithm::kTwoShot : algorithms[k / 3 % 3],
                      count, k % 3});
    }
  }
  return made;
}

template <typename T>
void one_call(const Rank& self, const Plan& plan, int k, DeviceGroup& group, HostGroup& host, cudaStream_t stream) {
  const auto values = drawn<T>(plan.count, self.rank, k);
  Tensor<T> tensor(values, plan.offset);
  Tensor<double> norm({0.0}, 0);
  group.reduce(tensor.job(plan.operation), plan.algorithm, norm.data, stream);
  cudaStreamSynchronize(stream);
  group.check();
  auto twin = values;
  const Dtype dtype = tensor.job(plan.operation).dtype;
  const double twins = host.reduce({plan.operation, dtype, twin.data(), twin.data(), plan.count}, Algorithm::kAuto,
                                   [] { return true; });
  const auto total = plain_sum<T>(plan, self.size, k);
  double sum = 0;
  for (float x : total) sum += double(x) * double(x);
  self.board->norm[self.rank][k] = norm.data[0];
  bool right = true;
  for (int64_t i = 0; i < plan.count; ++i) {
    const float value = plan.operation == Operation::kMean ? total[i] / float(self.size) : total[i];
    const T expected = plan.operation == Operation::kSquaredNorm ? values[i] : T::store(value);
    right = right && same(tensor.data[i], expected) && same(tensor.data[i], twin[i]);
  }
  if (plan.operation == Operation::kSquaredNorm) {
    right = right && std::abs(norm.data[0] - sum) <= 1e-13 * sum && std::abs(twins - sum) <= 1e-13 * sum;
  }
  expect(right, sizeof(T) == 2 ? "a sum, bfloat16" : "a sum, float32", self.size, plan.count);
  expect(tensor.kept_beyond(), "memory beyond the tensor", self.size, plan.count);
}

template <typename T>
void sums_are_right(const Rank& self, bool quick) {
  cudaSetDevice(1);  // of the caller: the group's is 0
  auto group = opened(self, 20);
  HostGroup host(self.rank, self.size, 1 << 20, 20);
  host.open(self.share(host.address(), 3));
  self.meet(4);
  host.seal();
  cudaStream_t streams[2] = {nullptr, nullptr};
  cudaStreamCreate(&streams[1]);
  const auto all = plans(quick);
  std::mt19937 random(self.rank);
  for (size_t k = 0; k < all.size(); ++k) {
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));  // nobody is in step
    one_call<T>(self, all[k], int(k), *group, host, streams[k % 2]);
  }
  self.meet(5);
  for (size_t k = 0; k < all.size(); ++k) {
    const bool same_everywhere = self.board->norm[self.rank][k] == self.board->norm[0][k];
    expect(same_everywhere || all[k].operation != Operation::kSquaredNorm, "a norm's bits", self.size, all[k].count);
  }
  int device = -1;
  cudaGetDevice(&device);
  expect(device == 1, "the caller's device", self.size, 0);
  group->disconnect();
  self.meet(6);
  group->close();
  expect(stand_in::held() == 0, "what is held after close()", self.size, stand_in::held());
}

// Calls queued at once, on two streams by turns: each works on what the one before has left.
void calls_follow_each_other(const Rank& self) {
  auto group = opened(self, 20);
  cudaStream_t streams[2] = {nullptr, nullptr};
  cudaStreamCreate(&streams[1]);
  Tensor<Float32> tensor = ones(3000);
  for (int k = 0; k < 6; ++k) group->reduce(tensor.job(Operation::kSum), Algorithm::kAuto, nullptr, streams[k % 2]);
  cudaDeviceSynchronize();
  group->check();
  bool right = true;
  for (int64_t i = 0; i < tensor.count; ++i) right = right && tensor.data[i].value == std::pow(float(self.size), 6.0f);
  expect(right, "six calls in a row", self.size, tensor.count);
}

// ---------------------------------------------------------------------------------------------------------- wrong calls
struct Different {
  const char* about;
  Job (*job)(const Tensor<Float32>&, bool odd);
  Algorithm algorithm, odd_algorithm;
  int64_t odd_half;
  int odd_blocks;  // 0: as many as fit
};

template <Operation kOdd, Dtype kOddType, int64_t kFewer>
Job differing(const Tensor<Float32>& tensor, bool odd) {
  Job job = tensor.job(Operation::kSum);
  if (!odd) return job;
  job.operation = kOdd;
  job.dtype = kOddType;
  job.count -= kFewer;
  return job;
}

constexpr auto kAlike = differing<Operation::kSum, Dtype::kFloat32, 0>;
constexpr auto kOne = Algorithm::kOneShot, kTwo = Algorithm::kTwoShot;
constexpr Different kDifferences[] = {
    {"fewer elements", differing<Operation::kSum, Dtype::kFloat32, 1>, kOne, kOne, kHalf, 0},
    {"a whole chunk less", differing<Operation::kSum, Dtype::kFloat32, 2000>, kTwo, kTwo, kHalf, 0},
    {"a mean for a sum", differing<Operation::kMean, Dtype::kFloat32, 0>, kTwo, kTwo, kHalf, 0},
    {"another type", differing<Operation::kSum, Dtype::kBfloat16, 0>, kOne, kOne, kHalf, 0},
    {"another algorithm", kAlike, kOne, kTwo, kHalf, 0},
    {"another half", kAlike, kOne, kOne, 2 * kHalf, 0},
    {"fewer blocks", kAlike, kOne, kOne, kHalf, 1},
};

void differences_are_told(const Rank& self, const Different& different) {
  const bool odd = self.rank == self.size - 1;
  auto group = opened(self, 5, odd ? different.odd_half : kHalf);
  if (odd && different.odd_blocks != 0) group->limit_blocks(different.odd_blocks);
  Tensor<Float32> tensor = ones(3000);
  const double took = seconds_of([&] {
    group->reduce(different.job(tensor, odd), odd ? different.odd_algorithm : different.algorithm, nullptr, nullptr);
    cudaDeviceSynchronize();
  });
  const std::string said = thrown([&] { group->check(); });
  expect(has(said, "called different reductions"), different.about, self.size, tensor.count);
  expect(took < 4, "how soon a difference is told", self.size, tensor.count);
  expect(odd || tensor.spoilt(), "what is left of the tensor", self.size, tensor.count);
  self.meet(3);
}

void wrong_uses_are_told() {
  DeviceGroup group(0, 2, 0, kHalf, 1);
  Tensor<Float32> tensor = ones(10);
  const auto reduce = [&] { group.reduce(tensor.job(Operation::kSum), Algorithm::kAuto, nullptr, nullptr); };
  says(thrown(reduce), "open() has not been called");
  says(thrown([&] { group.open({group.address()}); }), "argument: one address for each rank");
  says(thrown([&] { group.open({group.address(), "nonsense"}); }), "argument: not a CUDA IPC handle");
  std::string gone = group.address();
  gone.replace(0, 64, std::string("999999 5").append(56, '\0'));
  says(thrown([&] { group.open({group.address(), gone}); }), "cannot reach the memory of rank 1: invalid argument");
  says(thrown([&] { group.limit_blocks(0); }), "argument: blocks must be from 1 to 3");
  says(thrown([&] { group.limit_blocks(4); }), "argument: blocks must be from 1 to 3");
  group.close();
  says(thrown(reduce), "the group is closed");
  says(thrown([&] { group.open({gone, gone}); }), "the group is closed");
  says(thrown([&] { group.address(); }), "the group is closed");
  group.close();
  says(thrown([] { DeviceGroup(0, 2, 7, kHalf, 1); }), "cannot use CUDA device 7: invalid argument");
}

// ---------------------------------------------------------------------------------------------------- calls that fail
struct Fault {
  const char* call;
  int nth;
  const char* says;
};

constexpr Fault kAtStart[] = {
    {"cudaGetDevice", 1, "no CUDA device: unknown error"},
    {"cudaSetDevice", 1, "cannot use CUDA device 0"},
    {"cudaDeviceGetAttribute", 1, "no device attributes"},
    {"cudaMalloc", 1, "no memory for the staging buffer"},
    {"cudaMemset", 1, "cannot clear the header"},
    {"cudaMalloc", 2, "no memory for sums"},
    {"cudaHostAlloc", 1, "no pinned memory"},
    {"cudaHostGetDevicePointer", 1, "pinned memory is not mapped"},
    {"cudaEventCreateWithFlags", 1, "no event"},
    {"cudaDeviceSynchronize", 1, "the device failed"},
};

void failures_at_the_start_are_told() {
  for (const Fault& fault : kAtStart) {
    cudaSetDevice(1);
    stand_in::fail(fault.call, fault.nth);
    says(thrown([] { DeviceGroup(0, 2, 0, kHalf, 1); }), fault.says);
    int device = -1;
    cudaGetDevice(&device);
    expect(stand_in::held() == 0, fault.says, 1, stand_in::held());
    expect(cudaGetLastError() == cudaSuccess, "an error left for others", 1, 0);
    expect(device == 1, "the caller's device", 1, device);
  }
  DeviceGroup group(0, 2, 0, kHalf, 1);
  stand_in::fail("cudaIpcGetMemHandle", 1);
  says(thrown([&] { group.address(); }), "the device cannot share memory between processes");
  group.close();
  expect(stand_in::held() == 0, "what is held after close()", 1, stand_in::held());
}

constexpr Fault kBeforeAnyKernel[] = {
    {"cudaGetDevice", 1, "no CUDA device"},
    {"cudaSetDevice", 1, "cannot use CUDA device 0"},
    {"cudaStreamIsCapturing", 1, "the stream failed"},
    {"cudaStreamWaitEvent", 1, "the call before failed"},
};

// Rank 0 fails in calls of its own. Before it has queued a kernel, a second try works; after that the group is at its end.
void failures_of_calls_are_told(const Rank& self, const Fault& last) {
  auto group = opened(self, 1);
  Tensor<Float32> tensor = ones(3000);
  const auto reduce = [&] { group->reduce(tensor.job(Operation::kSum), Algorithm::kAuto, nullptr, nullptr); };
  if (self.rank == 0) {
    for (const Fault& fault : kBeforeAnyKernel) {
      stand_in::fail(fault.call, fault.nth);
      says(thrown(reduce), fault.says);
    }
    stand_in::pretend_capture(true);
    says(thrown(reduce), "argument: reductions cannot be captured");
    stand_in::pretend_capture(false);
  }
  reduce();
  cudaDeviceSynchronize();
  group->check();
  expect(tensor.data[2999].value == float(self.size), "a call after those that failed", self.size, 3000);
  self.meet(3);
  if (self.rank == 0) {
    stand_in::fail(last.call, last.nth);
    says(thrown(reduce), last.says);
    says(thrown(reduce), std::string("the group has failed before: ") + last.says);
    says(thrown([&] { group->check(); }), std::string("the group has failed before: ") + last.says);
  } else {
    const double took = seconds_of([&] {
      reduce();
      cudaDeviceSynchronize();
    });
    expect(took < 3, "how soon the others end", self.size, 3000);
    if (has(last.call, "Launch")) says(thrown([&] { group->check(); }), "rank 0 did not arrive at a reduction within 1 s");
  }
  self.meet(4);
}

// ------------------------------------------------------------------------------------------------------- ranks that die
// The others are queueing several chunks, and the next call, when they find it out.
void the_end_of_a_rank_is_told(const Rank& self, bool ends, double limit) {
  auto group = opened(self, limit);
  Tensor<Float32> tensor = ones(3000);
  const auto reduce = [&] { group->reduce(tensor.job(Operation::kSum), Algorithm::kTwoShot, nullptr, nullptr); };
  reduce();
  cudaDeviceSynchronize();
  group->check();
  self.meet(3);
  if (self.rank == self.size - 1) {
    if (ends) kill(getpid(), SIGKILL);
    self.meet(4);
    return;
  }
  const double took = seconds_of([&] {
    reduce();
    cudaDeviceSynchronize();
  });
  const std::string said = thrown([&] { group->check(); });
  if (ends) {
    says(said, "rank 2 has ended before a reduction");
    expect(took < 10, "how soon an end is told", self.size, 3000);
  } else {
    says(said, "rank 2 did not arrive at a reduction within 1 s");
    expect(took < 2.5, "the limit of a call of several chunks", self.size, 3000);
  }
  expect(tensor.spoilt(), "what is left of the tensor", self.size, 3000);
  says(thrown(reduce), said);
  if (!ends) self.meet(4);
}

void an_end_before_open_is_told(const Rank& self) {
  auto group = std::make_unique<DeviceGroup>(self.rank, self.size, 0, kHalf, 5);
  const auto addresses = self.share(group->address(), 1);
  if (self.rank == 1) kill(getpid(), SIGKILL);
  pid_t process = 0;
  std::memcpy(&process, addresses[1].data() + 64, sizeof process);
  while (!has_ended(process)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  says(thrown([&] { group->open(addresses); }), "cannot reach the memory of rank 1");
}

}  // namespace

int main(int count, char** arguments) {
  const bool quick = count > 1 && std::string(arguments[1]) == "quick";
  for (int size : quick ? std::vector<int>{2} : std::vector<int>{2, 3, 5}) {
    in_processes("sums of float32", size, [&](const Rank& self) { sums_are_right<Float32>(self, quick); });
    in_processes("sums of bfloat16", size, [&](const Rank& self) { sums_are_right<Bfloat16>(self, quick); });
    in_processes("calls in a row", size, calls_follow_each_other);
  }
  for (const Different& different : kDifferences) {
    in_processes(different.about, 2, [&](const Rank& self) { differences_are_told(self, different); });
    if (quick) break;
  }
  in_processes("wrong uses", 1, [](const Rank&) { wrong_uses_are_told(); });
  in_processes("failures at the start", 1, [](const Rank&) { failures_at_the_start_are_told(); });
  if (!quick) {
    for (const Fault& last : {Fault{"cudaLaunchKernel", 2, "a kernel could not be started"},
                              Fault{"cudaEventRecord", 1, "the stream failed"}}) {
      in_processes("failures of calls", 2, [&](const Rank& self) { failures_of_calls_are_told(self, last); });
    }
    in_processes("a rank that is stuck", 3, [](const Rank& self) { the_end_of_a_rank_is_told(self, false, 1); });
    in_processes("an end before open", 2, an_end_before_open_is_told, 1);
  }
  in_processes("a rank that ends", 3, [](const Rank& self) { the_end_of_a_rank_is_told(self, true, 30); }, 2);
  std::printf("%d checks, %d wrong\n", checked.load(), failures.load());
  return failures == 0 ? 0 : 1;
}
