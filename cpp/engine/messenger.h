// Matches messages to receives: by operation and step for collectives, by tag and source for point to point.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "common/buffer_pool.h"
#include "net/link.h"

namespace shoal {

class Messenger {
 public:
  // A message that arrived before its receive; `data` holds its first bytes.
  struct Early {
    FrameHeader header;
    Link* link = nullptr;
    std::shared_ptr<Incoming> holder;   // receives into `holder->owned` while the payload arrives
    std::shared_ptr<Incoming> claimed;  // the matching receive
    bool complete = false;
    Charge charge;  // until the message is read or dropped
  };

  // buffers: for early messages.
  explicit Messenger(std::shared_ptr<BufferPool> buffers) : buffers_(std::move(buffers)) {}

  void post(const std::shared_ptr<Incoming>& incoming);
  // Nothing is written to the receive's memory after this returns; forget: see Link::detach.
  void cancel(const std::shared_ptr<Incoming>& incoming, bool forget = false);
  // Matches the receive again, because the rest of its message from this member will not arrive.
  void repost(const std::shared_ptr<Incoming>& incoming, int from);
  // Opens a group; `others` are the global ranks of its other members.
  void open(std::uint64_t group, std::vector<int> others);
  // Closes a group: drops its unread messages, and all that still arrive.
  void forget(std::uint64_t group);
  // Whether the group was opened and members may still send to it.
  bool known(std::uint64_t group);
  // A member sends nothing more for the group, or for any group: drops its incomplete messages.  A forgotten
  // group uses no memory once this holds for all other members.
  void left(std::uint64_t group, int peer);
  void gone(int peer);
  // Drops early messages of the group that have a flaw; returns the flaws and the links of the messages.
  std::vector<std::pair<Link*, const char*>> flawed(std::uint64_t group, const std::vector<int>& ranks);
  // Drops everything, before the links are destroyed.
  void clear();
  // For tests: the numbers of remembered groups and early messages.
  std::pair<std::size_t, std::size_t> held();
  // Fingerprints of collective messages that arrived early for an operation.
  std::vector<Fingerprint> early_calls(std::uint64_t group, std::uint64_t channel);

  // Called by the links.
  Destination on_message(Link& link, const FrameHeader& header);
  Destination on_more(Link& link, const FrameHeader& header);
  void on_payload(Link& link, const FrameHeader& header, const Destination& destination);
  // The sender withdrew a message that it had sent in part.
  void on_withdrawn(Link& link, const FrameHeader& header);

 private:
  struct Channel {
    std::list<std::shared_ptr<Incoming>> posted;
    std::list<std::shared_ptr<Early>> early;
    bool empty() const { return posted.empty() && early.empty(); }
  };
  struct Key {
    std::uint64_t group, channel;
    bool operator==(const Key&) const = default;
  };
  struct Hash {
    std::size_t operator()(const Key& k) const { return k.group * 0x9e3779b97f4a7c15ULL ^ k.channel; }
  };
  // Prepares a matched receive; true if the message's bytes are wanted.
  static bool accept(Incoming& incoming, const FrameHeader& header, Link& link);
  // Matches the receive with the first suitable early message; false if there is none.
  bool match_early(const std::shared_ptr<Incoming>& incoming);
  // Posts the receive again, before the receives that were posted after it.
  void post_again(const std::shared_ptr<Incoming>& incoming);
  void drop_empty();
  static void deliver(Early& early, const std::shared_ptr<Incoming>& incoming);
  // After the first frame of a message: completes the receive, or asks for the rest.
  static void after_first_frame(Link& link, const FrameHeader& header,
                                const std::shared_ptr<Incoming>& incoming);

  struct Membership {
    bool open = true;
    std::vector<int> others;  // members that may still send to the group
    bool is_finished() const { return !open && others.empty(); }
  };
  const std::shared_ptr<BufferPool> buffers_;
  std::mutex mutex_;
  std::unordered_map<Key, Channel, Hash> channels_;
  std::unordered_map<const Incoming*, std::shared_ptr<Early>> holders_;
  std::unordered_map<std::uint64_t, Membership> groups_;
};

}  // namespace shoal
