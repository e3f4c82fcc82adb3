#include <cuda_runtime.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "device_group.h"
#ifdef __CUDACC__
#include "instructions.h"
#endif
#include "vector_loops.h"

#ifndef FASTLR_ARCHITECTURES
#define FASTLR_ARCHITECTURES "unknown"
#endif

namespace fastlr {
namespace {

constexpr int kThreads = 512;
constexpr int64_t kOneShotBytes = 256 << 10;  // as in vLLM and TensorRT-LLM for 8 GPUs; not measured here
constexpr int kAskEvery = 1024;               // polls between two looks at the host's memory
constexpr int64_t kSegmentUnit = 2 << 20;     // a share of its own of the driver's memory, so that only it is opened

void ok(cudaError_t error, const std::string& what) {
  if (error != cudaSuccess) {
    cudaGetLastError();  // clear it: others must not find it
    throw GroupError(what + ": " + cudaGetErrorString(error));
  }
}

struct OnDevice {
  int before = 0;
  explicit OnDevice(int device) {
    ok(cudaGetDevice(&before), "no CUDA device");
    ok(cudaSetDevice(device), "cannot use CUDA device " + std::to_string(device));
  }
  ~OnDevice() { cudaSetDevice(before); }
};

struct Block : VectorLoops<Block> {
  const uint64_t* ended;
  int polls = 0;
  __device__ explicit Block(const Call& c) : ended(c.ended) {}
  __device__ int thread() const { return threadIdx.x; }
  __device__ int threads() const { return blockDim.x; }
  __device__ int block() const { return blockIdx.x; }
  __device__ int blocks() const { return gridDim.x; }
  __device__ void sync() const { __syncthreads(); }
  __device__ bool any(bool one) const { return __syncthreads_or(one) != 0; }
  __device__ void fence() const { __threadfence_system(); }
  __device__ uint64_t load_acquire(const uint64_t* p) const { return load_acquire_system(p); }
  __device__ void store_release(uint64_t* p, uint64_t v) const { store_release_system(p, v); }
  __device__ uint64_t now() const { return nanoseconds_of_device(); }
  __device__ uint32_t relax(int peer) {
    __nanosleep(40);
    return ++polls % kAskEvery == 0 && (load_acquire(ended) >> peer & 1) != 0 ? kGone : kFine;
  }
  __device__ double total(double own) const {
    __shared__ double warps[kThreads / 32];
    __shared__ double all;
    for (int step = 16; step > 0; step /= 2) own += __shfl_down_sync(0xffffffffu, own, step);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = own;
    __syncthreads();
    if (threadIdx.x == 0) {
      double sum = 0;
      for (int w = 0; w < kThreads / 32; ++w) sum += warps[w];
      all = sum;
    }
    __syncthreads();
    return all;
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads, 1) one_shot_kernel(const __grid_constant__ Call c) {
  Block m(c);
  one_shot<T>(m, c);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1) two_shot_kernel(const __grid_constant__ Call c) {
  Block m(c);
  two_shot<T>(m, c);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1) norm_kernel(const __grid_constant__ Call c) {
  Block m(c);
  sum_squared_norm<T>(m, c);
}

__global__ void add_sums_kernel(const double* sums, int blocks, double* result) {
  double total = 0;
  for (int b = 0; b < blocks; ++b) total += sums[b];
  *result += total;
}

template <typename Kernel>
int resident(Kernel kernel, int processors) {
  int each = 0;
  ok(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, kThreads, 0), "no occupancy");
  return each * processors;
}

template <typename T>
int resident_of_all(int processors) {
  return std::min({resident(one_shot_kernel<T>, processors), resident(two_shot_kernel<T>, processors),
                   resident(norm_kernel<T>, processors)});
}

// Queues kernel(arguments...) without the <<< >>> that compilers of the CPU cannot read.
template <typename... Arguments>
void launch(void (*kernel)(Arguments...), int blocks, int threads, cudaStream_t stream, Arguments... arguments) {
  void* addresses[] = {&arguments...};
  ok(cudaLaunchKernel(kernel, dim3(blocks), dim3(threads), addresses, 0, stream), "a kernel could not be started");
}

}  // namespace

std::string architectures() { return FASTLR_ARCHITECTURES; }

DeviceGroup::DeviceGroup(int rank, int size, int device, int64_t half_bytes, double timeout)
    : rank_(rank),
      size_(size),
      device_(device),
      half_bytes_((half_bytes + 4095) / 4096 * 4096),
      timeout_(timeout),
      segments_(size) {
  OnDevice on(device);
  int processors = 0;
  ok(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "no device attributes");
  // A block waits for the same block of every peer: all of them must be able to run at once. Half of the processors
  // are left to the work beside it.
  const int most = std::min(resident_of_all<Bfloat16>(processors), resident_of_all<Float32>(processors));
  blocks_ = std::max(1, std::min({kMaxBlocks, most, processors / 2}));
  const int64_t bytes = (kHeaderBytes + 2 * half_bytes_ + kSegmentUnit - 1) / kSegmentUnit * kSegmentUnit;
  try {
    ok(cudaMalloc(reinterpret_cast<void**>(&segments_[rank]), bytes), "no memory for the staging buffer");
    ok(cudaMemset(segments_[rank], 0, kHeaderBytes), "cannot clear the header");
    ok(cudaMalloc(reinterpret_cast<void**>(&sums_), kMaxBlocks * sizeof(double)), "no memory for sums");
    void* status = nullptr;
    ok(cudaHostAlloc(&status, 2 * sizeof(uint64_t), cudaHostAllocMapped), "no pinned memory");
    status_ = static_cast<uint64_t*>(status);
    status_[0] = 0;
    status_[1] = 0;
    ok(cudaHostGetDevicePointer(reinterpret_cast<void**>(&device_status_), status, 0), "pinned memory is not mapped");
    cudaEvent_t event;
    ok(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "no event");
    last_ = event;
    ok(cudaDeviceSynchronize(), "the device failed");
  } catch (...) {
    close();
    throw;
  }
}

// The memory itself is left to the end of the process unless close() was called: a peer may still be using it.
DeviceGroup::~DeviceGroup() { disconnect(); }

void DeviceGroup::disconnect() {
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(device_);
  cudaDeviceSynchronize();
  watch_.stop();
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || segments_[r] == nullptr) continue;
    cudaIpcCloseMemHandle(segments_[r]);
    segments_[r] = nullptr;
  }
  cudaSetDevice(before);
  cudaGetLastError();  // at the end of a process the driver may be gone already
}

