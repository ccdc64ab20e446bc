// A process's shared memory: one sparse memfd, reserved once and faulted in as it is used.
//
// Nothing of it has a name in a file system, so nothing is left behind however the process ends.  Peers map
// the same memfd through a descriptor handed over an authenticated socket.  Every range handed out has been
// committed with fallocate, so that exhausted memory is an error here and never a SIGBUS later.
//
// A range that is released keeps its pages for a while: a training loop takes the same sizes again in its
// next step.  What nobody has taken for some seconds goes back to the system (trim).
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

// A peer's memfd is not what it was said to be.
class BadMemory : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// One mapping of a memfd, ours or a peer's.
class Mapping {
 public:
  enum Forks { kLeftOut, kInherited };  // by forked children
  // Throws BadMemory if the memfd has another size or could still be cut, which would end us with a SIGBUS.
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
  // Whether such a range lies in the mapping.  Offsets that a peer can write are to be read once, asked about
  // here, and only then used.
  bool holds(std::uint64_t offset, std::uint64_t bytes) const {
    return offset <= length_ && bytes <= length_ - offset;
  }
  // Forget the mapping without unmapping: in a forked child it is not there.
  void disown() { base_ = nullptr; }

 private:
  std::byte* base_ = nullptr;
  std::size_t length_ = 0;
};

class Arena {
 public:
  // capacity: bytes of address space to reserve; limit: bytes that may be in use at a time.
  Arena(std::size_t capacity, std::size_t limit);
  ~Arena();

  int fd() const { return fd_; }
  std::size_t capacity() const { return mapping_->length(); }
  std::size_t in_use() const;
  std::size_t warm() const;  // bytes of free ranges that have not gone back to the system
  const Mapping& mapping() const { return *mapping_; }

  // A zero-filled or recycled range of at least `bytes`, page aligned.  commit=false leaves it sparse
  // (rings).
  std::uint64_t allocate(std::size_t bytes, bool commit = true);
  void release(std::uint64_t offset);
  // Gives pages back to the system that have been free since `until` (ns) or longer, some at a time; true if
  // it found any.
  bool trim(std::int64_t until);
  // Keeps the range around this address from being handed out again, though it is released, until let_go()
  // was called as often as this.  Returns its offset; nothing if there is none.
  std::optional<std::uint64_t> hold(const void* address);
  void let_go(std::uint64_t offset);

  bool contains(const void* address, std::size_t bytes) const {
    auto p = static_cast<const std::byte*>(address);
    return p >= mapping_->base() && p + bytes <= mapping_->base() + mapping_->length();
  }
  std::uint64_t offset_of(const void* address) const {
    return static_cast<std::uint64_t>(static_cast<const std::byte*>(address) - mapping_->base());
  }
  // In a forked child: drop the descriptor; the memory is not mapped there.
  void disown();

 private:
  struct Taken {
    std::size_t bytes = 0;
    bool committed = false;
    int holds = 0;
    bool released = false;  // while it is held
  };
  struct Warm {
    std::size_t bytes = 0;
    std::int64_t since = 0;
    bool whole = false;  // no page is missing
  };
  std::uint64_t take(std::size_t bytes, bool commit, bool& whole);
  void put_back(std::uint64_t offset, bool populated);
  void return_range(std::map<std::uint64_t, Taken>::iterator range, bool populated);
  void give_back(std::uint64_t offset, std::size_t bytes);
  bool cool(std::uint64_t offset, std::size_t bytes);

  int fd_ = -1;
  std::size_t limit_;
  std::unique_ptr<Mapping> mapping_;
  // Never held during a system call: whoever releases memory may hold the lock of an interpreter.
  mutable std::mutex mutex_;
  std::map<std::uint64_t, std::size_t> free_;  // offset -> bytes, coalesced
  std::map<std::uint64_t, Taken> taken_;       // by offset
  std::map<std::uint64_t, Warm> warm_;         // parts of free_ that still have pages
  std::size_t in_use_ = 0;
};

// A range that returns to its arena when the last owner lets go; the arena outlives it.
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
