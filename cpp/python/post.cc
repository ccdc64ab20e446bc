// The native endpoint of RPC for rpc/connection/post.py: takes heads and addresses, returns letters.
//
// The GIL is released for calls that may block or wake another thread.
#include "rpc/post.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <new>

#include "python/bindings.h"
#include "python/calls.h"
#include "python/slices.h"
#include "python/text.h"

namespace nb = nanobind;
using namespace shoal;

namespace {

// -- Python objects held by a post -------------------------------------------------------------------

// Objects to be released by a thread that holds the GIL.
class Graveyard {
 public:
  explicit Graveyard(std::function<void()> nudge) : nudge_(std::move(nudge)) {}
  ~Graveyard() { objects_.clear(); }
  void bury(PyObject* object) {
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

// A post owned by Python.  A forked child leaks it, because its locks may be held forever.
struct Endpoint {
  std::shared_ptr<Post> post;
  std::shared_ptr<Graveyard> graveyard;

  explicit Endpoint(const Post::Options& options) : post(std::make_shared<Post>(options)) {
    graveyard = std::make_shared<Graveyard>([post = post.get()] { post->tickets().nudge(); });
  }
  ~Endpoint() {
    if (post->foreign()) {
      new std::shared_ptr<Post>(std::move(post));
      new std::shared_ptr<Graveyard>(std::move(graveyard));
      return;
    }
    end(now_ns());
  }
  std::vector<int> end(std::int64_t deadline) {
    std::vector<int> late;
    {
      nb::gil_scoped_release release;
      late = post->close(deadline);
      graveyard->silence();
    }
    graveyard->clear();
    return late;
  }
  Post& use() {
    if (post->foreign()) throw std::runtime_error("this post belongs to the parent process; make another");
    graveyard->clear();
    return *post;
  }
};

std::shared_ptr<void> kept(Endpoint& endpoint, nb::handle object) {
  if (object.is_none()) return nullptr;
  Py_INCREF(object.ptr());
  return std::shared_ptr<void>(object.ptr(), [graveyard = endpoint.graveyard](void* p) {
    graveyard->bury(static_cast<PyObject*>(p));
  });
}

// -- letters ----------------------------------------------------------------------------------------

struct Received {
  LetterPtr letter;
  std::shared_ptr<Post> post;

  Received(LetterPtr letter, std::shared_ptr<Post> post) : letter(std::move(letter)), post(std::move(post)) {}
  Received(Received&&) = default;
  // A call that will not be answered is no longer being handled.
  ~Received() {
    if (letter && letter->handling && !post->foreign()) post->abandon(*letter);
  }
};

struct Pending {
  CallPtr call;
  std::shared_ptr<Post> post;
  std::weak_ptr<void> memory = {};  // of the parts, while it may be read
};

// The reason why a call has no reply.
struct CallFailure {
  CallEnd end;
  std::string text;
};

// Reserved room in a peer's queue, released by the destructor.
struct Room {
  std::shared_ptr<Post> post;
  int peer;
  std::uint64_t bytes;

  Room(std::shared_ptr<Post> post, int peer, std::uint64_t bytes)
      : post(std::move(post)), peer(peer), bytes(bytes) {}
  Room(Room&&) = default;
  ~Room() {
    if (post && !post->foreign()) post->unstage(peer, bytes);
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

// The contents of a letter to send.
struct Contents {
  LetterFields fields;
  std::span<const std::byte> head;
  std::vector<PartToSend> parts;
  std::uint64_t copied = 0;
  bool apart = false;

  Contents(Verb verb, std::uint32_t mailbox, int flags, nb::bytes& bytes, const Parts& given) {
    if (flags < 0 || flags > 0xffff) throw std::invalid_argument("flags have 16 bits");
    fields.verb = verb;
    fields.mailbox = mailbox;
    fields.flags = static_cast<std::uint16_t>(flags);
    head = {reinterpret_cast<const std::byte*>(bytes.c_str()), bytes.size()};
    copied = head.size();
    parts.reserve(given.size());
    for (auto [address, size] : given) {
      parts.push_back({reinterpret_cast<const std::byte*>(address), size});
      if (size > kInsideLimit)
        apart = true;
      else
        copied += size + sizeof(layout::Entry);
    }
  }
};

Pending request(Endpoint& endpoint, int peer, std::uint32_t mailbox, nb::bytes head, const Parts& parts,
                nb::handle keep, nb::handle timeout, int flags, std::string shown, std::int64_t function) {
  Post& post = endpoint.use();
  const std::int64_t deadline = timeout.is_none() ? 0 : deadline_of(timeout);
  const Contents contents(Verb::kCall, mailbox, flags, head, parts);
  auto keeper = contents.apart ? kept(endpoint, keep) : nullptr;
  const std::int64_t limit = deadline == 0 ? until(1e10) : deadline;
  bool room = post.has_room(peer, contents.copied);
  if (!room)
    room = in_slices(limit, [&](auto until) { return post.await_room(peer, contents.copied, until); });
  std::weak_ptr<void> memory = keeper;
  nb::gil_scoped_release release;
  return {post.request(peer, contents.fields, contents.head, contents.parts, std::move(keeper), deadline,
                       !room, {std::move(shown), function}),
          endpoint.post, std::move(memory)};
}

bool send(Endpoint& endpoint, int peer, std::uint32_t mailbox, nb::bytes head, const Parts& parts,
          nb::handle keep, nb::handle timeout, int flags) {
  Post& post = endpoint.use();
  const Contents contents(Verb::kPost, mailbox, flags, head, parts);
  auto keeper = contents.apart ? kept(endpoint, keep) : nullptr;
  if (!post.has_room(peer, contents.copied) && !in_slices(deadline_of(timeout), [&](auto until) {
        return post.await_room(peer, contents.copied, until);
      }))
    return false;
  nb::gil_scoped_release release;
  return post.send(peer, contents.fields, contents.head, contents.parts, std::move(keeper));
}

nb::object hold(Endpoint& endpoint, int peer, std::uint32_t mailbox, std::uint64_t bytes, nb::handle timeout,
                bool one_way, std::string shown, std::int64_t function) {
  Post& post = endpoint.use();
  const std::int64_t limit = deadline_of(timeout);
  const bool room = in_slices(limit, [&](auto until) { return post.await_room(peer, bytes, until, true); });
  nb::object staged = room ? nb::cast(Room(endpoint.post, peer, bytes)) : nb::none();
  CallPtr call;
  {
    nb::gil_scoped_release release;
    call = post.hold(peer, mailbox, one_way || timeout.is_none() ? 0 : limit, !room, one_way,
                     {std::move(shown), function});
  }
  return nb::make_tuple(nb::cast(Pending{std::move(call), endpoint.post}), staged);
}

bool fill(Endpoint& endpoint, Pending& held, std::uint32_t mailbox, nb::bytes head, const Parts& parts,
          nb::handle keep, bool one_way, int flags) {
  Post& post = endpoint.use();
  const Contents contents(one_way ? Verb::kPost : Verb::kCall, mailbox, flags, head, parts);
  auto keeper = contents.apart ? kept(endpoint, keep) : nullptr;
  nb::gil_scoped_release release;
  return post.fill(*held.call, contents.fields, contents.head, contents.parts, std::move(keeper));
}

bool reply(Endpoint& endpoint, Received& to, nb::bytes head, const Parts& parts, nb::handle keep, bool failed,
           int flags) {
  Post& post = endpoint.use();
  const Contents contents(failed ? Verb::kFailure : Verb::kReply, 0, flags, head, parts);
  auto keeper = contents.apart ? kept(endpoint, keep) : nullptr;
  nb::gil_scoped_release release;
  return post.reply(*to.letter, contents.fields, contents.head, contents.parts, std::move(keeper));
}

nb::object take(Endpoint& endpoint, std::uint32_t mailbox, nb::handle timeout, std::size_t most) {
  Post& post = endpoint.use();
  std::vector<LetterPtr> letters;
  bool open = true;
  in_slices(deadline_of(timeout), [&](auto until) {
    open = post.inbox().take(mailbox, until, most, letters);
    for (auto& letter : letters) letter->taken();
    return !open || !letters.empty();
  });
  if (!open) return nb::none();
  nb::list result;
  for (auto& letter : letters) result.append(nb::cast(Received(std::move(letter), endpoint.post)));
  return result;
}

nb::object completions(Endpoint& endpoint, nb::handle timeout) {
  Post& post = endpoint.use();
  std::vector<std::int64_t> due;
  bool open = true;
  in_slices(
      deadline_of(timeout),
      [&](auto until) {
        open = post.tickets().wait(until, due);
        return !open || !due.empty();
      },
      [&] { endpoint.graveyard->clear(); });
  return open ? nb::cast(due) : nb::none();
}

double seconds_since(std::int64_t moment) { return static_cast<double>(now_ns() - moment) / kSecond; }

nb::list pending(Endpoint& endpoint) {
  nb::list result;
  for (auto& call : endpoint.use().pending(0))
    result.append(
        nb::make_tuple(call->peer, call->number.load(), str(call->note.shown), seconds_since(call->began)));
  return result;
}

nb::list handled(Endpoint& endpoint) {
  nb::list result;
  for (auto& [peer, number, standing] : endpoint.use().handled()) {
    nb::object seconds = nb::none();
    if (standing.state == Handling::kRunning) seconds = nb::float_(seconds_since(standing.began));
    if (standing.state != Handling::kAnswered)
      result.append(nb::make_tuple(peer, number, str(standing.note), seconds));
  }
  return result;
}

// Waiting for a call in a child that was forked later would never end.
Call& used(const Pending& self) {
  if (self.post->foreign()) throw std::runtime_error("this call belongs to the parent process");
  return *self.call;
}

}  // namespace

void bind_post(nb::module_& m) {
  nb::class_<Part>(m, "Part", nb::type_slots(part_slots), "One received buffer.");

  nb::class_<Received>(m, "Letter", "A received letter.")
      .def_prop_ro("peer", [](const Received& self) { return self.letter->peer; })
      .def_prop_ro("call", [](const Received& self) { return self.letter->call; })
      .def_prop_ro("mailbox", [](const Received& self) { return self.letter->header.letter.mailbox; })
      .def_prop_ro("flags", [](const Received& self) { return self.letter->header.letter.flags; })
      .def_prop_ro("failed", [](const Received& self) { return self.letter->verb() == Verb::kFailure; })
      .def_prop_ro("head",
                   [](const Received& self) {
                     const auto head = self.letter->head();
                     return nb::bytes(reinterpret_cast<const char*>(head.data()), head.size());
                   })
      .def_prop_ro("parts", [](const Received& self) { return self.letter->parts; })
      .def("remaining",
           [](const Received& self) -> nb::object {
             const auto& handling = self.letter->handling;
             if (!handling || handling->deadline() == 0) return nb::none();
             return nb::float_(std::max(0.0, static_cast<double>(handling->deadline() - now_ns()) / kSecond));
           })
      .def("cancelled",
           [](const Received& self) { return self.letter->handling && self.letter->handling->cancelled(); })
      .def(
          "announce",
          [](const Received& self, std::int64_t ticket) {
            return self.letter->handling && self.letter->handling->announce(ticket);
          },
          nb::arg("ticket"))
      .def(
          "describe",
          [](const Received& self, std::string text) {
            if (self.letter->handling) self.letter->handling->describe(std::move(text));
          },
          nb::arg("text"));

  nb::enum_<CallEnd>(m, "CallEnd", "Why a call has no reply.")
      .value("TIMEOUT", CallEnd::kTimeout)
      .value("CANCELLED", CallEnd::kCancelled)
      .value("LOST", CallEnd::kLost)
      .value("CLOSED", CallEnd::kClosed)
      .value("REFUSED", CallEnd::kRefused)
      .value("UNSENT", CallEnd::kUnsent);
  nb::class_<CallFailure>(m, "CallFailure", "Why a call has no reply, and details.")
      .def_ro("end", &CallFailure::end)
      .def_prop_ro("text", [](const CallFailure& failure) { return str(failure.text); });

  nb::class_<Pending>(m, "Call", "A request on its way.")
      .def_prop_ro("peer", [](const Pending& self) { return self.call->peer; })
      .def_prop_ro("reads", [](const Pending& self) { return !self.memory.expired(); })
      .def_prop_ro("number", [](const Pending& self) { return self.call->number.load(); })
      .def("done", [](const Pending& self) { return self.call->done(); })
      .def(
          "wait",
          [](const Pending& self, nb::handle timeout) {
            if (used(self).done()) return true;
            const CallPtr call = self.call;
            return in_slices(deadline_of(timeout), [&](auto until) { return call->wait(until); });
          },
          nb::arg("timeout").none())
      .def("error",
           [](const Pending& self) -> nb::object {
             const auto [how, text] = self.call->error();
             return how == CallEnd::kNone ? nb::none() : nb::cast(CallFailure{how, text});
           })
      .def("reply",
           [](const Pending& self) {
             LetterPtr letter = self.call->take_reply();
             if (!letter) throw std::runtime_error("the call has no reply, or it was taken already");
             return Received(std::move(letter), self.post);
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
          [](const Pending& self) { return used(self).done() ? false : self.post->cancel(self.call); },
          nb::call_guard<nb::gil_scoped_release>());

  nb::class_<Room>(m, "Room", "Room among what is on its way to a peer.");

  nb::class_<Endpoint>(m, "Post", "The native endpoint of one agent.")
      .def_static(
          "make",
          [](std::uint64_t budget, double heartbeat) {
            return new Endpoint(Post::Options{budget, nanoseconds(heartbeat)});
          },
          nb::arg("budget"), nb::arg("heartbeat"))
      .def(
          "attach",
          [](Endpoint& self, int fd, int pid, std::int64_t ticket, int memory) {
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
      .def_prop_ro("lends", [](Endpoint& self) { return self.use().lends(); })
      .def("memory", [](Endpoint& self) { return self.use().memory(); })
      .def(
          "drop", [](Endpoint& self, int peer, std::string why) { self.use().drop(peer, std::move(why)); },
          nb::arg("peer"), nb::arg("why"))
      .def(
          "lost",
          [](Endpoint& self, int peer) -> nb::object {
            const auto why = self.use().lost(peer);
            return why ? str(*why) : nb::none();
          },
          nb::arg("peer"))
      .def("request", &request, nb::arg("peer"), nb::arg("mailbox"), nb::arg("head"), nb::arg("parts"),
           nb::arg("keep").none(), nb::arg("timeout").none(), nb::arg("flags") = 0, nb::arg("shown") = "",
           nb::arg("function") = -1)
      .def("post", &send, nb::arg("peer"), nb::arg("mailbox"), nb::arg("head"), nb::arg("parts"),
           nb::arg("keep").none(), nb::arg("timeout").none(), nb::arg("flags") = 0)
      .def("reply", &reply, nb::arg("letter"), nb::arg("head"), nb::arg("parts"), nb::arg("keep").none(),
           nb::arg("failed") = false, nb::arg("flags") = 0)
      .def("hold", &hold, nb::arg("peer"), nb::arg("mailbox"), nb::arg("bytes"), nb::arg("timeout").none(),
           nb::arg("one_way") = false, nb::arg("shown") = "", nb::arg("function") = -1)
      .def("fill", &fill, nb::arg("held"), nb::arg("mailbox"), nb::arg("head"), nb::arg("parts"),
           nb::arg("keep").none(), nb::arg("one_way") = false, nb::arg("flags") = 0)
      .def(
          "give_up",
          [](Endpoint& self, const Pending& held, std::string why) {
            Post& post = self.use();
            nb::gil_scoped_release release;
            post.give_up(held.call, std::move(why));
          },
          nb::arg("held"), nb::arg("why"))
      .def("take", &take, nb::arg("mailbox"), nb::arg("timeout").none(), nb::arg("most"))
      .def(
          "waiting",
          [](Endpoint& self, std::uint32_t mailbox) { return self.use().inbox().waiting(mailbox); },
          nb::arg("mailbox"))
      .def(
          "open", [](Endpoint& self, std::uint32_t mailbox) { self.use().inbox().open(mailbox); },
          nb::arg("mailbox"))
      .def(
          "release", [](Endpoint& self, std::uint32_t mailbox) { self.use().inbox().release(mailbox); },
          nb::arg("mailbox"))
      .def(
          "watch",
          [](Endpoint& self, std::int64_t ticket, double patience) {
            self.use().watch(ticket, nanoseconds(patience));
          },
          nb::arg("ticket"), nb::arg("patience"))
      .def(
          "announce", [](Endpoint& self, std::int64_t ticket) { self.use().tickets().add(ticket); },
          nb::arg("ticket"))
      .def("completions", &completions, nb::arg("timeout").none())
      .def("stats",
           [](Endpoint& self) {
             const auto stats = self.use().stats();
             nb::dict result;
             result["peers"] = stats.peers;
             result["calls"] = stats.calls;
             result["letters"] = stats.letters;
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
          "functions_in_use",
          [](Endpoint& self, int peer) {
            std::vector<std::int64_t> numbers;
            for (auto& call : self.use().pending(peer))
              if (call->note.function >= 0) numbers.push_back(call->note.function);
            return numbers;
          },
          nb::arg("peer"))
      .def(
          "disconnect", [](Endpoint& self, int peer) { self.use().disconnect(peer); }, nb::arg("peer"))
      .def(
          "pause_heartbeats", [](Endpoint& self, bool silent) { self.use().pause_heartbeats(silent); },
          nb::arg("silent"))
      .def(
          "close",
          [](Endpoint& self, double timeout) {
            nb::list late;
            if (!self.post->foreign())
              for (const int peer : self.end(until(timeout))) late.append(peer);
            return late;
          },
          nb::arg("timeout"));
}