void DeviceGroup::close() {
  disconnect();
  cudaFree(segments_[rank_]);
  cudaFree(sums_);
  if (status_ != nullptr) cudaFreeHost(const_cast<uint64_t*>(status_));
  if (last_ != nullptr) cudaEventDestroy(static_cast<cudaEvent_t>(last_));
  segments_[rank_] = nullptr;
  sums_ = nullptr;
  status_ = nullptr;
  last_ = nullptr;
  cudaGetLastError();
}

std::string DeviceGroup::address() const {
  not_closed();
  OnDevice on(device_);
  cudaIpcMemHandle_t handle;
  ok(cudaIpcGetMemHandle(&handle, segments_[rank_]), "the device cannot share memory between processes");
  const pid_t process = getpid();
  return std::string(reinterpret_cast<const char*>(&handle), sizeof handle) +
         std::string(reinterpret_cast<const char*>(&process), sizeof process);
}

void DeviceGroup::open(const std::vector<std::string>& addresses) {
  if (int(addresses.size()) != size_) throw ArgumentError("one address for each rank is needed");
  not_closed();
  OnDevice on(device_);
  std::vector<pid_t> processes(size_, getpid());
  for (int r = 0; r < size_; ++r) {
    cudaIpcMemHandle_t handle;
    if (addresses[r].size() != sizeof handle + sizeof(pid_t)) throw ArgumentError("not a CUDA IPC handle and a process");
    std::memcpy(&handle, addresses[r].data(), sizeof handle);
    std::memcpy(&processes[r], addresses[r].data() + sizeof handle, sizeof(pid_t));
    if (segments_[r] != nullptr) continue;
    ok(cudaIpcOpenMemHandle(reinterpret_cast<void**>(&segments_[r]), handle, cudaIpcMemLazyEnablePeerAccess),
       "cannot reach the memory of rank " + std::to_string(r));
  }
  watch_.start(processes, const_cast<uint64_t*>(status_) + 1);
}

