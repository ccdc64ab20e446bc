// Matches messages to receives: by operation and step for collectives, by tag and source for point to point.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "transport/link.h"

namespace shoal {

class Messenger {
 public:
  // A message that arrived before its receive; `data` holds its first bytes.
  struct Early {
    FrameHeader header;
    Link* link = nullptr;
    std::shared_ptr<Incoming> holder;   // receives into `holder->owned` while the payload is on its way
    std::shared_ptr<Incoming> claimed;  // the receive that wants it
    bool complete = false;
    Charge charge;  // until it is read or dropped
  };

  void post(const std::shared_ptr<Incoming>& incoming);
  // Nothing is written to the receive's memory after this returns.
  void cancel(const std::shared_ptr<Incoming>& incoming);
  // Lets the receive be matched anew, because the rest of the message that it has will not come.
  void repost(const std::shared_ptr<Incoming>& incoming);
  // A group begins here; `others` are its members but for this rank, by global rank.
  void open(std::uint64_t group, std::vector<int> others);
  // The group is closed here: its messages that nobody received are dropped, and so is whatever still
  // arrives for it.
  void forget(std::uint64_t group);
  // It was opened, and members may still send for it.
  bool known(std::uint64_t group);
  // A member sends nothing more for the group, or for any: what has come of it in part is dropped.  A group
  // that is forgotten here takes no memory once that is true of all others.
  void left(std::uint64_t group, int peer);
  void gone(int peer);
  // Drops early messages of the group that have a flaw, and returns it with the link that each came from.
  std::vector<std::pair<Link*, const char*>> flawed(std::uint64_t group, const std::vector<int>& ranks);
  // In the end, before the links go: drops everything.
  void clear();
  // For tests: the numbers of groups and of early messages that are kept.
  std::pair<std::size_t, std::size_t> held();
  // Fingerprints of collective messages that arrived early for an operation.
  std::vector<Fingerprint> early_calls(std::uint64_t group, std::uint64_t channel);

  // From the links.
  Destination on_message(Link& link, const FrameHeader& header);
  Destination on_more(Link& link, const FrameHeader& header);
  void on_payload(Link& link, const FrameHeader& header, const Destination& destination);
  // The sender took back a message of which it had not sent all.
  void on_withdrawn(Link& link, const FrameHeader& header);

 private:
  struct Channel {
    std::list<std::shared_ptr<Incoming>> posted;
    std::list<std::shared_ptr<Early>> early;
  };
  struct Key {
    std::uint64_t group, channel;
    bool operator==(const Key&) const = default;
  };
  struct Hash {
    std::size_t operator()(const Key& k) const { return k.group * 0x9e3779b97f4a7c15ULL ^ k.channel; }
  };
  // Decides what to do with a matched message; true if its bytes are wanted.
  static bool accept(Incoming& incoming, const FrameHeader& header, Link& link);
  // Gives the receive the first early message that it matches; false if there is none.
  bool match_early(const std::shared_ptr<Incoming>& incoming);
  // As if it had just been posted, but before the receives that were posted after it.
  void post_again(const std::shared_ptr<Incoming>& incoming);
  void take_back(const std::shared_ptr<Incoming>& incoming, bool forget);
  static void deliver(Early& early, const std::shared_ptr<Incoming>& incoming);
  // After the first frame of a message: the receive is done, or the rest is asked for.
  static void go_on(Link& link, const FrameHeader& header, const std::shared_ptr<Incoming>& incoming);

  struct Membership {
    bool open = true;
    std::vector<int> others;  // that may still send for the group
    bool over() const { return !open && others.empty(); }
  };
  std::mutex mutex_;
  std::unordered_map<Key, Channel, Hash> channels_;
  std::unordered_map<const Incoming*, std::shared_ptr<Early>> holders_;
  std::unordered_map<std::uint64_t, Membership> groups_;
};

}  // namespace shoal
