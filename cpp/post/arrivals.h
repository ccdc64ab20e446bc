// Puts together the letters that a peer sends, in the post's thread.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "post/letter.h"
#include "transport/check.h"

namespace shoal {

class Correspondence;
class Peer;

class Arrivals {
 public:
  Arrivals(Peer& peer, Correspondence& post) : peer_(peer), post_(post) {}

  // The next message is checked against it.
  const LetterState& state();
  Destination on_header(const FrameHeader& header);
  void on_frame(const FrameHeader& header, const Destination& destination);
  void on_withdrawn(const FrameHeader& header);
  // Asks for the rest of parts that the budget has room for by now.
  void grant_waiting();
  // The caller does not want the letter any more, which may still be on its way.
  void drop(std::uint64_t call);
  // Nothing more comes.
  void clear();

 private:
  // A letter of which something is missing.
  struct Arriving {
    LetterPtr letter;
    std::vector<Part> apart;
    std::size_t missing = 0;
    bool dropped = false;
    bool complete = false;
  };
  // One message of a letter: itself, or a part.
  struct Piece : Incoming {
    std::shared_ptr<Arriving> whole;
    std::size_t index = 0;  // of the part; kItself
    std::shared_ptr<std::byte> memory;
    std::unique_ptr<std::byte[]> early;  // its beginning, until the budget has room for it
    Charge charge;
  };
  static constexpr std::size_t kItself = ~std::size_t{0};

  std::shared_ptr<Arriving> begin(const FrameHeader& header);
  bool make_room(Piece& piece);
  void ask(const std::shared_ptr<Piece>& piece);
  void finish(Piece& piece);
  void complete(Arriving& whole);
  void deliver(const std::shared_ptr<Arriving>& whole);
  void advance_mailbox(std::uint32_t mailbox);
  void give_up(Arriving& whole);
  void refuse(Arriving& whole, std::uint64_t bytes);

  Peer& peer_;
  Correspondence& post_;
  LetterState state_;
  std::shared_ptr<Arriving> current_;  // the letter that came last, whose parts follow
  std::deque<std::shared_ptr<Piece>> waiting_;
  // Letters to mailboxes that keep an order, from the first that is not complete.
  std::unordered_map<std::uint32_t, std::deque<std::shared_ptr<Arriving>>> ordered_;
  std::unordered_map<std::uint64_t, std::weak_ptr<Arriving>> calls_;
  std::shared_ptr<int> grants_ = std::make_shared<int>(0);
};

}  // namespace shoal
