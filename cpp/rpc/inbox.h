// The received packets that no thread has taken yet, by mailbox.
//
// Mailbox 0 is always open; others must be opened before they can receive packets.  So mailboxes that were
// released or never opened use no memory.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "rpc/packet.h"

namespace shoal {

class Inbox {
 public:
  Inbox() { mailboxes_.try_emplace(0); }

  // Hands the packet to a thread that sleeps in `take`, or stores it.  False: its mailbox is not open.
  bool put(PacketPtr packet);
  // The packet was cancelled; does nothing if it was taken already.
  void remove(const Packet& packet);
  // Takes the next packets, at most until `until` (ns) or a signal; false: the mailbox is not open.
  bool take(std::uint32_t mailbox, std::int64_t until, std::size_t most, std::vector<PacketPtr>& packets);
  std::size_t waiting(std::uint32_t mailbox);
  std::size_t waiting();
  // Number of packets to be taken before this one; nullopt if it is not here.
  std::optional<std::size_t> ahead_of(const Packet& packet);
  // Packets of mailbox 0 that no thread in `take` waits for: when the oldest arrived (0: there are none), and
  // the numbers of packets taken until then and until now.
  struct Neglect {
    std::int64_t since = 0;
    std::uint64_t taken_then = 0, taken = 0;
  };
  Neglect idle_backlog();
  void open(std::uint32_t mailbox);
  // Closes a mailbox other than 0: its packets are dropped, and threads in `take` return.
  void release(std::uint32_t mailbox);
  void close();

 private:
  struct Sleeper {
    Latch woken;
    PacketPtr packet;
  };
  struct Mailbox {
    std::map<std::uint64_t, PacketPtr> packets;  // in order of arrival
    std::vector<Sleeper*> asleep;
  };
  bool closed() const { return mailboxes_.empty(); }

  std::mutex mutex_;
  // The open mailboxes; none when the inbox is closed.
  std::unordered_map<std::uint32_t, Mailbox> mailboxes_;
  std::uint64_t arrivals_ = 0;
  std::uint64_t taken_ = 0;  // of mailbox 0
};

}  // namespace shoal
