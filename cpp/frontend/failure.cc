#include "frontend/failure.h"

#include <exception>
#include <iterator>
#include <new>
#include <system_error>

#include "shm/arena.h"

namespace shoal::frontend_core {
namespace {

// The names of the exceptions, by ErrorCode.
constexpr const char* kNames[] = {
    "GroupError",  "PeerLost",          "CollectiveMismatch", "OperationTimeout", "GroupAborted",
    "GroupClosed", "OutOfSharedMemory", "ForkedProcess",      "ProtocolError",    "OperationCancelled"};
static_assert(std::size(kNames) == static_cast<std::size_t>(ErrorCode::kCancelled) + 1);

// An error with its texts.
struct Stored : shoal_error {
  explicit Stored(const Failure& given) : shoal_error{}, failure(given) {
    name = failure.name.c_str();
    message = failure.message.c_str();
    ranks = failure.ranks.data();
    rank_count = failure.ranks.size();
    last_completed = failure.last_completed;
  }
  const Failure failure;
};

// Reported if there is no memory to report another error.
shoal_error no_memory{"OutOfSharedMemory", "no memory is left", nullptr, 0, -1};

}  // namespace

Failure failure_of(const Error& error, int rank, const std::string& group) {
  return {kNames[static_cast<int>(error.code)], explain(error, rank, group), error.ranks, error.completed};
}

shoal_error* error_of(const Failure& failure) {
  try {
    return new Stored(failure);
  } catch (const std::bad_alloc&) {
    return &no_memory;
  }
}

shoal_error* current_error() {
  try {
    throw;
  } catch (const Failure& failure) {
    return error_of(failure);
  } catch (const OutOfMemory& error) {
    return error_of(
        {"OutOfSharedMemory",
         std::string(error.what()) +
             ".  Free arrays of Group::empty() or close groups; else raise the limit that was met: "
             "SHOAL_SHARED_MEMORY_LIMIT, the address space of the process (ulimit -v), the memory "
             "of its container"});
  } catch (const BadMemory& error) {
    return error_of({"WireError", error.what()});
  } catch (const std::bad_alloc&) {
    return &no_memory;
  } catch (const std::system_error& error) {
    return error_of(
        {"OutOfResources", std::string(error.what()) +
                               ".  Each rank needs a few descriptors for every other rank, and some "
                               "threads: raise the limits of the process (ulimit -n, ulimit -u)"});
  } catch (const std::exception& error) {
    return error_of({"UsageError", error.what()});
  }
}

}  // namespace shoal::frontend_core

extern "C" void shoal_error_free(shoal_error* error) {
  if (error != nullptr && error != &shoal::frontend_core::no_memory)
    delete static_cast<shoal::frontend_core::Stored*>(error);
}
