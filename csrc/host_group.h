// The protocol between processes of one machine over POSIX shared memory.
#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "errors.h"
#include "protocol.h"

namespace fastlr {

// Called now and then while waiting; false stops the wait.
using Idle = std::function<bool()>;

class HostGroup {
 public:
  // Makes this rank's segment, whose name is gone at once: it lives as long as a process has it mapped or open, so
  // that nothing is left behind however a process ends.
  HostGroup(int rank, int size, int64_t half_bytes, double timeout);
  ~HostGroup();
  HostGroup(const HostGroup&) = delete;
  HostGroup& operator=(const HostGroup&) = delete;

  // Where the peers find the segment; for open(), until seal().
  std::string address() const;
  void open(const std::vector<std::string>& addresses);
  // All peers have opened the segment.
  void seal();

  // Sums and means: out[i] = that of in[i] over the ranks, in place where out is in. Squared norms: the value that is
  // returned. Throws GroupError, and out is then NaN where it is not right.
  double reduce(const Job& job, Algorithm algorithm, const Idle& idle);

  void set_timeout(double seconds) { timeout_ = seconds; }
  int64_t half_bytes() const { return half_bytes_; }

 private:
  template <typename T>
  double run(const Job& job, Algorithm algorithm, const Idle& idle);
  int64_t bytes() const { return kHeaderBytes + 2 * half_bytes_; }

  std::mutex one_at_a_time_;
  const int rank_, size_;
  const int64_t half_bytes_;
  double timeout_;
  int descriptor_ = -1;
  std::vector<unsigned char*> segments_;  // of every rank, as mapped here
  std::vector<int> processes_;
  uint32_t number_ = 0;
  uint64_t status_ = 0;
};

}  // namespace fastlr
