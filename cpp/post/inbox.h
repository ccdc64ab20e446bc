// An inbox holds the letters that have come and that nobody has taken yet, by mailbox.
//
// Mailbox 0 is always open; any other must be opened before letters can come to it.  So a mailbox that was
// released, or that never was, takes up nothing, however many there have been.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "post/letter.h"

namespace shoal {

class Inbox {
 public:
  Inbox() { mailboxes_.try_emplace(0); }

  // Hands the letter to a thread that sleeps in `take`, or keeps it for the next.
  // False: its mailbox is not open.
  bool put(LetterPtr letter);
  // The letter was cancelled; nothing happens if somebody has taken it.
  void remove(const Letter& letter);
  // The next letters, at the latest at `until` (ns) or when a signal comes; false: the mailbox is not open.
  bool take(std::uint32_t mailbox, std::int64_t until, std::size_t most, std::vector<LetterPtr>& letters);
  std::size_t waiting(std::uint32_t mailbox);
  std::size_t waiting();
  // How many letters are to be taken before this one; nullopt if it is not here.
  std::optional<std::size_t> ahead_of(const Letter& letter);
  // Letters of mailbox 0 that lie here with nobody asleep in `take`: since when the oldest has (0: there are
  // none), and how many had been taken by then and are by now.
  struct Neglect {
    std::int64_t since = 0;
    std::uint64_t taken_then = 0, taken = 0;
  };
  Neglect neglect();
  void open(std::uint32_t mailbox);
  // Closes a mailbox other than 0: its letters are dropped, and threads in `take` return.
  void release(std::uint32_t mailbox);
  void close();

 private:
  struct Sleeper {
    Latch woken;
    LetterPtr letter;
  };
  struct Mailbox {
    std::map<std::uint64_t, LetterPtr> letters;  // by their order of arrival
    std::vector<Sleeper*> asleep;
  };
  bool closed() const { return mailboxes_.empty(); }

  std::mutex mutex_;
  // Those that are open; none once the inbox is closed.
  std::unordered_map<std::uint32_t, Mailbox> mailboxes_;
  std::uint64_t arrivals_ = 0;
  std::uint64_t taken_ = 0;  // of mailbox 0
};

}  // namespace shoal
