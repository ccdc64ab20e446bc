// Lent memory: transfer of large parts between RPC endpoints of one host.
//
// The sender copies a part once, into a block of its arena, or writes it there in the first place, and the
// receiver uses this block as its buffer.  A block begins with a word for its owner: the sender writes the
// number of the loan, the receiver adds kTaken when the part arrives, and writes 0 on release.  A sender
// takes a block back by exchanging the number for 0, which fails if the receiver was faster.  So a block is
// returned without a message, also after the connection has ended; if the receiver's process has ended, the
// sender frees its blocks.  When more than half of the arena is in use, the second word of a block asks the
// receiver to copy the part; when the arena is full, parts are sent through the socket.
//
// The receiver's memory is shared with the sender only.  Before the receiver forks, each block that it holds
// becomes private if the kernel's pages are small enough, so that it and the child do not see each other's
// writes.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "shm/arena.h"

namespace shoal {

// The memory of an endpoint that lends blocks.
class SharedBufferPool : public std::enable_shared_from_this<SharedBufferPool> {
 public:
  // A lent block; taken back if destroyed before `sent()`, to be called when the peer is notified of it.
  class Lease {
   public:
    Lease(std::shared_ptr<SharedBufferPool> lender, std::uint64_t place, std::uint64_t number)
        : place(place), number(number), lender_(std::move(lender)) {}
    ~Lease() {
      if (lender_) lender_->recall(place, number);
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    void sent() { lender_.reset(); }
    const std::uint64_t place, number;

   private:
    std::shared_ptr<SharedBufferPool> lender_;
  };

  // `sooner` is called when `tidy_at` becomes earlier; it must not block.  Throws OutOfMemory.
  SharedBufferPool(std::uint64_t limit, std::function<void()> sooner);

  int fd() const { return arena_.fd(); }
  // A block to write to, which `lend` then lends without a copy.  Once lent, it belongs to the receiver, and
  // may change.  A forked child does not have it.  Null if there is no room.
  std::shared_ptr<std::byte> reserve(std::uint64_t bytes);
  // Copies the bytes for the peer, unless they are a reserved block; null if there is no room.
  std::unique_ptr<Lease> lend(int peer, const std::byte* data, std::uint64_t bytes);
  // The connection to the peer has ended: takes back blocks that it has not taken.
  void lost(int peer);
  // The process of the peer has ended: takes back all its blocks.
  void ended(int peer);
  // Whether the peer has blocks.
  bool owes(int peer);
  // Bytes of all lent blocks.
  std::uint64_t lent();
  // Frees returned blocks, and returns unused pages to the system.
  void tidy(std::int64_t now);
  // When `tidy` is due (ns); the largest number if nothing is lent or kept.
  std::int64_t tidy_at() const { return tidy_at_.load(std::memory_order_relaxed); }
  // The endpoint has been closed: `sooner` is no longer called.
  void forget();
  void disown() { arena_.disown(); }

 private:
  using Word = std::atomic<std::uint64_t>;
  struct Entry {
    std::uint64_t number = 0;    // of the loan; 0: reserved only
    int peer = 0;                // that has it
    std::uint64_t reserved = 0;  // number of bytes, as long as somebody here may use the block
  };
  using Table = std::map<std::uint64_t, Entry>;
  bool allocate(std::uint64_t bytes, std::uint64_t& place);
  void cancel_reservation(std::uint64_t place);
  void tidy_soon();
  void recall(std::uint64_t place, std::uint64_t number);
  bool untaken(const Table::value_type& entry);
  Table::iterator free(Table::iterator at);
  void look(std::size_t most);
  Word& word(std::uint64_t place) const { return *arena_.mapping().at<Word>(place); }

  Arena arena_;
  const std::uint64_t limit_;
  const unsigned process_;
  std::function<void()> sooner_;
  std::mutex mutex_;
  Table table_;  // by place
  std::uint64_t loans_ = 0;
  std::uint64_t looked_at_ = 0;  // the place of the last checked block
  std::int64_t pause_ = 0;       // until the next check, while peers keep their blocks
  std::atomic<std::int64_t> tidy_at_;
};

// The memory of a lending peer.  It stays mapped as long as a part that was taken from it.
class PeerBuffer : public std::enable_shared_from_this<PeerBuffer> {
 public:
  struct Taken {
    std::shared_ptr<std::byte> data;
    bool wanted_back = false;  // the peer asks for a copy
  };

  PeerBuffer(int fd, std::size_t length);
  ~PeerBuffer();
  // Takes a part that the peer has lent; null and `flaw` if its description is invalid.  All of the peer's
  // data about its memory is checked here.
  Taken take(std::uint64_t place, std::uint64_t number, std::uint64_t bytes, const char*& flaw);

 private:
  friend struct Forks;
  enum class Kind : std::uint8_t {
    kShared,     // with the sender
    kPrivate,    // since a fork
    kInherited,  // shared with a child, too, because it could not become private: never returned
  };
  struct Held {
    std::uint64_t end = 0;
    Kind kind = Kind::kShared;
  };
  const char* claim(std::uint64_t place, std::uint64_t number, std::uint64_t bytes);
  void give_back(std::uint64_t place);
  void separate();
  bool map(std::uint64_t place, std::uint64_t end, bool shared);

  Mapping memory_;
  int fd_;
  const unsigned process_;
  std::mutex mutex_;
  std::map<std::uint64_t, Held> held_;  // by place
};

// Makes sure that forks are noticed; before any other handlers of forks that hold locks.
void watch_forks();

// The memories of all peers.  Connections to one peer share its memory, so that its pages are mapped once.
class PeerMemories {
 public:
  // The memory of the descriptor, which the caller still owns.  Throws BadMemory and OutOfMemory.
  std::shared_ptr<PeerBuffer> open(int fd);

 private:
  std::map<std::pair<dev_t, ino_t>, std::weak_ptr<PeerBuffer>> all_;
};

}  // namespace shoal
