// The engine for backend/native/channel.py: takes numbers, addresses and lists, and returns handles.
//
// Calls that may block or move many bytes run without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "collectives/calls.h"
#include "collectives/members.h"
#include "common/clock.h"
#include "engine/context.h"
#include "engine/describe.h"
#include "mpi/library.h"
#include "net/check.h"
#include "python/bindings.h"
#include "python/tensors.h"
#include "python/without_gil.h"

namespace nb = nanobind;
using namespace shoal;

namespace {

using Address = std::uintptr_t;
using Parts = std::vector<std::pair<Address, std::uint64_t>>;
using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::device::cpu>;

Span span(Address address, std::uint64_t bytes) { return {reinterpret_cast<std::byte*>(address), bytes}; }

std::vector<Span> spans(const Parts& parts) {
  std::vector<Span> result;
  result.reserve(parts.size());
  for (auto [address, bytes] : parts) result.push_back(span(address, bytes));
  return result;
}

// The error for the user, with all losses that are known by now; None if there is none.
nb::object latest(Group& group, Error error) {
  if (error.code == ErrorCode::kNone) return nb::none();
  if (error.code == ErrorCode::kPeerLost) {
    const WithoutGil released;
    group.context().look_for_deaths();
    error = group.with_all_lost(std::move(error));
  }
  return nb::cast(std::move(error));
}

OperationPtr submit(Group& group, Request request) {
  if (is_quick(request)) return group.submit(std::move(request));
  const WithoutGil released;
  return group.submit(std::move(request));
}

OperationPtr collective(Group& group, int kind, const Parts& in, const Parts& out, std::uint64_t count,
                        int dtype, int op, int root, std::vector<std::uint64_t> sizes, std::int64_t number,
                        std::uint64_t key, double timeout) {
  if (group.pairwise()) throw std::invalid_argument("a group of pairs carries no collectives");
  Request request = collective_request(group, static_cast<Kind>(kind), static_cast<DType>(dtype),
                                       static_cast<RedOp>(op), count, root, timeout);
  request.channel = number < 0 ? kKeyed | (key & (kKeyed - 1)) : static_cast<std::uint64_t>(number);
  request.external &= !request.keyed();
  request.in = spans(in);
  request.out = spans(out);
  request.sizes = std::move(sizes);
  return submit(group, std::move(request));
}

// A collective whose data another engine moves; `count` and `sizes` are compared only.
OperationPtr external(Group& group, int kind, std::uint64_t count, int dtype, int op, int root,
                      std::vector<std::uint64_t> sizes, std::int64_t number, std::uint64_t key,
                      double timeout, bool on_device) {
  Request request = collective_request(group, static_cast<Kind>(kind), static_cast<DType>(dtype),
                                       static_cast<RedOp>(op), count, root, timeout);
  request.channel = number < 0 ? kKeyed | (key & (kKeyed - 1)) : static_cast<std::uint64_t>(number);
  request.sizes = std::move(sizes);
  request.external = true;
  request.on_device = on_device;
  return group.submit(std::move(request));
}

// part: the buffer, or an empty list to accept any message.
OperationPtr message(Group& group, int kind, const Parts& part, int peer, std::uint64_t tag, int dtype,
                     const std::vector<std::uint64_t>& dims, double timeout) {
  if (dims.size() > kMaxDims)
    throw std::invalid_argument("a message has at most 8 dimensions; pack more of them");
  Request request =
      message_request(static_cast<Kind>(kind), static_cast<DType>(dtype), dims, peer, tag, timeout);
  (request.kind == Kind::kSend ? request.in : request.out) = spans(part);
  if (request.kind == Kind::kSend) {
    const char* flaw = request.in.size() != 1 ? "a message without a buffer"
                                              : flaw_of_shape(request.shape, request.in[0].bytes);
    if (flaw != nullptr) throw std::invalid_argument(std::string("cannot send ") + flaw);
  }
  if (peer >= group.size() || peer < (request.kind == Kind::kSend ? 0 : -1) || tag >= kPointToPoint)
    throw std::invalid_argument("a message to or from no rank, or with no tag");
  return submit(group, std::move(request));
}

// A received message.
struct Message {
  nb::object data;  // its bytes; None if they are in the user's buffer
  std::uint32_t source;
  std::uint64_t tag;
  int dtype;
  std::vector<std::uint64_t> dims;
};

std::optional<Message> received(Operation& op) {
  const auto& incoming = op.received;
  if (!incoming) return std::nullopt;
  const Shape& shape = incoming->header.shape;
  std::vector<std::uint64_t> dims(shape.sizes, shape.sizes + std::min<int>(shape.dims, kMaxDims));
  nb::object data = nb::none();
  if (incoming->owned) {
    auto* owner = new std::shared_ptr(std::move(incoming->owned));
    nb::capsule capsule(owner, [](void* p) noexcept { delete static_cast<std::shared_ptr<std::byte>*>(p); });
    std::size_t extent[1] = {static_cast<std::size_t>(incoming->header.total)};
    data = nb::cast(Bytes(owner->get(), 1, extent, capsule));
  }
  return Message{data, incoming->header.source, op.request().tag, shape.dtype, std::move(dims)};
}

Bytes allocate(Group& group, std::size_t bytes) {
  auto* block = [&] {
    const WithoutGil released;  // the system clears every page
    return new std::shared_ptr<Block>(group.allocate(bytes));
  }();
  nb::capsule capsule(block, [](void* p) noexcept { delete static_cast<std::shared_ptr<Block>*>(p); });
  std::size_t extent[1] = {bytes};
  return Bytes((*block)->data(), 1, extent, capsule);
}

// -- agreements ----------------------------------------------------------------------------------

// The result of a wait for an agreement.
struct AgreementNews {
  consensus::Outcome outcome;
  std::optional<consensus::Op> op;      // of the decision
  nb::bytes value;                      // of the decision
  std::vector<consensus::Op> called;    // by rank of `ranks`, if the ops differ
  std::vector<int> ranks;               // that continue
  std::optional<std::uint64_t> ballot;  // of a request to the witness, see ask_witness
  nb::object proposal = nb::none();     // of that request: bytes, or None
};

AgreementNews agreed(Group& group, std::uint64_t number, double timeout) {
  Agreements::Status news;
  {
    const WithoutGil released;
    news = group.agreements().wait(number, until(timeout));
  }
  AgreementNews result{news.outcome, {}, nb::bytes("", 0), {}, {}, {}};
  if (const auto& decision = news.decision) {
    result.op = decision->op;
    if (decision->op == consensus::Op::kDiffers)
      for (const char op : decision->value) result.called.push_back(static_cast<consensus::Op>(op));
    result.value = nb::bytes(decision->value.data(), decision->value.size());
    result.ranks = decision->ranks.list();
  }
  if (const auto& asked = news.request) {
    consensus::Witness proposed;
    proposed.ask(*asked);
    const std::string bytes = proposed.bytes(group.size());
    result.ballot = asked->ballot;
    if (asked->decision) result.proposal = nb::bytes(bytes.data(), bytes.size());
  }
  return result;
}

// Asks the witness with the stored state `kept`; afterwards `witness` is the state to store.
consensus::WitnessAnswer asked(const Group& group, std::uint64_t ballot,
                               const std::optional<nb::bytes>& proposal, const nb::bytes& kept,
                               consensus::Witness& witness) {
  consensus::WitnessRequest request{ballot, {}};
  const char* flaw = witness.read({kept.c_str(), kept.size()}, group.size());
  if (proposal && flaw == nullptr) {
    consensus::Witness proposed;
    flaw = proposed.read({proposal->c_str(), proposal->size()}, group.size());
    if (proposed.accepted()) request.decision = proposed.accepted()->decision;
  }
  if (flaw != nullptr) throw std::invalid_argument(flaw);
  return witness.ask(request);
}

// The state that the witness must keep instead of `kept`; None: it refuses.
nb::object ask_witness(Group& group, std::uint64_t ballot, std::optional<nb::bytes> proposal,
                       nb::bytes kept) {
  consensus::Witness witness;
  if (!asked(group, ballot, proposal, kept, witness).granted) return nb::none();
  const std::string bytes = witness.bytes(group.size());
  return nb::bytes(bytes.data(), bytes.size());
}

// Brings the answer of the witness, which had kept `kept` before.
void tell_witness(Group& group, std::uint64_t number, std::uint64_t ballot, std::optional<nb::bytes> proposal,
                  nb::bytes kept) {
  consensus::Witness witness;
  const consensus::WitnessAnswer answer = asked(group, ballot, proposal, kept, witness);
  const WithoutGil released;
  group.agreements().answer(number, answer);
}

std::pair<nb::bytes, std::uint64_t> take_trace(Context& context) {
  auto [events, dropped] = context.trace().take();
  return {nb::bytes(events.data(), events.size() * sizeof(TraceEvent)), dropped};
}

void bind_records(nb::module_& m) {
  nb::enum_<ErrorCode>(m, "ErrorCode")
      .value("PEER_LOST", ErrorCode::kPeerLost)
      .value("MISMATCH", ErrorCode::kMismatch)
      .value("TIMEOUT", ErrorCode::kTimeout)
      .value("ABORTED", ErrorCode::kAborted)
      .value("CLOSED", ErrorCode::kClosed)
      .value("OUT_OF_MEMORY", ErrorCode::kOutOfMemory)
      .value("FORKED", ErrorCode::kForked)
      .value("WIRE", ErrorCode::kWire)
      .value("CANCELLED", ErrorCode::kCancelled);
  nb::enum_<Kind>(m, "Kind")
      .value("ALL_REDUCE", Kind::kAllReduce)
      .value("REDUCE", Kind::kReduce)
      .value("BROADCAST", Kind::kBroadcast)
      .value("ALL_GATHER", Kind::kAllGather)
      .value("REDUCE_SCATTER", Kind::kReduceScatter)
      .value("GATHER", Kind::kGather)
      .value("SCATTER", Kind::kScatter)
      .value("ALL_TO_ALL", Kind::kAllToAll)
      .value("BARRIER", Kind::kBarrier)
      .value("SEND", Kind::kSend)
      .value("RECV", Kind::kRecv);
  nb::enum_<Fault>(m, "Fault")
      .value("NONE", Fault::kNone)
      .value("WRITING", Fault::kWriting)
      .value("REDUCED", Fault::kReduced)
      .value("FINISHED", Fault::kFinished)
      .value("GAVE_UP", Fault::kEvicted);
  nb::enum_<consensus::Outcome>(m, "AgreementOutcome")
      .value("OPEN", consensus::Outcome::kOpen)
      .value("DECIDED", consensus::Outcome::kDecided)
      .value("LEFT_OUT", consensus::Outcome::kLeftOut)
      .value("NO_QUORUM", consensus::Outcome::kNoQuorum)
      .value("CLOSED", consensus::Outcome::kClosed);
  nb::enum_<consensus::Op>(m, "AgreementOp")
      .value("DIFFERS", consensus::Op::kDiffers)
      .value("AND", consensus::Op::kAnd)
      .value("OR", consensus::Op::kOr)
      .value("MIN", consensus::Op::kMin)
      .value("MAX", consensus::Op::kMax)
      .value("SUM", consensus::Op::kSum)
      .value("COMMON", consensus::Op::kCommon)
      .value("GATHER", consensus::Op::kGather)
      .value("REBUILD", consensus::Op::kRebuild)
      .value("GROW", consensus::Op::kGrow);

  nb::class_<Error>(m, "Error")
      .def_ro("code", &Error::code)
      .def_ro("ranks", &Error::ranks)
      .def(
          "explain",
          [](const Error& error, int rank, const std::string& group) {
            return str(explain(error, rank, group));
          },
          nb::arg("rank"), nb::arg("group"))
      .def("caused_by_others", &caused_by_others, nb::arg("rank"))
      .def_ro("completed", &Error::completed);
  nb::class_<Message>(m, "Message")
      .def_ro("data", &Message::data)
      .def_ro("source", &Message::source)
      .def_ro("tag", &Message::tag)
      .def_ro("dtype", &Message::dtype)
      .def_ro("dims", &Message::dims);
  nb::class_<AgreementNews>(m, "AgreementNews")
      .def_ro("outcome", &AgreementNews::outcome)
      .def_ro("op", &AgreementNews::op)
      .def_ro("value", &AgreementNews::value)
      .def_ro("called", &AgreementNews::called)
      .def_ro("ranks", &AgreementNews::ranks)
      .def_ro("ballot", &AgreementNews::ballot)
      .def_ro("proposal", &AgreementNews::proposal);
}

}  // namespace

