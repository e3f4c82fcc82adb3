#include "cuda_runtime.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <ucontext.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int kDevices = 2, kProcessors = 6;
constexpr size_t kStack = 64 << 10;  // bytes, of a thread of a block

// ------------------------------------------------------------------------------------------------- errors and accounts
std::mutex mutex;  // of what follows, until the streams
cudaError_t last_error = cudaSuccess;
std::string to_fail;
int fails_in = 0;
bool capturing = false;
thread_local int current_device = 0;

struct Allocation {
  size_t bytes;
  int descriptor;  // -1: of the host, or opened from a handle
};
std::map<void*, Allocation> on_device, on_host, opened;
int events = 0;

cudaError_t told(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

// Whether the call of this name is to fail now; the caller holds the mutex.
bool fails(const char* name) { return name == to_fail && fails_in > 0 && --fails_in == 0; }

// What a call returns that is to fail or whose arguments are wrong, else cudaSuccess.
cudaError_t begun(const char* name, bool right = true) {
  if (fails(name)) return told(cudaErrorUnknown);
  return right ? cudaSuccess : told(cudaErrorInvalidValue);
}

// ------------------------------------------------------------------------------------------------------------- a block
struct Block;

struct Meeting {  // of all threads of a block, or of a warp
  unsigned expected = 0, arrived = 0, generation = 0;
  bool said = false, any = false;
  bool hold(bool said);  // whether anyone said so
};

struct Thread {
  Block* block;
  unsigned index;
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool ended = false;
  double given = 0;  // to from_lane()
};

struct Block {
  unsigned index, blocks;
  const stand_in::Body& body;
  std::vector<Thread> threads;
  ucontext_t scheduler;
  Meeting all;
  std::vector<Meeting> warps;
  bool moved = false;  // whether a thread did more than poll since the last pause

  Block(unsigned index, unsigned blocks, unsigned count, const stand_in::Body& body)
      : index(index), blocks(blocks), body(body), threads(count), warps((count + 31) / 32) {
    all.expected = count;
    for (unsigned t = 0; t < count; ++t) ++warps[t / 32].expected;
  }
  void run();
};

thread_local Thread* running = nullptr;

void enter() {
  running->block->body();
  running->ended = true;
  running->block->moved = true;
  swapcontext(&running->context, &running->block->scheduler);
}

void give_way() {
  Thread* self = running;
  swapcontext(&self->context, &self->block->scheduler);
}

bool Meeting::hold(bool one) {
  const unsigned own = generation;
  said |= one;
  running->block->moved = true;
  if (++arrived == expected) {
    any = said;
    said = false;
    arrived = 0;
    ++generation;
  }
  while (generation == own) give_way();
  return any;  // the next one cannot end before this thread has come to it
}

void begin(Thread& thread, Block& block, unsigned index) {
  thread.block = &block;
  thread.index = index;
  thread.stack.reset(new char[kStack]);
  getcontext(&thread.context);
  thread.context.uc_stack.ss_sp = thread.stack.get();
  thread.context.uc_stack.ss_size = kStack;
  thread.context.uc_link = nullptr;
  makecontext(&thread.context, enter, 0);
}

void Block::run() {
  for (unsigned t = 0; t < threads.size(); ++t) begin(threads[t], *this, t);
  for (size_t live = threads.size(); live > 0;) {
    moved = false;
    live = 0;
    for (Thread& thread : threads) {
      if (thread.ended) continue;
      running = &thread;
      swapcontext(&scheduler, &thread.context);
      live += !thread.ended;
    }
    if (!moved) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

// ------------------------------------------------------------------------------------------------------------- streams
void work(StandInStream* stream);

}  // namespace

struct StandInStream {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  bool busy = false, closed = false;
  std::thread thread{work, this};

  void add(std::function<void()> task) {
    const std::lock_guard<std::mutex> lock(mutex);
    queue.push_back(std::move(task));
    changed.notify_all();
  }
  void drain() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return queue.empty() && !busy; });
  }
};

struct StandInEvent {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t asked = 0, reached = 0;  // how often it was recorded, and how many of these the streams have come to
};

namespace {

void work(StandInStream* stream) {
  std::unique_lock<std::mutex> lock(stream->mutex);
  for (;;) {
    stream->changed.wait(lock, [stream] { return !stream->queue.empty() || stream->closed; });
    if (stream->queue.empty()) return;
    const auto task = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->busy = true;
    lock.unlock();
    task();
    lock.lock();
    stream->busy = false;
    stream->changed.notify_all();
  }
}

std::vector<StandInStream*> streams;  // never freed: a process may end while they work

StandInStream* stream_of(cudaStream_t stream) {
  if (stream != nullptr) return stream;
  static StandInStream* none = nullptr;
  if (none == nullptr) streams.push_back(none = new StandInStream);
  return none;
}

void drain() {
  std::vector<StandInStream*> all;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    all = streams;
  }
  for (StandInStream* stream : all) stream->drain();
}

}  // namespace

