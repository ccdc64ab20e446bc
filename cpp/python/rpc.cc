// The native endpoint of RPC for rpc/connection/endpoint.py: takes heads and addresses, returns packets.
//
// The GIL is released for calls that may block or wake another thread.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <new>

#include "collectives/calls.h"
#include "kernels/reduce.h"
#include "python/bindings.h"
#include "python/interruptible_wait.h"
#include "python/without_gil.h"
#include "rpc/endpoint.h"

namespace nb = nanobind;
using namespace shoal;

namespace {

// -- Python objects held by an endpoint -------------------------------------------------------------------

// Objects to be released by a thread that holds the GIL.
class DeferredDecref {
 public:
  explicit DeferredDecref(std::function<void()> nudge) : nudge_(std::move(nudge)) {}
  ~DeferredDecref() { objects_.clear(); }
  void defer(PyObject* object) {
    std::lock_guard lock(mutex_);
    objects_.push_back(object);
    if (nudge_) nudge_();
  }
  void clear() {
    std::vector<PyObject*> objects;
    {
      std::lock_guard lock(mutex_);
      objects.swap(objects_);
    }
    for (PyObject* object : objects) Py_DECREF(object);
  }
  void silence() {
    std::lock_guard lock(mutex_);
    nudge_ = nullptr;
  }

 private:
  std::mutex mutex_;
  std::vector<PyObject*> objects_;
  std::function<void()> nudge_;
};

// An endpoint owned by Python.  A forked child leaks it, because its locks may be held forever.
struct OwnedEndpoint {
  std::shared_ptr<RpcEndpoint> endpoint;
  std::shared_ptr<DeferredDecref> deferred;

  explicit OwnedEndpoint(const RpcEndpoint::Options& options)
      : endpoint(std::make_shared<RpcEndpoint>(options)) {
    deferred = std::make_shared<DeferredDecref>([endpoint = endpoint.get()] { endpoint->tickets().nudge(); });
  }
  ~OwnedEndpoint() {
    if (endpoint->foreign()) {
      new std::shared_ptr<RpcEndpoint>(std::move(endpoint));
      new std::shared_ptr<DeferredDecref>(std::move(deferred));
      return;
    }
    end(now_ns());
  }
  std::vector<int> end(std::int64_t deadline) {
    std::vector<int> late;
    {
      const WithoutGil released;
      late = endpoint->close(deadline);
      deferred->silence();
    }
    deferred->clear();
    return late;
  }
  RpcEndpoint& use() {
    if (endpoint->foreign())
      throw std::runtime_error("this endpoint belongs to the parent process; make another");
    deferred->clear();
    return *endpoint;
  }
};

std::shared_ptr<void> kept(OwnedEndpoint& owner, nb::handle object) {
  if (object.is_none()) return nullptr;
  Py_INCREF(object.ptr());
  return std::shared_ptr<void>(
      object.ptr(), [deferred = owner.deferred](void* p) { deferred->defer(static_cast<PyObject*>(p)); });
}

// -- packets ----------------------------------------------------------------------------------------

struct Received {
  PacketPtr packet;
  std::shared_ptr<RpcEndpoint> endpoint;

  Received(PacketPtr packet, std::shared_ptr<RpcEndpoint> endpoint)
      : packet(std::move(packet)), endpoint(std::move(endpoint)) {}
  Received(Received&&) = default;
  // A call that will not be answered is no longer being handled.
  ~Received() {
    if (packet && packet->handling && !endpoint->foreign()) endpoint->abandon(*packet);
  }
};

struct Pending {
  CallPtr call;
  std::shared_ptr<RpcEndpoint> endpoint;
  std::weak_ptr<void> memory = {};  // of the parts, while it may be read
};

// The reason why a call has no reply.
struct CallFailure {
  CallEnd end;
  std::string text;
};

// Reserved room in a peer's queue, released by the destructor.
struct Room {
  std::shared_ptr<RpcEndpoint> endpoint;
  int peer;
  std::uint64_t bytes;

