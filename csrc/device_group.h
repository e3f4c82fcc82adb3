// The protocol between GPUs (or processes sharing one) over CUDA IPC. No CUDA header is needed to include this.
#pragma once

#include <string>
#include <vector>

#include "errors.h"
#include "protocol.h"
#include "watch.h"

namespace fastlr {

class DeviceGroup {
 public:
  DeviceGroup(int rank, int size, int device, int64_t half_bytes, double timeout);
  ~DeviceGroup();
  DeviceGroup(const DeviceGroup&) = delete;
  DeviceGroup& operator=(const DeviceGroup&) = delete;

  std::string address() const;  // the bytes of a cudaIpcMemHandle_t and of the process's id
  void open(const std::vector<std::string>& addresses);
  int blocks() const { return blocks_; }  // that fit this GPU at once
  void limit_blocks(int blocks);          // to the least of all ranks

  // Queued on a stream: sums and means to job.out, which may be job.in; squared norms are added to *norm. All of it is
  // memory of the device. What goes wrong later spoils the result with NaN and is thrown by the next call or check().
  void reduce(const Job& job, Algorithm algorithm, double* norm, void* stream);
  // Throws GroupError if a call that has run so far failed. Does not wait.
  void check() const;
  // The end, in two steps: no rank may close before all have disconnected from each other's memory.
  void disconnect();
  void close();

  void set_timeout(double seconds) { timeout_ = seconds; }
  int64_t half_bytes() const { return half_bytes_; }
  int device() const { return device_; }

 private:
  template <typename T>
  void run(const Job& job, Algorithm algorithm, double* norm, void* stream);
  template <typename T>
  void queue(const Job& job, const Way& way, double* norm, void* stream);
  void not_closed() const;

  const int rank_, size_, device_;
  const int64_t half_bytes_;
  double timeout_;
  int blocks_ = 0;
  std::vector<unsigned char*> segments_;
  double* sums_ = nullptr;
  volatile uint64_t* status_ = nullptr;  // pinned memory of the host: Call's status, and its `ended`
  uint64_t* device_status_ = nullptr;
  Watch watch_;
  void* last_ = nullptr;  // event: the end of the call before
  uint32_t number_ = 0;
  std::string broken_;  // why this rank is out of step with its peers
};

// What the kernels were compiled for, such as "8.0 9.0 10.0+PTX".
std::string architectures();

}  // namespace fastlr
