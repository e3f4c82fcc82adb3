// Whether other processes of this machine live; beside the waits of a GPU, which cannot ask the operating system.
#pragma once

#include <signal.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace fastlr {

// One that its parent has not waited for yet still lives.
inline bool has_ended(int process) { return kill(process, 0) != 0 && errno == ESRCH; }

class Watch {
 public:
  Watch() = default;
  ~Watch() { stop(); }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // Sets bit r of *ended, until stop(), once the process of rank r has ended.
  void start(std::vector<int> processes, uint64_t* ended) {
    stop();
    stopped_ = false;
    thread_ = std::thread([this, processes = std::move(processes), ended] {
      std::unique_lock<std::mutex> lock(mutex_);
      while (!wake_.wait_for(lock, std::chrono::milliseconds(20), [this] { return stopped_; })) {
        uint64_t found = 0;
        for (size_t r = 0; r < processes.size(); ++r) found |= uint64_t(has_ended(processes[r])) << r;
        if (found != 0) __atomic_fetch_or(ended, found, __ATOMIC_RELEASE);
      }
    });
  }

  void stop() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopped_ = true;
    }
    wake_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopped_ = true;
  std::thread thread_;
};

}  // namespace fastlr
