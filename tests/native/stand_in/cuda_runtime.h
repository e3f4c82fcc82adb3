// What csrc/device_group.cu and its check use of the CUDA runtime, over shared memory and threads of the CPU, so that the
// extension's host side runs where there is no GPU. Found before NVIDIA's by -Itests/native/stand_in.
//
// As on a GPU: work is queued on streams and done later, in order within a stream only; cudaMemset, too; handles are of
// whole allocations and refused by the process that made them; errors of calls are kept until cudaGetLastError.
// Not as on a GPU: any memory may be read by the CPU, and that of a process that has ended stays readable.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <tuple>
#include <utility>

// ------------------------------------------------------------------------------------------------------------ the host
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2, cudaErrorUnknown = 999 };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone = 0, cudaStreamCaptureStatusActive = 1 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
constexpr unsigned cudaHostAllocMapped = 2, cudaEventDisableTiming = 2, cudaIpcMemLazyEnablePeerAccess = 1;

struct StandInStream;
struct StandInEvent;
using cudaStream_t = StandInStream*;  // null: the default stream, here one like any other
using cudaEvent_t = StandInEvent*;
struct cudaIpcMemHandle_t {
  char reserved[64];
};
struct dim3 {
  unsigned x;
  explicit dim3(unsigned count) : x(count) {}
};

cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaGetLastError();
const char* cudaGetErrorString(cudaError_t error);

cudaError_t cudaMalloc(void** memory, size_t bytes);
cudaError_t cudaFree(void* memory);
cudaError_t cudaMemset(void* memory, int value, size_t bytes);
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned flags);
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned flags);
cudaError_t cudaFreeHost(void* memory);
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory);
cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned flags);
cudaError_t cudaIpcCloseMemHandle(void* memory);

cudaError_t cudaStreamCreate(cudaStream_t* stream);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventDestroy(cudaEvent_t event);

namespace stand_in {

using Body = std::function<void()>;  // of one thread of a block
cudaError_t launch(unsigned blocks, unsigned threads, cudaStream_t stream, Body body);

constexpr int kBlocksPerProcessor = 2;

// For checks: the call of this name fails when it is made for the n-th time from now (0: never).
void fail(const char* name, int nth);
// How many device and host allocations, opened handles and events this process holds.
int held();
void pretend_capture(bool capturing);

}  // namespace stand_in

template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  *blocks = stand_in::kBlocksPerProcessor;
  return cudaSuccess;
}

namespace stand_in {

template <typename... Parameters, size_t... K>
std::tuple<Parameters...> copied(void** arguments, std::index_sequence<K...>) {
  return {*static_cast<Parameters*>(arguments[K])...};
}

}  // namespace stand_in

template <typename... Parameters>
cudaError_t cudaLaunchKernel(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, void** arguments, size_t,
                             cudaStream_t stream) {
  const auto own = stand_in::copied<Parameters...>(arguments, std::index_sequence_for<Parameters...>());
  return stand_in::launch(blocks.x, threads.x, stream, [kernel, own] { std::apply(kernel, own); });
}

// ---------------------------------------------------------------------------------------------------------- the device
// A block is a thread of the CPU, its threads take turns on it: at a barrier and between two polls.
#define __global__
#define __device__
#define __grid_constant__
#define __launch_bounds__(threads, blocks)
#define __shared__ static thread_local

namespace stand_in {

struct Place {
  unsigned x;
};
Place thread_of_block();
Place block_of_grid();
Place threads_of_block();
Place blocks_of_grid();
bool barrier(bool said);  // whether any thread of the block says so
double from_lane(double value, unsigned lane);  // of the same warp
void pause();

}  // namespace stand_in

#define threadIdx (stand_in::thread_of_block())
#define blockIdx (stand_in::block_of_grid())
#define blockDim (stand_in::threads_of_block())
#define gridDim (stand_in::blocks_of_grid())

inline void __syncthreads() { stand_in::barrier(false); }
inline int __syncthreads_or(bool said) { return stand_in::barrier(said); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __nanosleep(unsigned) { stand_in::pause(); }
inline double __shfl_down_sync(unsigned, double value, int delta) {
  const unsigned lane = threadIdx.x % 32 + delta;
  return stand_in::from_lane(value, lane < 32 ? lane : threadIdx.x % 32);
}

namespace fastlr {

inline uint64_t load_acquire_system(const uint64_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline void store_release_system(uint64_t* p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
uint64_t nanoseconds_of_device();

}  // namespace fastlr
