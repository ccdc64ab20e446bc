// Assembles the letters of one peer, in the post's thread.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "net/check.h"
#include "rpc/letter.h"

namespace shoal {

class Correspondence;
class Peer;

class Arrivals {
 public:
  Arrivals(Peer& peer, Correspondence& post) : peer_(peer), post_(post) {}

  // The state against which the next message is checked.
  const LetterState& state();
  Destination on_header(const FrameHeader& header);
  void on_frame(const FrameHeader& header, const Destination& destination);
  void on_withdrawn(const FrameHeader& header);
  // Asks for the rest of parts for which the budget now has room.
  void grant_waiting();
  // The caller no longer wants the letter, which may still be arriving.
  void drop(std::uint64_t call);
  // Drops everything: no more messages will arrive.
  void clear();

 private:
  // An incomplete letter.
  struct Arriving {
    LetterPtr letter;
    std::vector<Part> apart;
    std::size_t missing = 0;
    bool dropped = false;
    bool complete = false;
  };
  // One message of a letter: the letter itself, or a part.
  struct Piece : Incoming {
    std::shared_ptr<Arriving> whole;
    std::size_t index = 0;  // of the part, or kItself
    std::shared_ptr<std::byte> memory;
    std::unique_ptr<std::byte[]> early;  // its first bytes, until the budget has room for it
    Charge charge;
  };
  static constexpr std::size_t kItself = ~std::size_t{0};

  std::shared_ptr<Arriving> begin(const FrameHeader& header);
  bool make_room(Piece& piece);
  void ask(const std::shared_ptr<Piece>& piece);
  void finish(Piece& piece);
  void complete(Arriving& whole);
  void advance_mailbox(std::uint32_t mailbox);
  void give_up(Arriving& whole);
  void refuse(Arriving& whole, std::uint64_t bytes);

  Peer& peer_;
  Correspondence& post_;
  LetterState state_;
  std::shared_ptr<Arriving> current_;  // the last letter; its parts follow
  std::deque<std::shared_ptr<Piece>> waiting_;
  // Letters to ordered mailboxes, from the first incomplete one on.
  std::unordered_map<std::uint32_t, std::deque<std::shared_ptr<Arriving>>> ordered_;
  std::unordered_map<std::uint64_t, std::weak_ptr<Arriving>> calls_;
  std::shared_ptr<int> grants_ = std::make_shared<int>(0);
};

}  // namespace shoal
