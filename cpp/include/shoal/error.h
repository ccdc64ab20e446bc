// Exceptions, with the names that they have in Python (shoal.errors, where each is described).
//
// The message says which rank did what, and what to do.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "shoal/abi.h"

namespace shoal {
inline namespace frontend {  // the core has a namespace shoal too

/// The base of all exceptions of shoal.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A wrong argument, or a call in the wrong state.
class UsageError : public Error {
  using Error::Error;
};
/// The combination of operation, dtype and reduction is undefined.
class UnsupportedOperation : public UsageError {
  using UsageError::UsageError;
};
/// An environment variable or option has a value that cannot be used.
class ConfigurationError : public UsageError {
  using UsageError::UsageError;
};
/// A connection ended, or received data that violates the protocol.
class WireError : public Error {
  using Error::Error;
};
/// The other side does not have the job's secret.
class AuthenticationError : public WireError {
  using WireError::WireError;
};
/// Two processes use different protocols.
class VersionMismatch : public WireError {
  using WireError::WireError;
};
/// A store could not perform a request.
class StoreError : public Error {
  using Error::Error;
};
/// The processes of a job could not find each other, or contradict each other.
class RendezvousError : public Error {
  using Error::Error;
};
/// Some ranks never arrived at the rendezvous; the message names them.
class RendezvousTimeout : public RendezvousError {
  using RendezvousError::RendezvousError;
};
/// The operating system refused a resource, such as descriptors or threads.
class OutOfResources : public Error {
  using Error::Error;
};
/// A group of the parent process was used in a forked child.
class ForkedProcess : public Error {
  using Error::Error;
};
/// `wait(timeout)` timed out.  The operation is still in progress.
class WaitTimeout : public Error {
  using Error::Error;
};
/// The value of a future was read before it was complete, or its outcome was set twice or never.
class InvalidFutureState : public Error {
  using Error::Error;
};

/// The group is broken: all its pending and later operations raise.
class GroupError : public Error {
 public:
  explicit GroupError(const std::string& message, std::vector<int> ranks = {},
                      std::int64_t last_completed = -1)
      : Error(message), ranks_(std::move(ranks)), last_completed_(last_completed) {}
  /// The ranks that the error is about, numbered in the group: lost ranks for PeerLost.
  const std::vector<int>& ranks() const { return ranks_; }
  /// Number of the last collective that had completed here together with all earlier ones; -1: none.
  std::int64_t last_completed() const { return last_completed_; }

 private:
  std::vector<int> ranks_;
  std::int64_t last_completed_;
};
/// One or more members of the group died or can no longer be reached.
class PeerLost : public GroupError {
  using GroupError::GroupError;
};
/// A member of the group violated the protocol.
class ProtocolError : public GroupError {
  using GroupError::GroupError;
};
/// The ranks called different operations, or one operation with different arguments.
class CollectiveMismatch : public GroupError {
  using GroupError::GroupError;
};
/// An operation did not finish within its timeout.
class OperationTimeout : public GroupError {
  using GroupError::GroupError;
};
/// A send or receive was cancelled on this rank.
class OperationCancelled : public GroupError {
  using GroupError::GroupError;
};
/// A rank aborted the group; the message has the rank and the reason.
class GroupAborted : public GroupError {
  using GroupError::GroupError;
};
/// The group was closed, by this rank or by a peer that an operation needs.
class GroupClosed : public GroupError {
  using GroupError::GroupError;
};
/// Shared memory could not be allocated.
class OutOfSharedMemory : public GroupError {
  using GroupError::GroupError;
};

/// Parameters were not used for the loss; the message names them.
class UnusedParameterError : public Error {
  using Error::Error;
};
/// The ranks ran different numbers of forward passes before a backward pass.
class OutOfStep : public Error {
  using Error::Error;
};
/// The ranks wrapped different models; the message names rank and parameter.
class ModelMismatch : public Error {
  using Error::Error;
};

namespace detail {

template <class E>
[[noreturn]] void raise(const shoal_error& error) {
  if constexpr (std::is_base_of_v<GroupError, E>)
    throw E(error.message, std::vector<int>(error.ranks, error.ranks + error.rank_count),
            error.last_completed);
  else
    throw E(error.message);
}

struct ErrorKind {
  std::string_view name;
  void (*raise)(const shoal_error&);
};

#define SHOAL_ERROR(Name) \
  ErrorKind { #Name, raise<Name> }
inline constexpr ErrorKind kErrors[] = {
    SHOAL_ERROR(UsageError),          SHOAL_ERROR(UnsupportedOperation), SHOAL_ERROR(ConfigurationError),
    SHOAL_ERROR(WireError),           SHOAL_ERROR(AuthenticationError),  SHOAL_ERROR(VersionMismatch),
    SHOAL_ERROR(StoreError),          SHOAL_ERROR(RendezvousError),      SHOAL_ERROR(RendezvousTimeout),
    SHOAL_ERROR(OutOfResources),      SHOAL_ERROR(ForkedProcess),        SHOAL_ERROR(WaitTimeout),
    SHOAL_ERROR(InvalidFutureState),  SHOAL_ERROR(GroupError),           SHOAL_ERROR(PeerLost),
    SHOAL_ERROR(ProtocolError),       SHOAL_ERROR(CollectiveMismatch),   SHOAL_ERROR(OperationTimeout),
    SHOAL_ERROR(OperationCancelled),  SHOAL_ERROR(GroupAborted),         SHOAL_ERROR(GroupClosed),
    SHOAL_ERROR(OutOfSharedMemory),   SHOAL_ERROR(ModelMismatch),        SHOAL_ERROR(OutOfStep),
    SHOAL_ERROR(UnusedParameterError)};
#undef SHOAL_ERROR

// Throws the exception for an error of the archive, and frees the error.
inline void check(shoal_error* error) {
  if (error == nullptr) return;
  const std::unique_ptr<shoal_error, void (*)(shoal_error*)> owner(error, shoal_error_free);
  for (const ErrorKind& kind : kErrors)
    if (kind.name == error->name) kind.raise(*error);
  throw Error(std::string(error->name) + ": " + error->message);
}

}  // namespace detail
}  // namespace frontend
}  // namespace shoal
