// What bindings.cpp turns into fastlr.errors.
#pragma once

#include <stdexcept>
#include <string>

#include "protocol.h"

namespace fastlr {

// The ranks failed to work together: fastlr.errors.DistributedError.
struct GroupError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An argument is wrong: fastlr.errors.InputError.
struct ArgumentError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// A report() in words. `seconds` is the limit of a wait.
inline std::string explain(uint64_t status, int own_rank, double seconds) {
  const auto failure = uint32_t(status >> 32);
  const int by = int(status >> 16 & 0xffff), about = int(status & 0xffff);
  const std::string noticed = by == own_rank ? "" : " (noticed by rank " + std::to_string(by) + ")";
  const std::string who = "rank " + std::to_string(about);
  std::string limit = std::to_string(seconds);
  limit.erase(limit.find_last_not_of('0') + 1);
  if (limit.back() == '.') limit.pop_back();
  switch (failure) {
    case kTimeout:
      return who + " did not arrive at a reduction within " + limit + " s" + noticed +
             ": it has failed, is stuck, or does not call the same reductions; every rank of the group must";
    case kMismatch:
      return "ranks " + std::to_string(by) + " and " + std::to_string(about) +
             " called different reductions: operation, dtype, number of elements and algorithm must be the same on all ranks";
    case kGone:
      return who + " has ended before a reduction" + noticed;
    default:
      return "the reduction was interrupted on " + who;
  }
}

}  // namespace fastlr