void bind_engine(nb::module_& m) {
  bind_records(m);
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const OutOfMemory& error) {
      PyErr_SetString(PyExc_MemoryError, error.what());
    } catch (const std::system_error& error) {
      errno = error.code().value();
      PyErr_SetFromErrno(PyExc_OSError);
    } catch (const BadMemory& error) {
      PyErr_SetString(PyExc_ConnectionError, error.what());
    }
  });

  m.def(
      "learn_tensors", [](nb::handle tensor_class) { learn_tensors(tensor_class.ptr()); },
      nb::arg("tensor_class"));

  nb::class_<Operation>(m, "Operation")
      .def("done", [](Operation& op) { return op.done() || op.orphaned(); })
      .def(
          "wait",
          [](std::shared_ptr<Operation> op, double timeout) {
            if (op->done() || op->orphaned()) return true;
            const WithoutGil released;
            return op->group().context().wait(*op, until(timeout));
          },
          nb::arg("timeout"))
      .def("error", [](const Operation& op) { return latest(op.group(), op.error()); })
      .def("announce", &Operation::notify_with, nb::arg("ticket"))
      .def("cancel", &Operation::cancel, nb::call_guard<WithoutGil>())
      .def("met", &Operation::met)
      .def(
          "wait_met",
          [](std::shared_ptr<Operation> op, double timeout) {
            if (op->met() || op->done() || op->orphaned()) return true;
            const WithoutGil released;
            return op->group().context().wait(*op, until(timeout), Context::Stage::kMet);
          },
          nb::arg("timeout"))
      .def("finish_external", &Operation::finish_external, nb::call_guard<WithoutGil>())
      .def("abandoned", &Operation::abandoned)
      .def("received", &received);

  nb::class_<Group>(m, "Group")
      .def("collective", &collective, nb::arg("kind"), nb::arg("inputs"), nb::arg("outputs"),
           nb::arg("count"), nb::arg("dtype"), nb::arg("op"), nb::arg("root"), nb::arg("sizes"),
           nb::arg("number"), nb::arg("key"), nb::arg("timeout"))
      .def("external", &external, nb::arg("kind"), nb::arg("count"), nb::arg("dtype"), nb::arg("op"),
           nb::arg("root"), nb::arg("sizes"), nb::arg("number"), nb::arg("key"), nb::arg("timeout"),
           nb::arg("on_device"))
      .def("message", &message, nb::arg("kind"), nb::arg("part"), nb::arg("peer"), nb::arg("tag"),
           nb::arg("dtype"), nb::arg("dims"), nb::arg("timeout"))
      .def("broken", &Group::broken)
      .def("abandoned", &Group::abandoned)
      .def("failure",
           [](Group& group) -> nb::object {
             auto error = group.failure();
             return error ? latest(group, *error) : nb::none();
           })
      .def("abort", &Group::abort, nb::arg("reason"), nb::call_guard<WithoutGil>())
      .def(
          "agree",
          [](Group& group, consensus::Op op, nb::bytes value, double timeout) -> nb::object {
            consensus::Vote vote{op, {value.c_str(), value.size()}};
            if (const char* flaw = consensus::invalid_reason(vote, group.size()))
              throw std::invalid_argument(flaw);
            std::optional<std::uint64_t> number;
            {
              const WithoutGil released;
              number = group.agreements().begin(std::move(vote), nanoseconds(timeout));
            }
            return number ? nb::object(nb::int_(*number)) : nb::none();
          },
          nb::arg("op"), nb::arg("value"), nb::arg("timeout"))
      .def("last_completed", [](Group& group) { return group.lanes().last_completed(); })
      .def("statistics", [](Group& group) { return group.lanes().statistics(); })
      .def("pending", [](Group& group) { return group.lanes().pending_at(now_ns()).count; })
      .def(
          "fence",
          [](Group& group, const std::vector<int>& ranks, double timeout) {
            std::vector<int> peers;
            for (int rank : ranks) peers.push_back(group.global(rank));
            std::vector<int> left = group.context().fence(peers, until(timeout));
            for (int& rank : left) rank = group.rank_of(rank);
            return left;
          },
          nb::arg("ranks"), nb::arg("timeout"), nb::call_guard<WithoutGil>())
      .def("vote_limit", [](const Group& group) { return consensus::vote_limit(group.size()); })
      .def("agreed", &agreed, nb::arg("number"), nb::arg("timeout"))
      .def("ask_witness", &ask_witness, nb::arg("ballot"), nb::arg("proposal").none(), nb::arg("kept"))
      .def("tell_witness", &tell_witness, nb::arg("number"), nb::arg("ballot"), nb::arg("proposal").none(),
           nb::arg("kept"))
      .def("losses",
           [](Group& group) {
             const auto [lost, dead] = group.agreements().losses();
             return nb::make_tuple(lost.list(), dead.list());
           })
      .def("begin_close", &Group::begin_close, nb::call_guard<WithoutGil>())
      .def(
          "close", [](Group& group, double timeout) { group.close(until(timeout)); }, nb::arg("timeout"),
          nb::call_guard<WithoutGil>())
      .def("allocate", &allocate, nb::arg("bytes"));

  m.def(
      "algorithm_for",
      [](Kind kind, int members, std::uint64_t bytes, std::uint64_t wide, bool at_once) {
        return std::string(
            name(collectives::algorithm_for(Algorithm::kAuto, kind, members, bytes, wide, at_once)));
      },
      nb::arg("kind"), nb::arg("members"), nb::arg("bytes"), nb::arg("wide"), nb::arg("at_once"));
  m.def("at_once_limit", &collectives::at_once_limit, nb::arg("members"));

  nb::class_<Context>(m, "Context")
      .def_static(
          "make",
          [](int rank, int size, int local_size, std::uint64_t capacity, std::uint64_t limit,
             double heartbeat, bool patient, std::string job, std::shared_ptr<Context> world,
             std::vector<int> world_ranks, int progress_threads) {
            if (world != nullptr && world_ranks.size() != static_cast<std::size_t>(size))
              throw std::invalid_argument("expected a rank of the world for each rank");
            return std::make_shared<Context>(
                Context::Options{rank, size, local_size, capacity, limit, nanoseconds(heartbeat), patient,
                                 std::move(job), std::move(world), std::move(world_ranks), progress_threads});
          },
          nb::arg("rank"), nb::arg("size"), nb::arg("local_size"), nb::arg("capacity"), nb::arg("limit"),
          nb::arg("heartbeat"), nb::arg("patient") = false, nb::arg("job") = "",
          nb::arg("world").none() = nb::none(), nb::arg("world_ranks") = std::vector<int>(),
          nb::arg("progress_threads") = 1)
      .def_prop_ro("memory_fd", &Context::memory_fd)
      .def_prop_ro("memory_capacity", &Context::memory_capacity)
      .def_prop_ro("memory_in_use", [](const Context& context) { return context.arena()->in_use(); })
      .def_prop_ro("memory_warm", [](const Context& context) { return context.arena()->idle_bytes(); })
      .def(
          "trim",
          [](const Context& context) {
            while (context.arena()->trim(now_ns())) {
            }
          },
          nb::call_guard<WithoutGil>())
      .def("make_ring", &Context::make_ring)
      .def("add_local", &Context::add_local, nb::arg("peer"), nb::arg("socket"), nb::arg("memory_fd"),
           nb::arg("capacity"), nb::arg("out"), nb::arg("in_"), nb::arg("pid"))
      .def("add_remote", &Context::add_remote, nb::arg("peer"), nb::arg("socket"))
      .def("start", &Context::start)
      .def(
          "use",
          [](Context& context, std::shared_ptr<mpi::Library> library) { context.use(std::move(library)); },
          nb::arg("library"))
      .def(
          "group",
          [](std::shared_ptr<Context> context, std::uint64_t ident, std::string name, int rank,
             std::vector<int> ranks, std::vector<int> hosts, int lanes, bool pairwise, double vote_timeout,
             bool losses_are_deaths, bool moved, int algorithm) {
            if (algorithm < 0 || algorithm >= kAlgorithms) throw std::invalid_argument("no such algorithm");
            return context->make_group({ident, std::move(name), rank, std::move(ranks), std::move(hosts),
                                        lanes, pairwise ? Scope::kPair : Scope::kAll,
                                        Agreements::Rules{nanoseconds(vote_timeout), losses_are_deaths},
                                        moved, static_cast<Algorithm>(algorithm)});
          },
          nb::arg("ident"), nb::arg("name"), nb::arg("rank"), nb::arg("ranks"), nb::arg("hosts"),
          nb::arg("lanes"), nb::arg("pairwise") = false, nb::arg("vote_timeout") = 10.0,
          nb::arg("believing") = false, nb::arg("moved") = false, nb::arg("algorithm") = 0,
          nb::call_guard<WithoutGil>())
      .def(
          "completions",
          [](Context& context, double timeout) {
            std::vector<std::int64_t> due;
            context.tickets().wait(until(timeout), due);
            return due;
          },
          nb::arg("timeout"), nb::call_guard<WithoutGil>())
      .def(
          "trace", [](Context& context, bool on) { context.trace().turn(on); }, nb::arg("on"))
      .def("take_trace", [](Context& context) { return take_trace(context); })
      .def(
          "close", [](Context& context, double timeout) { context.close(until(timeout)); },
          nb::arg("timeout"), nb::call_guard<WithoutGil>())
      .def("program_ends", &Context::program_ends)
      .def("disown", &Context::disown)
      .def("lost", &Context::all_lost, nb::call_guard<WithoutGil>())
      .def(
          "disconnect", [](Context& context, int peer) { context.peers().disconnect(peer); }, nb::arg("peer"))
      .def("totals", &Context::totals)
      .def("held", &Context::held)
      .def(
          "pause_heartbeats", [](Context& context, bool silent) { context.peers().pause_heartbeats(silent); },
          nb::arg("silent"))
      .def("die_at", [](Context& context, Fault point) { context.die_at(point); }, nb::arg("point"));
}
