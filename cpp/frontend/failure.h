// Exceptions inside the archive, and their conversion into errors of the C interface.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/error.h"
#include "shoal/abi.h"

namespace shoal::frontend_core {

// An error for the program.
struct Failure {
  std::string name;  // of the exception that the program gets
  std::string message;
  std::vector<int> ranks = {};
  std::int64_t last_completed = -1;
};

// The error of a group or an operation of the core, on `rank` of `group`.
Failure failure_of(const Error& error, int rank, const std::string& group);
shoal_error* error_of(const Failure& failure);
// The exception that is being handled, as an error.
shoal_error* current_error();

// Runs `fn`; returns its exception as an error, or null.
template <class F>
shoal_error* guarded(F fn) noexcept {
  try {
    fn();
    return nullptr;
  } catch (...) {
    return current_error();
  }
}

}  // namespace shoal::frontend_core