  Room(std::shared_ptr<RpcEndpoint> endpoint, int peer, std::uint64_t bytes)
      : endpoint(std::move(endpoint)), peer(peer), bytes(bytes) {}
  Room(Room&&) = default;
  ~Room() {
    if (endpoint && !endpoint->foreign()) endpoint->unstage(peer, bytes);
  }
};

int part_buffer(PyObject* object, Py_buffer* view, int flags) {
  Part& part = *nb::inst_ptr<Part>(object);
  return PyBuffer_FillInfo(view, object, part.data.get(), static_cast<Py_ssize_t>(part.bytes), 0, flags);
}

Py_ssize_t part_length(PyObject* object) {
  return static_cast<Py_ssize_t>(nb::inst_ptr<Part>(object)->bytes);
}

PyType_Slot part_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(part_buffer)},
                            {Py_sq_length, reinterpret_cast<void*>(part_length)},
                            {0, nullptr}};

using Parts = std::vector<std::pair<std::uintptr_t, std::uint64_t>>;

// The contents of a packet to send, and the number of bytes that are copied into its message.
struct Contents : PacketContents {
  std::vector<PartToSend> all_parts;
  std::uint64_t copied = 0;

  Contents(OwnedEndpoint& owner, Verb verb, std::uint32_t mailbox, int flags, nb::bytes& bytes,
           const Parts& given, nb::handle keeper) {
    if (flags < 0 || flags > 0xffff) throw std::invalid_argument("flags have 16 bits");
    fields.verb = verb;
    fields.mailbox = mailbox;
    fields.flags = static_cast<std::uint16_t>(flags);
    head = {reinterpret_cast<const std::byte*>(bytes.c_str()), bytes.size()};
    copied = head.size();
    all_parts.reserve(given.size());
    bool apart = false;
    for (auto [address, size] : given) {
      all_parts.push_back({reinterpret_cast<const std::byte*>(address), size});
      if (size > kInsideLimit)
        apart = true;
      else
        copied += size + sizeof(layout::Entry);
    }
    parts = all_parts;
    if (apart) keep = kept(owner, keeper);
  }
  Contents(const Contents&) = delete;
};

Pending request(OwnedEndpoint& owner, int peer, std::uint32_t mailbox, nb::bytes head, const Parts& parts,
                nb::handle keep, nb::handle timeout, int flags, std::string shown) {
  RpcEndpoint& endpoint = owner.use();
  const std::int64_t deadline = timeout.is_none() ? 0 : deadline_of(timeout);
  const Contents contents(owner, Verb::kCall, mailbox, flags, head, parts, keep);
  const std::int64_t limit = deadline == 0 ? until(1e10) : deadline;
  bool room = endpoint.has_room(peer, contents.copied);
  if (!room)
    room = wait_interruptibly(limit,
                              [&](auto until) { return endpoint.await_room(peer, contents.copied, until); });
  const WithoutGil released;
  return {endpoint.request(peer, contents, deadline, !room, std::move(shown)), owner.endpoint, contents.keep};
}

bool send(OwnedEndpoint& owner, int peer, std::uint32_t mailbox, nb::bytes head, const Parts& parts,
          nb::handle keep, nb::handle timeout, int flags) {
  RpcEndpoint& endpoint = owner.use();
  const Contents contents(owner, Verb::kPost, mailbox, flags, head, parts, keep);
  if (!endpoint.has_room(peer, contents.copied) && !wait_interruptibly(deadline_of(timeout), [&](auto until) {
        return endpoint.await_room(peer, contents.copied, until);
      }))
    return false;
  const WithoutGil released;
  return endpoint.send(peer, contents);
}

nb::object hold(OwnedEndpoint& owner, int peer, std::uint32_t mailbox, std::uint64_t bytes,
                nb::handle timeout, bool one_way, std::string shown) {
  RpcEndpoint& endpoint = owner.use();
  const std::int64_t limit = deadline_of(timeout);
  const bool room =
      wait_interruptibly(limit, [&](auto until) { return endpoint.await_room(peer, bytes, until, true); });
  nb::object staged = room ? nb::cast(Room(owner.endpoint, peer, bytes)) : nb::none();
  CallPtr call;
  {
    const WithoutGil released;
    call = endpoint.hold(peer, mailbox, one_way || timeout.is_none() ? 0 : limit, !room, one_way,
                         std::move(shown));
  }
  return nb::make_tuple(nb::cast(Pending{std::move(call), owner.endpoint}), staged);
}

