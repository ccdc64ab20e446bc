#include "tests/calls.h"

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstring>

#include "engine/describe.h"
#include "mpi/library.h"

namespace shoal::stress {
namespace {

// Steele, Lea, Flood 2014: splitmix64.
class Stream {
 public:
  Stream(std::uint64_t salt, int rank, int part)
      : state_(salt * 0x2545f4914f6cdd1dULL + static_cast<std::uint64_t>(rank) * 1009 +
               static_cast<std::uint64_t>(part) * 9176263) {}
  std::uint64_t next() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15ULL;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }

 private:
  std::uint64_t state_;
};

using Element = std::array<std::byte, 16>;

// A small integer as an element: sums and products of eight are exact in every dtype.
Element encode(DType dtype, int value) {
  Element element{};
  auto put = [&](auto v) { std::memcpy(element.data(), &v, sizeof v); };
  const auto single = std::bit_cast<std::uint32_t>(static_cast<float>(value));
  switch (dtype) {
    case DType::kFloat64:
    case DType::kComplex128:
      put(static_cast<double>(value));
      break;
    case DType::kFloat32:
    case DType::kComplex64:
      put(single);
      break;
    case DType::kBFloat16:
      put(static_cast<std::uint16_t>(single >> 16));
      break;
    case DType::kFloat16:
    case DType::kComplex32: {
      const std::uint32_t exponent = single >> 23 & 255, sign = single >> 31 << 15;
      put(static_cast<std::uint16_t>(
          value == 0 ? 0 : sign | (exponent - 127 + 15) << 10 | (single >> 13 & 1023)));
      break;
    }
    case DType::kBool:
      put(static_cast<std::uint8_t>(value & 1));
      break;
    default:
      put(static_cast<std::int64_t>(value));  // little-endian: the lower bytes are the shorter integers
  }
  return element;
}

bool complex(DType dtype) {
  return dtype == DType::kComplex32 || dtype == DType::kComplex64 || dtype == DType::kComplex128;
}

bool is_signed(DType dtype) {
  return dtype != DType::kBool && dtype != DType::kUInt8 && dtype != DType::kUInt16 &&
         dtype != DType::kUInt32 && dtype != DType::kUInt64;
}

std::array<Element, 16> alphabet(const kernels::Reduction& how) {
  std::array<Element, 16> packets;
  for (int i = 0; i < 16; ++i) {
    int real = is_signed(how.dtype) ? i - 8 : i, imaginary = i * 7 % 16 - 8;
    if (how.op == RedOp::kProduct) real = 1 + (i & 1), imaginary = 0;  // and no zero has a sign
    Element& packet = packets[i] = encode(how.dtype, real);
    if (!complex(how.dtype)) continue;
    const std::size_t half = itemsize(how.dtype) / 2;
    std::memcpy(packet.data() + half, encode(how.dtype, imaginary).data(), half);
  }
  return packets;
}

// The contents of part number `part` of `rank`.
void fill(Span to, const Plan& plan, int rank, int part) {
  Stream stream(plan.salt, rank, part);
  if (!plan.reduces()) {
    for (std::uint64_t at = 0; at < to.bytes; at += 8) {
      const std::uint64_t word = stream.next();
      std::memcpy(to.data + at, &word, std::min<std::uint64_t>(8, to.bytes - at));
    }
    return;
  }
  const std::size_t item = plan.item();
  const auto packets = alphabet(plan.how);
  std::uint64_t bits = 0;
  for (std::uint64_t i = 0; i < to.bytes / item; ++i, bits >>= 4) {
    if (i % 16 == 0) bits = stream.next();
    std::memcpy(to.data + i * item, packets[bits & 15].data(), item);
  }
}

std::byte* scratch(std::size_t index, std::uint64_t bytes) {
  thread_local std::vector<std::vector<std::byte>> rooms(kMostRanks + 1);
  auto& room = rooms[index];
  if (room.size() < bytes + 16) room.resize(bytes + 16);
  return room.data();
}

std::uint64_t random_bytes(Random& script, Extent extent) {
  static constexpr int mixed[] = {0, 4, 28, 256, 1200, 4096, 4100, 36'000, 280'000, 1'200'000};
  if (extent == Extent::kMixed) return static_cast<std::uint64_t>(mixed[pick(script, 0, 9)]);
  if (extent == Extent::kLarge) return static_cast<std::uint64_t>(pick(script, 100'000, 4'000'000));
  const int roll = pick(script, 0, 99);
  const int most = roll < 55 ? 64 : roll < 85 ? 1024 : roll < 97 ? 8192 : 65'536;
  return static_cast<std::uint64_t>(pick(script, 0, most));
}

}  // namespace

std::uint64_t Plan::bytes(int from, int to) const {
  return (count + (uneven ? static_cast<std::uint64_t>((from + to) % 3) : 0)) * item();
}

std::string Plan::text() const {
  return "kind " + std::to_string(static_cast<int>(kind)) + ", " + name(how.dtype) +
         (reduces() ? std::string(" ") + name(how.op) : "") + ", " + std::to_string(count) + " elements" +
         (uneven ? " and some" : "") + (external ? ", external" : "") +
         (root < 0 ? "" : ", root " + std::to_string(root));
}

Plan make_plan(Random& script, int size, Extent extent) {
  Plan plan;
  plan.kind = static_cast<Kind>(pick(script, 1, 9));
  plan.salt = script();
  if (plan.kind == Kind::kBarrier) return barrier();
  do {
    plan.how.dtype = static_cast<DType>(pick(script, 0, kDTypeCount - 1));
    plan.how.op = plan.reduces() ? static_cast<RedOp>(pick(script, 0, kRedOpCount - 1)) : RedOp::kSum;
  } while (plan.reduces() && !legal(plan.how.dtype, plan.how.op));
  plan.how.divisor = static_cast<std::uint32_t>(size);
  const bool whole =
      plan.kind == Kind::kAllReduce || plan.kind == Kind::kReduce || plan.kind == Kind::kBroadcast;
  plan.uneven = !whole && chance(script, 3);
  plan.count = random_bytes(script, extent) / plan.item() / (whole ? 1 : static_cast<std::uint64_t>(size));
  const bool rooted = plan.kind == Kind::kReduce || plan.kind == Kind::kBroadcast ||
                      plan.kind == Kind::kGather || plan.kind == Kind::kScatter;
  if (rooted) plan.root = pick(script, 0, size - 1);
  plan.external = chance(script, 16);
  return plan;
}

Plan barrier() {
  Plan plan;
  plan.kind = Kind::kBarrier;
  return plan;
}

Taste make_taste(Random& own) {
  return {chance(own, 3), chance(own, 2) ? 0 : pick(own, 1, 9), chance(own, 2), chance(own, 8),
          pick(own, 0, 1) * pick(own, 1, 300)};
}

Room::Room(Group& group, std::uint64_t bytes, std::size_t item, const Taste& taste) {
  const std::uint64_t shift = static_cast<std::uint64_t>(taste.shift) * item;
  if (taste.shared)
    block_ = group.allocate(bytes + shift);
  else
    heap_ = std::make_unique_for_overwrite<std::byte[]>(bytes + shift);
  data_ = (block_ ? block_->data() : heap_.get()) + shift;
}

Request message_request(Kind kind, int peer, std::uint64_t tag, DType dtype, std::optional<Span> data) {
  Request request(kind, collectives::start);
  request.peer = peer;
  request.tag = tag;
  request.timeout = kPatience;
  request.shape.dtype = static_cast<std::uint8_t>(dtype);
  if (data) {
    request.shape.dims = 1;
    request.shape.sizes[0] = data->bytes / itemsize(dtype);
    (kind == Kind::kSend ? request.in : request.out).push_back(*data);
  }
  return request;
}

Call::Call(std::shared_ptr<Group> group, Plan plan, Taste taste, std::uint64_t channel, Desk& desk,
           Tally& tally)
    : group_(std::move(group)), plan_(plan), taste_(taste), desk_(desk), tally_(tally) {
  Request request(plan_.kind, collectives::start);
  request.channel = channel;
  make_request(request);
  desk_.doing("submitting", group_.get());
  plan_.external &= !group_->moved();
  if (group_->moved()) request.external = plan_.kind != Kind::kBarrier && !request.keyed();
  if (plan_.external) {
    request.external = true;
    request.in.clear();
    request.out.clear();
  }
  op_ = group_->submit(std::move(request));
  desk_.begun(op_);
  if (!plan_.external) return;
  if (taste_.engine_time == 0) {
    op_->finish_external();
    return;
  }
  engine_ = std::jthread([op = op_, time = taste_.engine_time] {
    std::this_thread::sleep_for(std::chrono::microseconds(time));
    op->finish_external();
  });
}

Call::~Call() {
  // As for the tensors of a program.
  if (!op_ || !op_->abandoned()) return;
  if (in_room_) mpi::keep_forever(std::move(in_room_));
  if (out_room_) mpi::keep_forever(std::move(out_room_));
}

// A buffer with one part per rank of the group, or with one part.
std::vector<Span> Call::lay_out(std::unique_ptr<Room>& room, auto&& bytes_of) {
  std::vector<std::uint64_t> sizes;
  if constexpr (requires { bytes_of(0); })
    for (int r = 0; r < group_->size(); ++r) sizes.push_back(bytes_of(r));
  else
    sizes.push_back(bytes_of());
  std::uint64_t sum = 0;
  for (std::uint64_t bytes : sizes) sum += bytes;
  room = std::make_unique<Room>(*group_, sum, plan_.item(), taste_);
  std::vector<Span> parts;
  std::uint64_t at = 0;
  for (std::uint64_t bytes : sizes) {
    parts.push_back({room->data() + at, bytes});
    at += bytes;
  }
  return parts;
}

void Call::make_request(Request& request) {
  const int size = group_->size(), rank = group_->rank();
  const bool root = rank == plan_.root;
  request.reduction = plan_.how;
  request.root = plan_.root;
  request.timeout = kPatience;
  if (plan_.uneven && plan_.kind != Kind::kAllToAll)
    for (int r = 0; r < size; ++r) request.sizes.push_back(plan_.bytes(r, 0));
  request.count = plan_.uneven ? 0 : plan_.count;
  auto one = [&] { return plan_.bytes(rank, 0); };
  auto each = [&](int r) { return plan_.bytes(r, 0); };
  auto pair = [&](int r) { return plan_.bytes(rank, r); };
  switch (plan_.kind) {
    case Kind::kBarrier:
      return;
    case Kind::kAllReduce:
    case Kind::kReduce:
    case Kind::kBroadcast:
      in_ = out_ = lay_out(in_room_, one);
      break;
    case Kind::kAllGather:
    case Kind::kGather:
      in_ = lay_out(in_room_, one);
      if (plan_.kind == Kind::kAllGather || root) out_ = lay_out(out_room_, each);
      break;
    case Kind::kReduceScatter:
    case Kind::kScatter:
      if (plan_.kind == Kind::kReduceScatter || root) in_ = lay_out(in_room_, each);
      out_ = lay_out(out_room_, one);
      break;
    default:
      in_ = lay_out(in_room_, pair);
      out_ = lay_out(out_room_, pair);
  }
  const bool receives_only = plan_.kind == Kind::kBroadcast && !root;
  for (std::size_t i = 0; i < in_.size() && !receives_only; ++i)
    fill(in_[i], plan_, rank, static_cast<int>(i));
  // Equal parts may be passed as one span, as the `_single` operations do.
  auto given = [&](const std::vector<Span>& parts) {
    if (parts.size() < 2 || plan_.uneven || !taste_.one_span) return parts;
    return std::vector<Span>{{parts[0].data, parts[0].bytes * parts.size()}};
  };
  const bool gives = plan_.kind != Kind::kBroadcast || root, gets = plan_.kind != Kind::kReduce || root;
  if (gives) request.in = given(in_);
  if (gets) request.out = given(out_);
}

bool Call::finish() {
  Context& context = group_->context();
  desk_.doing("waiting", group_.get());
  // Tickets are received by one thread of a rank; the keyed calls have another.
  if (taste_.by_message && !op_->request().keyed()) {
    const auto ticket = static_cast<std::int64_t>(op_->request().channel + (group_->ident() << 24));
    bool told = op_->notify_with(ticket);
    std::vector<std::int64_t> due;
    while (!told && context.tickets().wait(now_ns() + kSecond, due))
      for (std::int64_t arrived : due) {
        check(arrived == ticket, "a completion was announced that was not requested");
        told = true;
      }
    check(op_->done(), "an operation was announced before it was done");
  } else {
    check(context.wait(*op_, now_ns() + 2 * kPatience), "an operation hangs");
  }
  desk_.ended(op_);
  check(!plan_.external || op_->error().code != ErrorCode::kNone || op_->met(),
        "an external operation is complete, and the members have not met");
  if (op_->error().code != ErrorCode::kNone) {
    ++tally_.failures;
    return false;
  }
  verify();
  if (group_->rank() == 0) ++tally_.collectives;
  return true;
}

void Call::verify() const {
  const int size = group_->size(), rank = group_->rank();
  const bool root = rank == plan_.root;
  if (plan_.external) return;
  switch (plan_.kind) {
    case Kind::kBarrier:
      return;
    case Kind::kAllReduce:
      return expect_reduced(in_[0], 0);
    case Kind::kReduce:
      return root ? expect_reduced(in_[0], 0) : expect(in_[0], rank, 0);
    case Kind::kReduceScatter:
      return expect_reduced(out_[0], rank);
    case Kind::kBroadcast:
      return expect(out_[0], plan_.root, 0);
    case Kind::kScatter:
      return expect(out_[0], plan_.root, rank);
    default:
      for (int r = 0; r < size && !out_.empty(); ++r)
        expect(out_[r], r, plan_.kind == Kind::kAllToAll ? rank : 0);
  }
}

void Call::expect(Span got, int from, int part) const {
  std::byte* wanted = scratch(0, got.bytes);
  fill({wanted, got.bytes}, plan_, from, part);
  compare(got, wanted);
}

void Call::expect_reduced(Span got, int part) const {
  if (got.bytes == 0) return;
  std::vector<const void*> sources;
  for (int r = 0; r < group_->size(); ++r) {
    std::byte* source = scratch(static_cast<std::size_t>(r) + 1, got.bytes);
    fill({source, got.bytes}, plan_, r, part);
    sources.push_back(source);
  }
  void* wanted = scratch(0, got.bytes);
  kernels::reduce(plan_.how, {&wanted, 1}, sources, got.bytes / plan_.item());
  compare(got, static_cast<const std::byte*>(wanted));
}

void Call::compare(Span got, const std::byte* wanted) const {
  if (got.bytes == 0 || std::memcmp(got.data, wanted, got.bytes) == 0) return;
  std::uint64_t at = 0, wrong = 0;
  for (std::uint64_t i = got.bytes; i-- > 0;)
    if (got.data[i] != wanted[i]) at = i, ++wrong;
  die("rank " + std::to_string(group_->rank()) + " of " + std::to_string(group_->size()) + " of " +
      group_->name() + " got a wrong result from " + describe(op_->request()) + " (" + plan_.text() +
      "): " + std::to_string(wrong) + " of " + std::to_string(got.bytes) + " bytes, the first at " +
      std::to_string(at) + ": " + std::to_string(static_cast<int>(got.data[at])) + ", not " +
      std::to_string(static_cast<int>(wanted[at])));
}

}  // namespace shoal::stress
