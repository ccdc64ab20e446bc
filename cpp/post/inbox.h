// The letters that have come and that nobody has taken yet, by mailbox.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "post/letter.h"

namespace shoal {

class Inbox {
 public:
  // Hands the letter to a thread that sleeps in `take`, or keeps it for the next.
  // False: its mailbox was released.
  bool put(LetterPtr letter);
  // The letter was cancelled; nothing happens if somebody has taken it.
  void remove(const Letter& letter);
  // The next letters, at the latest at `until` (ns) or when a signal comes; false: the inbox is closed.
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
  // Whoever takes from the mailbox is told that it is closed, from now on; its letters are dropped.
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
  void drop_if_empty(std::uint32_t mailbox);

  std::mutex mutex_;
  std::unordered_map<std::uint32_t, Mailbox> mailboxes_;
  std::uint64_t arrivals_ = 0;
  std::uint64_t taken_ = 0;  // of mailbox 0
  std::unordered_set<std::uint32_t> released_;
  bool closed_ = false;
};

}  // namespace shoal