bool fill(OwnedEndpoint& owner, Pending& held, std::uint32_t mailbox, nb::bytes head, const Parts& parts,
          nb::handle keep, bool one_way, int flags) {
  RpcEndpoint& endpoint = owner.use();
  const Contents contents(owner, one_way ? Verb::kPost : Verb::kCall, mailbox, flags, head, parts, keep);
  const WithoutGil released;
  return endpoint.fill(*held.call, contents);
}

bool reply(OwnedEndpoint& owner, Received& to, nb::bytes head, const Parts& parts, nb::handle keep,
           bool failed, int flags) {
  RpcEndpoint& endpoint = owner.use();
  const Contents contents(owner, failed ? Verb::kFailure : Verb::kReply, 0, flags, head, parts, keep);
  const WithoutGil released;
  return endpoint.reply(*to.packet, contents);
}

nb::object take(OwnedEndpoint& owner, std::uint32_t mailbox, nb::handle timeout, std::size_t most) {
  RpcEndpoint& endpoint = owner.use();
  std::vector<PacketPtr> packets;
  bool open = true;
  wait_interruptibly(deadline_of(timeout), [&](auto until) {
    open = endpoint.inbox().take(mailbox, until, most, packets);
    for (auto& packet : packets) packet->taken();
    return !open || !packets.empty();
  });
  if (!open) return nb::none();
  nb::list result;
  for (auto& packet : packets) result.append(nb::cast(Received(std::move(packet), owner.endpoint)));
  return result;
}

nb::object completions(OwnedEndpoint& owner, nb::handle timeout) {
  RpcEndpoint& endpoint = owner.use();
  std::vector<std::int64_t> due;
  bool open = true;
  wait_interruptibly(
      deadline_of(timeout),
      [&](auto until) {
        open = endpoint.tickets().wait(until, due);
        return !open || !due.empty();
      },
      [&] { owner.deferred->clear(); });
  return open ? nb::cast(due) : nb::none();
}

double seconds_since(std::int64_t moment) { return static_cast<double>(now_ns() - moment) / kSecond; }

nb::list pending(OwnedEndpoint& owner) {
  nb::list result;
  for (auto& call : owner.use().pending())
    result.append(
        nb::make_tuple(call->peer, call->number.load(), str(call->shown), seconds_since(call->began)));
  return result;
}

nb::list handled(OwnedEndpoint& owner) {
  nb::list result;
  for (auto& [peer, number, status] : owner.use().handled()) {
    nb::object seconds = nb::none();
    if (status.state == ReceivedCall::kRunning) seconds = nb::float_(seconds_since(status.began));
    if (status.state != ReceivedCall::kAnswered)
      result.append(nb::make_tuple(peer, number, str(status.note), seconds));
  }
  return result;
}

// Waiting for a call in a child that was forked later would never end.
Call& used(const Pending& self) {
  if (self.endpoint->foreign()) throw std::runtime_error("this call belongs to the parent process");
  return *self.call;
}

// The parts of a packet; those that their lender wants back are copied on first use.
std::vector<Part> parts_of(const Received& self) {
  std::vector<Part> parts = self.packet->parts;
  if (std::none_of(parts.begin(), parts.end(), [](auto& part) { return part.wanted_back; })) return parts;
  {
    const WithoutGil released;
    for (Part& part : parts) {
      if (!part.wanted_back) continue;
      if (auto own = self.endpoint->buffers().take(part.bytes)) {
        kernels::copy(own.get(), part.data.get(), part.bytes);
        part.data = std::move(own);
      }
      part.wanted_back = false;
    }
  }
  self.packet->parts = parts;
  return parts;
}

}  // namespace