// ------------------------------------------------------------------------------------------------- what the device has
namespace stand_in {

Place thread_of_block() { return {running->index}; }
Place block_of_grid() { return {running->block->index}; }
Place threads_of_block() { return {unsigned(running->block->threads.size())}; }
Place blocks_of_grid() { return {running->block->blocks}; }

bool barrier(bool said) { return running->block->all.hold(said); }

double from_lane(double value, unsigned lane) {
  Thread& self = *running;
  Meeting& warp = self.block->warps[self.index / 32];
  self.given = value;
  warp.hold(false);
  const double found = self.block->threads[self.index / 32 * 32 + lane].given;
  warp.hold(false);
  return found;
}

void pause() { give_way(); }

cudaError_t launch(unsigned blocks, unsigned threads, cudaStream_t stream, Body body) {
  const std::lock_guard<std::mutex> lock(mutex);
  const cudaError_t error = begun("cudaLaunchKernel", blocks > 0 && threads > 0 && threads <= 1024);
  if (error != cudaSuccess) return error;
  stream_of(stream)->add([=] {
    std::vector<std::thread> grid;
    for (unsigned b = 0; b < blocks; ++b) {
      grid.emplace_back([=, &body] { Block(b, blocks, threads, body).run(); });
    }
    for (std::thread& each : grid) each.join();
  });
  return cudaSuccess;
}

void fail(const char* name, int nth) {
  const std::lock_guard<std::mutex> lock(mutex);
  to_fail = name;
  fails_in = nth;
}

int held() {
  const std::lock_guard<std::mutex> lock(mutex);
  return int(on_device.size() + on_host.size() + opened.size()) + events;
}

void pretend_capture(bool now) { capturing = now; }

}  // namespace stand_in

uint64_t fastlr::nanoseconds_of_device() {
  return uint64_t(std::chrono::steady_clock::now().time_since_epoch().count());
}

// -------------------------------------------------------------------------------------------------------------- calls
#define BEGIN(...)                                                \
  const std::lock_guard<std::mutex> lock(mutex);                  \
  if (const cudaError_t error = begun(__func__ __VA_OPT__(, ) __VA_ARGS__); error != cudaSuccess) return error

cudaError_t cudaGetDevice(int* device) {
  BEGIN();
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  BEGIN(device >= 0 && device < kDevices);
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  BEGIN();
  *value = kProcessors;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  const std::lock_guard<std::mutex> lock(mutex);
  return std::exchange(last_error, cudaSuccess);
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    default:
      return "unknown error";
  }
}

cudaError_t cudaDeviceSynchronize() {
  {
    BEGIN();
  }
  drain();
  return cudaSuccess;
}

// Filled with ones, so that what nobody has written is seen.
cudaError_t cudaMalloc(void** memory, size_t bytes) {
  BEGIN();
  const int descriptor = memfd_create("stand-in", MFD_CLOEXEC);
  void* found = MAP_FAILED;
  if (descriptor >= 0 && ftruncate(descriptor, off_t(bytes)) == 0) {
    found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  }
  if (found == MAP_FAILED) return told(cudaErrorMemoryAllocation);
  std::memset(found, 0xff, bytes);
  on_device[found] = {bytes, descriptor};
  *memory = found;
  return cudaSuccess;
}

// As CUDA's, when the device has done all its work.
cudaError_t cudaFree(void* memory) {
  if (memory != nullptr) drain();
  BEGIN(memory == nullptr || on_device.count(memory) == 1);
  if (memory == nullptr) return cudaSuccess;
  const Allocation freed = on_device[memory];
  munmap(memory, freed.bytes);
  close(freed.descriptor);
  on_device.erase(memory);
  return cudaSuccess;
}

cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
  BEGIN(on_device.count(memory) == 1 && bytes <= on_device[memory].bytes);
  stream_of(nullptr)->add([=] {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // who does not wait for it is found out
    std::memset(memory, value, bytes);
  });
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  BEGIN();
  *memory = ::operator new(bytes, std::align_val_t(64));
  on_host[*memory] = {bytes, -1};
  return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  BEGIN(on_host.count(host) == 1);
  *device = host;
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* memory) {
  BEGIN(on_host.erase(memory) == 1);
  ::operator delete(memory, std::align_val_t(64));
  return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory) {
  BEGIN(on_device.count(memory) == 1);
  std::memset(handle->reserved, 0, sizeof handle->reserved);
  std::snprintf(handle->reserved, sizeof handle->reserved, "%d %d", getpid(), on_device[memory].descriptor);
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned) {
  int process = 0, descriptor = 0;
  const bool read = std::sscanf(handle.reserved, "%d %d", &process, &descriptor) == 2;
  BEGIN(read && process != getpid());
  const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(descriptor);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct stat found {};
  if (file < 0 || fstat(file, &found) != 0) return told(cudaErrorInvalidValue);
  *memory = mmap(nullptr, size_t(found.st_size), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  opened[*memory] = {size_t(found.st_size), -1};
  return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void* memory) {
  BEGIN(opened.count(memory) == 1);
  munmap(memory, opened[memory].bytes);
  opened.erase(memory);
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  BEGIN();
  streams.push_back(*stream = new StandInStream);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  StandInStream* own = nullptr;
  {
    BEGIN();
    own = stream_of(stream);
  }
  own->drain();
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  BEGIN();
  *status = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  BEGIN();
  *event = new StandInEvent;
  ++events;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  BEGIN(event != nullptr);
  delete event;
  --events;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  BEGIN();
  const uint64_t number = ++event->asked;
  stream_of(stream)->add([=] {
    const std::lock_guard<std::mutex> own(event->mutex);
    event->reached = std::max(event->reached, number);
    event->changed.notify_all();
  });
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  BEGIN();
  const uint64_t number = event->asked;
  stream_of(stream)->add([=] {
    std::unique_lock<std::mutex> own(event->mutex);
    event->changed.wait(own, [=] { return event->reached >= number; });
  });
  return cudaSuccess;
}
