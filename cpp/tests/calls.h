// Collectives with known results.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "collectives/collectives.h"
#include "engine/context.h"
#include "tests/scenes.h"
#include "tests/support.h"

namespace shoal::stress {

// A collective, equal on all ranks.
struct Plan {
  Kind kind{};
  kernels::Reduction how{};
  std::uint64_t count = 0;  // elements of each part
  bool uneven = false;      // parts differ by an element or two
  int root = -1;
  bool external = false;   // another engine moves the data
  std::uint64_t salt = 0;  // of the contents

  bool reduces() const {
    return kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kReduceScatter;
  }
  std::size_t item() const { return itemsize(how.dtype); }
  // Number of bytes from `from` to `to`.
  std::uint64_t bytes(int from, int to) const;
  std::string text() const;
};

enum class Extent { kSmall, kMixed, kLarge };  // up to 64 KB, mostly tiny; up to 1 MB; 100 KB to 4 MB
Plan make_plan(Random& script, int size, Extent extent);
Plan barrier();

// A rank's choices for a call.
struct Taste {
  bool shared;      // in memory that the host shares
  int shift;        // elements between the start of the memory and the data
  bool one_span;    // lists of equal parts in one piece
  bool by_message;  // wait for the context's tickets
  int engine_time;  // microseconds in which the engine of an external operation moves the data
};
Taste make_taste(Random& own);

// Memory of one call: shared or not, aligned to elements and often not to more.
class Room {
 public:
  Room(Group& group, std::uint64_t bytes, std::size_t item, const Taste& taste);
  std::byte* data() const { return data_; }

 private:
  std::shared_ptr<Block> block_;
  std::unique_ptr<std::byte[]> heap_;
  std::byte* data_;
};

// A message; without a buffer if its receiver accepts any.
Request message_request(Kind kind, int peer, std::uint64_t tag, DType dtype, std::optional<Span> data);

// A running operation.  Keeps its memory until it is done.
class Call {
 public:
  Call(std::shared_ptr<Group> group, Plan plan, Taste taste, std::uint64_t channel, Desk& desk, Tally& tally);
  ~Call();

  // False if it failed; a successful result must be right.
  bool finish();
  const Operation& operation() const { return *op_; }
  const Group& group() const { return *group_; }

 private:
  std::vector<Span> lay_out(std::unique_ptr<Room>& room, auto&& bytes_of);
  void make_request(Request& request);
  void verify() const;
  void expect(Span got, int from, int part) const;
  void expect_reduced(Span got, int part) const;
  void compare(Span got, const std::byte* wanted) const;

  std::shared_ptr<Group> group_;
  Plan plan_;
  Taste taste_;
  Desk& desk_;
  Tally& tally_;
  std::unique_ptr<Room> in_room_, out_room_;
  std::vector<Span> in_, out_;  // one span per part
  OperationPtr op_;
  std::jthread engine_;
};

}  // namespace shoal::stress