void bind_post(nb::module_& m) {
  nb::class_<Part>(m, "Part", nb::type_slots(part_slots));

  nb::class_<Received>(m, "Packet")
      .def_prop_ro("peer", [](const Received& self) { return self.packet->peer; })
      .def_prop_ro("call", [](const Received& self) { return self.packet->call; })
      .def_prop_ro("mailbox", [](const Received& self) { return self.packet->header.packet.mailbox; })
      .def_prop_ro("flags", [](const Received& self) { return self.packet->header.packet.flags; })
      .def_prop_ro("failed", [](const Received& self) { return self.packet->verb() == Verb::kFailure; })
      .def_prop_ro("head",
                   [](const Received& self) {
                     const auto head = self.packet->head();
                     return nb::bytes(reinterpret_cast<const char*>(head.data()), head.size());
                   })
      .def_prop_ro("parts", &parts_of)
      .def("remaining",
           [](const Received& self) -> nb::object {
             const auto& handling = self.packet->handling;
             if (!handling || handling->deadline() == 0) return nb::none();
             return nb::float_(std::max(0.0, static_cast<double>(handling->deadline() - now_ns()) / kSecond));
           })
      .def("cancelled",
           [](const Received& self) { return self.packet->handling && self.packet->handling->cancelled(); })
      .def(
          "announce",
          [](const Received& self, std::int64_t ticket) {
            return self.packet->handling && self.packet->handling->announce(ticket);
          },
          nb::arg("ticket"))
      .def(
          "describe",
          [](const Received& self, std::string text) {
            if (self.packet->handling) self.packet->handling->describe(std::move(text));
          },
          nb::arg("text"));

  nb::enum_<CallEnd>(m, "CallEnd")
      .value("TIMEOUT", CallEnd::kTimeout)
      .value("CANCELLED", CallEnd::kCancelled)
      .value("LOST", CallEnd::kLost)
      .value("CLOSED", CallEnd::kClosed)
      .value("REFUSED", CallEnd::kRefused)
      .value("UNSENT", CallEnd::kUnsent);
  nb::class_<CallFailure>(m, "CallFailure")
      .def_ro("end", &CallFailure::end)
      .def_prop_ro("text", [](const CallFailure& failure) { return str(failure.text); });

  nb::class_<Pending>(m, "Call")
      .def_prop_ro("peer", [](const Pending& self) { return self.call->peer; })
      .def_prop_ro("reads", [](const Pending& self) { return !self.memory.expired(); })
      .def_prop_ro("number", [](const Pending& self) { return self.call->number.load(); })
      .def("done", [](const Pending& self) { return self.call->done(); })
      .def(
          "wait",
          [](const Pending& self, nb::handle timeout) {
            if (used(self).done()) return true;
            const CallPtr call = self.call;
            return wait_interruptibly(deadline_of(timeout), [&](auto until) { return call->wait(until); });
          },
          nb::arg("timeout").none())
      .def("error",
           [](const Pending& self) -> nb::object {
             const auto [how, text] = self.call->error();
             return how == CallEnd::kNone ? nb::none() : nb::cast(CallFailure{how, text});
           })
      .def("reply",
           [](const Pending& self) {
             PacketPtr packet = self.call->take_reply();
             if (!packet) throw std::runtime_error("the call has no reply, or it was taken already");
             return Received(std::move(packet), self.endpoint);
           })
      .def(
          "announce", [](const Pending& self, std::int64_t ticket) { return self.call->announce(ticket); },
          nb::arg("ticket"))
      .def(
          "announce_failure",
          [](const Pending& self, std::int64_t ticket, std::uint16_t flags) {
            return self.call->announce_failure(ticket, flags);
          },
          nb::arg("ticket"), nb::arg("flags") = 0)
      .def(
          "cancel",
          [](const Pending& self) { return used(self).done() ? false : self.endpoint->cancel(self.call); },
          nb::call_guard<WithoutGil>());

  nb::class_<Room>(m, "Room");

  nb::class_<OwnedEndpoint>(m, "RpcEndpoint")
      .def_static(
          "make",
          [](std::uint64_t budget, double heartbeat) {
            return new OwnedEndpoint(RpcEndpoint::Options{budget, nanoseconds(heartbeat)});
          },
          nb::arg("budget"), nb::arg("heartbeat"))
      .def(
          "attach",
          [](OwnedEndpoint& self, int fd, int pid, std::int64_t ticket, int memory) {
            try {
              return self.use().attach(fd, pid, ticket, memory);
            } catch (const BadMemory& error) {
              PyErr_SetString(PyExc_ConnectionError, error.what());
            } catch (const OutOfMemory& error) {
              PyErr_SetString(PyExc_ConnectionError, error.what());
            }
            throw nb::python_error();
          },
          nb::arg("fd"), nb::arg("pid"), nb::arg("ticket"), nb::arg("memory") = -1)
      .def_prop_ro("lends", [](OwnedEndpoint& self) { return self.use().lends(); })
      .def("memory", [](OwnedEndpoint& self) { return self.use().memory(); })
      .def(
          "buffer",
          [](OwnedEndpoint& self, std::uint64_t bytes) {
            RpcEndpoint& endpoint = self.use();
            const WithoutGil released;
            Part part{endpoint.part_to_send(bytes), bytes};
            if (!part.data) throw std::bad_alloc();
            return part;
          },
          nb::arg("bytes"))
      .def(
          "drop",
          [](OwnedEndpoint& self, int peer, std::string why) { self.use().drop(peer, std::move(why)); },
          nb::arg("peer"), nb::arg("why"))
      .def(
          "lost",
          [](OwnedEndpoint& self, int peer) -> nb::object {
            const auto why = self.use().lost(peer);
            return why ? str(*why) : nb::none();
          },
          nb::arg("peer"))
      .def("request", &request, nb::arg("peer"), nb::arg("mailbox"), nb::arg("head"), nb::arg("parts"),
           nb::arg("keep").none(), nb::arg("timeout").none(), nb::arg("flags") = 0, nb::arg("shown") = "")
      .def("post", &send, nb::arg("peer"), nb::arg("mailbox"), nb::arg("head"), nb::arg("parts"),
           nb::arg("keep").none(), nb::arg("timeout").none(), nb::arg("flags") = 0)
      .def("reply", &reply, nb::arg("packet"), nb::arg("head"), nb::arg("parts"), nb::arg("keep").none(),
           nb::arg("failed") = false, nb::arg("flags") = 0)
      .def("hold", &hold, nb::arg("peer"), nb::arg("mailbox"), nb::arg("bytes"), nb::arg("timeout").none(),
           nb::arg("one_way") = false, nb::arg("shown") = "")
      .def("fill", &fill, nb::arg("held"), nb::arg("mailbox"), nb::arg("head"), nb::arg("parts"),
           nb::arg("keep").none(), nb::arg("one_way") = false, nb::arg("flags") = 0)
      .def(
          "give_up",
          [](OwnedEndpoint& self, const Pending& held, std::string why) {
            RpcEndpoint& endpoint = self.use();
            const WithoutGil released;
            endpoint.abandon_held(held.call, std::move(why));
          },
          nb::arg("held"), nb::arg("why"))
      .def("take", &take, nb::arg("mailbox"), nb::arg("timeout").none(), nb::arg("most"))
      .def(
          "waiting",
          [](OwnedEndpoint& self, std::uint32_t mailbox) { return self.use().inbox().waiting(mailbox); },
          nb::arg("mailbox"))
      .def(
          "open", [](OwnedEndpoint& self, std::uint32_t mailbox) { self.use().inbox().open(mailbox); },
          nb::arg("mailbox"))
      .def(
          "release", [](OwnedEndpoint& self, std::uint32_t mailbox) { self.use().inbox().release(mailbox); },
          nb::arg("mailbox"))
      .def(
          "watch",
          [](OwnedEndpoint& self, std::int64_t ticket, double patience) {
            self.use().watch_inbox(ticket, nanoseconds(patience));
          },
          nb::arg("ticket"), nb::arg("patience"))
      .def(
          "announce", [](OwnedEndpoint& self, std::int64_t ticket) { self.use().tickets().add(ticket); },
          nb::arg("ticket"))
      .def("completions", &completions, nb::arg("timeout").none())
      .def("stats",
           [](OwnedEndpoint& self) {
             const auto stats = self.use().stats();
             nb::dict result;
             result["peers"] = stats.peers;
             result["calls"] = stats.calls;
             result["letters"] = stats.packets;
             result["handled"] = stats.handled;
             result["made"] = stats.made;
             result["queued"] = stats.queued;
             result["granted"] = stats.granted;
             result["lent"] = stats.lent;
             result["kept"] = stats.kept;
             return result;
           })
      .def("pending", &pending)
      .def("handled", &handled)
      .def(
          "disconnect", [](OwnedEndpoint& self, int peer) { self.use().disconnect(peer); }, nb::arg("peer"))
      .def(
          "pause_heartbeats", [](OwnedEndpoint& self, bool silent) { self.use().pause_heartbeats(silent); },
          nb::arg("silent"))
      .def(
          "close",
          [](OwnedEndpoint& self, double timeout) {
            nb::list late;
            if (!self.endpoint->foreign())
              for (const int peer : self.end(until(timeout))) late.append(peer);
            return late;
          },
          nb::arg("timeout"));
}
