// A process's shared memory: one sparse memfd, reserved once; pages are allocated on first use.
//
// It has no name in a file system, so nothing is left behind however the process ends.  Peers map the same
// memfd through a descriptor received over an authenticated socket.  Every range is committed with fallocate,
// so exhausted memory raises an error at allocation and never causes a SIGBUS later.
//
// A released range keeps its pages for some seconds, because a training loop allocates the same sizes again
// in its next step; trim() then returns them to the system.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>

namespace shoal {

class OutOfMemory : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A peer's memfd does not have the announced properties.
class BadMemory : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// One mapping of a memfd of this process or of a peer.
class Mapping {
 public:
  enum Forks { kLeftOut, kInherited };  // whether forked children have the mapping
  // Throws BadMemory if the memfd has another size or could be truncated, which would cause a SIGBUS here.
  Mapping(int fd, std::size_t length, Forks forks = kLeftOut);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* base() const { return base_; }
  std::size_t length() const { return length_; }
  template <class T>
  T* at(std::uint64_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }
  // Whether the range is within the mapping.  An offset that a peer can write must be read once, checked
  // here, and only then used.
  bool holds(std::uint64_t offset, std::uint64_t bytes) const {
    return offset <= length_ && bytes <= length_ - offset;
  }
  // Forgets the mapping without unmapping it: a forked child does not have it.
  void disown() { base_ = nullptr; }

 private:
  std::byte* base_ = nullptr;
  std::size_t length_ = 0;
};

class Arena {
 public:
  // capacity: address space to reserve, in bytes; limit: maximum number of bytes in use.
  Arena(std::size_t capacity, std::size_t limit);
  ~Arena();

  int fd() const { return fd_; }
  std::size_t capacity() const { return mapping_->length(); }
  std::size_t in_use() const;
  std::size_t idle_bytes() const;  // bytes of free ranges that still have pages
  const Mapping& mapping() const { return *mapping_; }

  // Allocates a zero-filled or recycled, page-aligned range.  commit=false leaves it sparse (for rings).
  std::uint64_t allocate(std::size_t bytes, bool commit = true);
  void release(std::uint64_t offset);
  // Returns some of the pages that have been free since `until` (ns) to the system; false if there are none.
  bool trim(std::int64_t until);
  // Holds the range that contains `address`: even if released, it is not reused until let_go() was called as
  // often as hold().  Returns its offset, or nothing if there is no such range.
  std::optional<std::uint64_t> hold(const void* address);
  void unhold(std::uint64_t offset);

  bool contains(const void* address, std::size_t bytes) const {
    auto p = static_cast<const std::byte*>(address);
    return p >= mapping_->base() && p + bytes <= mapping_->base() + mapping_->length();
  }
  std::uint64_t offset_of(const void* address) const {
    return static_cast<std::uint64_t>(static_cast<const std::byte*>(address) - mapping_->base());
  }
  // In a forked child: closes the descriptor; the memory is not mapped there.
  void disown();

 private:
  struct Taken {
    std::size_t bytes = 0;
    bool committed = false;
    int holds = 0;
    bool released = false;  // released while held
  };
  struct Warm {
    std::size_t bytes = 0;
    std::int64_t since = 0;
    bool whole = false;  // all pages are present
  };
  std::uint64_t take(std::size_t bytes, bool commit, bool& whole);
  void put_back(std::uint64_t offset, bool populated);
  void return_range(std::map<std::uint64_t, Taken>::iterator range, bool populated);
  void give_back(std::uint64_t offset, std::size_t bytes);
  bool cool(std::uint64_t offset, std::size_t bytes);

  int fd_ = -1;
  std::size_t limit_;
  std::unique_ptr<Mapping> mapping_;
  // Never held during a system call, because a releasing thread may hold the lock of an interpreter.
  mutable std::mutex mutex_;
  std::map<std::uint64_t, std::size_t> free_;  // offset -> bytes, coalesced
  std::map<std::uint64_t, Taken> taken_;       // by offset
  std::map<std::uint64_t, Warm> warm_;         // the parts of free_ that still have pages
  std::size_t in_use_ = 0;
};

// A range that is released with its last owner.  The arena outlives it.
class Block {
 public:
  Block(std::shared_ptr<Arena> arena, std::size_t bytes)
      : arena_(std::move(arena)), offset_(arena_->allocate(bytes)) {}
  ~Block() { arena_->release(offset_); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  std::byte* data() const { return arena_->mapping().base() + offset_; }
  std::uint64_t offset() const { return offset_; }

 private:
  std::shared_ptr<Arena> arena_;
  std::uint64_t offset_;
};

}  // namespace shoal