void DeviceGroup::limit_blocks(int blocks) {
  if (blocks < 1 || blocks > blocks_) throw ArgumentError("blocks must be from 1 to " + std::to_string(blocks_));
  blocks_ = blocks;
}

void DeviceGroup::not_closed() const {
  if (status_ == nullptr) throw GroupError("the group is closed");
}

void DeviceGroup::check() const {
  not_closed();
  if (!broken_.empty()) throw GroupError("the group has failed before: " + broken_);
  if (*status_ != 0) throw GroupError(explain(*status_, rank_, timeout_));
}

// The kernels of a job, a call for each chunk of it.
template <typename T>
void DeviceGroup::queue(const Job& job, const Way& way, double* norm, void* stream_pointer) {
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  const bool squares = job.operation == Operation::kSquaredNorm;
  const bool two_shot = squares || way.algorithm == Algorithm::kTwoShot;
  for (int64_t begin = 0; begin < job.count; begin += capacity(half_bytes_, size_, sizeof(T))) {
    Call c = next_call<T>(job, way, begin, segments_.data(), rank_, size_, ++number_, timeout_);
    c.status = device_status_;
    c.ended = device_status_ + 1;
    c.sums = sums_;
    const int64_t vectors = (c.count + T::kLanes - 1) / T::kLanes;
    const int64_t each = two_shot ? (vectors + size_ - 1) / size_ : vectors;
    const int blocks = int(std::max<int64_t>(1, std::min<int64_t>(blocks_, (each + kThreads - 1) / kThreads)));
    if (squares) {
      launch(norm_kernel<T>, blocks, kThreads, stream, c);
      launch(add_sums_kernel, 1, 1, stream, static_cast<const double*>(sums_), blocks, norm);
    } else if (two_shot) {
      launch(two_shot_kernel<T>, blocks, kThreads, stream, c);
    } else {
      launch(one_shot_kernel<T>, blocks, kThreads, stream, c);
    }
  }
}

template <typename T>
void DeviceGroup::run(const Job& job, Algorithm algorithm, double* norm, void* stream_pointer) {
  check();
  for (const unsigned char* segment : segments_) {
    if (segment == nullptr) throw GroupError("open() has not been called");
  }
  if (const uint64_t ended = status_[1]; ended != 0) {  // their memory may be gone with them
    throw GroupError(explain(report(kGone, rank_, __builtin_ctzll(ended)), rank_, timeout_));
  }
  OnDevice on(device_);
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  const auto last = static_cast<cudaEvent_t>(last_);
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  ok(cudaStreamIsCapturing(stream, &capturing), "the stream failed");
  if (capturing != cudaStreamCaptureStatusNone) {
    throw ArgumentError("reductions cannot be captured in a CUDA graph: every call has a number of its own");
  }
  ok(cudaStreamWaitEvent(stream, last, 0), "the call before failed");  // calls follow each other on any streams
  if (algorithm == Algorithm::kAuto) {
    const bool small = size_ == 2 || job.count * int64_t(sizeof(T)) <= kOneShotBytes;  // of two, both read as much
    algorithm = small ? Algorithm::kOneShot : Algorithm::kTwoShot;
  }
  try {
    queue<T>(job, {algorithm, half_bytes_, blocks_}, norm, stream);
    ok(cudaEventRecord(last, stream), "the stream failed");
  } catch (const GroupError& error) {
    broken_ = error.what();
    throw;
  }
}

void DeviceGroup::reduce(const Job& job, Algorithm algorithm, double* norm, void* stream) {
  if (job.dtype == Dtype::kBfloat16) {
    run<Bfloat16>(job, algorithm, norm, stream);
  } else {
    run<Float32>(job, algorithm, norm, stream);
  }
}

}  // namespace fastlr
