#include "collectives/phase.h"
#include "engine/context.h"
#include "engine/describe.h"
#include "engine/messages.h"
#include "engine/mover.h"

namespace shoal::collectives {
namespace {

// A group of size 1.  Reducing a single input changes only bools, whose bytes may be other than 0 and 1.
Task alone(Operation& op) {
  const Request& request = op.request();
  co_await op.begun();
  if (reduces(request.kind) && request.reduction.dtype == DType::kBool) {
    const void* from = request.in[0].data;
    void* to = request.out.empty() ? request.in[0].data : request.out[0].data;
    kernels::reduce(request.reduction, {&to, 1}, {&from, 1}, request.in[0].bytes);
  } else if (!request.in.empty() && !request.out.empty()) {
    copy(request.out[0], request.in[0]);
  }
}

// The selected algorithm for more than one member.
Task among_members(Operation& op) {
  Group& group = op.group();
  const Request& request = op.request();
  if (request.keyed()) return over_links(op);
  if (group.hosts().size() == 1) return shared(op);
  for (const auto& host : group.hosts())
    if (host.size() > 1) return hierarchical(op);
  return over_links(op);
}

// Another engine moves the data.
Task external(Operation& op) {
  if (op.group().size() > 1) {
    Task meeting = among_members(op);
    co_await meeting;
  }
  op.set_met();
  Group& group = op.group();
  if (group.moved()) {
    auto connected = op.until([&group] { return group.mover() != nullptr; });
    co_await connected;
    Task moving = group.mover()->move(op);
    co_await moving;
    co_return;
  }
  auto finished = op.until([&op] { return op.finished_externally(); });
  co_await finished;
}

}  // namespace

std::vector<Span> parts_of(const std::vector<Span>& spans, int parts) {
  if (spans.size() != 1 || parts == 1) return spans;
  std::vector<Span> split;
  std::uint64_t bytes = spans[0].bytes / parts;
  for (int i = 0; i < parts; ++i) split.push_back(slice(spans[0], i * bytes, bytes));
  return split;
}

Task start(Operation& op) {
  const Request& request = op.request();
  if (request.kind == Kind::kSend) return send(op);
  if (request.kind == Kind::kRecv) return receive(op);
  if (request.external) return external(op);
  return op.group().size() == 1 ? alone(op) : among_members(op);
}

Task shared(Operation& op) {
  Group& group = op.group();
  const Request& request = op.request();
  const int size = group.size(), rank = group.rank(), root = request.root;
  const auto self = static_cast<std::uint32_t>(rank);
  std::vector<Span> in = parts_of(request.in, size), out = parts_of(request.out, size);
  std::vector<Pull> pulls;
  switch (request.pattern()) {
    case Kind::kAllReduce:
      return shared_all_reduce(op, request.out[0], -1);
    case Kind::kReduce:
      return shared_all_reduce(op, request.in[0], root);
    case Kind::kBarrier:
      return meet(op);
    case Kind::kBroadcast:
      return shared_broadcast(op, request.out[0], root);
    case Kind::kAllGather:
      for (int place = 0; place < size; ++place) pulls.push_back({place, 0, out[place]});
      return exchange(op, request.in, pulls);
    case Kind::kGather:
      for (int place = 0; rank == root && place < size; ++place) pulls.push_back({place, 0, out[place]});
      return exchange(op, request.in, pulls);
    case Kind::kScatter:
      pulls.push_back({root, self, request.out[0]});
      return rank == root ? exchange(op, in, pulls, rank) : exchange(op, {}, pulls);
    case Kind::kAllToAll:
      for (int place = 0; place < size; ++place) pulls.push_back({place, self, out[place]});
      return exchange(op, in, pulls, rank);
    default: {
      std::vector<Reduce> jobs(1, Reduce{self, request.out[0].data});
      return reduce_parts(op, in, jobs, false);
    }
  }
}

Task send(Operation& op) {
  const Request& request = op.request();
  FrameHeader header;
  header.channel = kPointToPoint | request.tag;
  header.total = request.in[0].bytes;
  header.shape = request.shape;
  Messages messages(op);
  messages.send(request.peer, header, request.in[0].data);
  Task sent = messages.finish();
  co_await sent;
}

Task receive(Operation& op) {
  const Request& request = op.request();
  auto incoming = std::make_shared<Incoming>();
  incoming->channel = kPointToPoint | request.tag;
  incoming->source = request.peer;
  incoming->allocate = request.out.empty();
  if (!incoming->allocate) {
    incoming->data = request.out[0].data;
    incoming->capacity = request.out[0].bytes;
    incoming->dtype = request.shape.dtype;
  }
  op.received = incoming;
  Messages messages(op);
  messages.post(incoming);
  auto called = op.until_called([&messages] { return messages.called(); });
  co_await called;
  auto settled = op.until([&messages] { return messages.received(); });
  co_await settled;
  if (incoming->state.load() != Incoming::kRefused) co_return;
  Group& group = op.group();
  const FrameHeader& header = incoming->header;
  if (group.pairwise() && (header.code == kDeferred || header.payload < header.total))
    incoming->link.load()->decline(header);
  if (incoming->allocate)
    throw OutOfMemory("there is no room for a message of " + std::to_string(incoming->header.total) +
                      " bytes from rank " + std::to_string(incoming->header.source));
  const Shape& sent = incoming->header.shape;
  Fingerprint theirs, mine;
  theirs.kind = static_cast<std::uint8_t>(Kind::kSend);
  theirs.dtype = sent.dtype;
  theirs.count = incoming->header.total / itemsize(static_cast<DType>(sent.dtype));
  mine.kind = static_cast<std::uint8_t>(Kind::kRecv);
  mine.dtype = request.shape.dtype;
  mine.count = request.out[0].bytes / itemsize(static_cast<DType>(mine.dtype));
  Error error{ErrorCode::kMismatch, "a message with tag " + std::to_string(request.tag) +
                                        " does not fit its receiver:\n  rank " +
                                        std::to_string(header.source) + ": " + describe(theirs) +
                                        "\n  rank " + std::to_string(group.rank()) + ": " + describe(mine)};
  if (group.pairwise())
    op.end(std::move(error));
  else
    group.fail(std::move(error), true);
  co_await op.never();
}

}  // namespace shoal::collectives
