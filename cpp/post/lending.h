// Lent memory: large parts between posts of one host.
//
// The sender copies a part once, into a block of an arena of its own, and the receiver's buffer is that block
// until nobody uses it any more.  A block begins with a word that says whose it is: the sender writes the
// number of the loan, the receiver adds kTaken when the part comes, and writes 0 when it lets go.  A sender
// takes a block back by exchanging the number for 0, which fails if the receiver was faster.  So a block
// comes back without a message, also when the connection has ended; and if the receiver's process has ended,
// its sender frees what it held.  When the arena is full, parts go through the socket.
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

#include "memory/arena.h"

namespace shoal {

// The memory of a post that lends.
class Lender : public std::enable_shared_from_this<Lender> {
 public:
  // One block that is lent; taken back if it is destroyed before `sent()`, when the peer is told of it.
  class Loan {
   public:
    Loan(std::shared_ptr<Lender> lender, std::uint64_t place, std::uint64_t number)
        : place(place), number(number), lender_(std::move(lender)) {}
    ~Loan() {
      if (lender_) lender_->recall(place, number);
    }
    Loan(const Loan&) = delete;
    Loan& operator=(const Loan&) = delete;
    void sent() { lender_.reset(); }
    const std::uint64_t place, number;

   private:
    std::shared_ptr<Lender> lender_;
  };

  // `sooner` is called when `tidy_at` has become earlier; it must not block.  Throws OutOfMemory.
  Lender(std::uint64_t limit, std::function<void()> sooner);

  int fd() const { return arena_.fd(); }
  // A copy of the bytes for the peer; null if there is no room.
  std::unique_ptr<Loan> lend(int peer, const std::byte* data, std::uint64_t bytes);
  // The connection to the peer has ended: blocks that it has not taken return.
  void lost(int peer);
  // The process of the peer has ended: all its blocks return.
  void ended(int peer);
  // Whether the peer has blocks that have not returned.
  bool owes(int peer);
  // Bytes of all blocks that have not returned.
  std::uint64_t lent();
  // Looks for blocks that have returned, and gives pages that nobody needs to the system.
  void tidy(std::int64_t now);
  // When `tidy` is due (ns); the largest number if nothing is lent or kept.
  std::int64_t tidy_at() const { return tidy_at_.load(std::memory_order_relaxed); }
  // The post has ended: `sooner` is called no more.
  void forget();
  void disown() { arena_.disown(); }

 private:
  using Word = std::atomic<std::uint64_t>;
  struct Lent {
    std::uint64_t number = 0;
    int peer = 0;
  };
  using Table = std::map<std::uint64_t, Lent>;
  void recall(std::uint64_t place, std::uint64_t number);
  bool untaken(const Table::value_type& entry);
  Table::iterator free(Table::iterator at);
  void look(std::size_t most);
  Word& word(std::uint64_t place) const { return *arena_.mapping().at<Word>(place); }

  Arena arena_;
  std::function<void()> sooner_;
  std::mutex mutex_;
  Table table_;  // by place
  std::uint64_t loans_ = 0;
  std::uint64_t looked_at_ = 0;  // the place up to which blocks were looked at
  std::int64_t pause_ = 0;       // until the next look, while peers keep what they have
  std::atomic<std::int64_t> tidy_at_;
};

// The memory of a peer that lends.  It stays mapped as long as a part that was taken from it.
class Borrowed : public std::enable_shared_from_this<Borrowed> {
 public:
  Borrowed(int fd, std::size_t length);
  // A part that the peer says it has lent; null and `flaw` if that cannot be.  Everything that a peer says of
  // its memory is checked here.
  std::shared_ptr<std::byte> take(std::uint64_t place, std::uint64_t number, std::uint64_t bytes,
                                  const char*& flaw);

 private:
  struct Held {
    std::uint64_t end = 0;
    unsigned forks = 0;
  };
  const char* claim(std::uint64_t place, std::uint64_t number, std::uint64_t bytes);
  void give_back(std::uint64_t place);

  Mapping memory_;
  const unsigned process_;
  std::mutex mutex_;
  std::map<std::uint64_t, Held> held_;  // by place
};

// The memories of all peers.  Connections to one peer share its memory, whose pages are then mapped once.
class Memories {
 public:
  // The memory behind the descriptor, which stays the caller's.  Throws BadMemory and OutOfMemory.
  std::shared_ptr<Borrowed> open(int fd);

 private:
  std::map<std::pair<dev_t, ino_t>, std::weak_ptr<Borrowed>> all_;
};

}  // namespace shoal
