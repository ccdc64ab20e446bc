// The fast path of a group's operations: from the user's tensors to a future in one call.
//
// Python's work for a call (a lock, a number, a key, a record, a source and a future) takes several times as
// long as a small all-reduce.  Here it is one step under the GIL, as seen by other threads.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <structmember.h>

#include <algorithm>
#include <new>
#include <optional>

#include "collectives/calls.h"
#include "engine/group.h"
#include "python/bindings.h"
#include "python/record.h"
#include "python/source.h"
#include "python/tensors.h"
#include "python/without_gil.h"

namespace nb = nanobind;

namespace shoal {
namespace {

PyObject* scope = nullptr;   // the context variable with the running callback, or None
PyObject* dtypes = nullptr;  // a tuple of torch's dtypes by code
long max_tag = 0;            // of a program's messages
PyObject *name_acquire = nullptr, *name_release = nullptr, *name_locked = nullptr;

struct FastSubmit {
  PyObject_HEAD std::shared_ptr<Group> group;
  PyObject* channel;  // the NativeChannel
  PyObject* lock;     // the group's threading.Lock; its holder is assigning a number
  PyObject* append;   // of the flight recorder's records, or None
  std::uint64_t ident;
  unsigned long long number;  // of the next call
  char open;                  // whether calls are accepted
  char sends, receives;       // whether these are too: the first of each takes the slow path
};

FastSubmit* as_shortcut(PyObject* object) { return reinterpret_cast<FastSubmit*>(object); }

// The tensors that a call reads, or writes: none, one, or a tuple of one for each rank.
struct Side {
  std::vector<Span> spans;
  PlainTensor first;
  bool listed = false;

  bool none() const { return spans.empty(); }
  bool one() const { return !none() && !listed; }
  std::uint64_t count() const { return first.count * spans.size(); }

  // Takes a tensor, a tuple or None; false for unusual tensors, and for those that differ in dtype or size.
  bool take(PyObject* given, int ranks) {
    if (given == Py_None) return true;
    listed = PyTuple_CheckExact(given);
    const Py_ssize_t size = listed ? PyTuple_GET_SIZE(given) : 1;
    if (listed && size != ranks) return false;
    spans.reserve(static_cast<std::size_t>(size));
    for (Py_ssize_t i = 0; i < size; ++i) {
      const auto tensor = plain_tensor(listed ? PyTuple_GET_ITEM(given, i) : given);
      if (!tensor) return false;
      if (i == 0) first = *tensor;
      if (tensor->dtype != first.dtype || tensor->count != first.count) return false;
      spans.push_back(tensor->span);
    }
    return true;
  }
};

// Whether the tensors have the numbers and sizes in the table in src/shoal/spec.py.
bool fit(Kind kind, const Side& in, const Side& out, int ranks, bool is_root) {
  // One tensor, and one part of its size for each rank.
  const auto parts = [&](const Side& whole, const Side& all) {
    const auto share = all.listed ? 1 : static_cast<std::uint64_t>(ranks);
    return whole.one() && !all.none() && all.first.count == whole.first.count * share;
  };
  // The same, with a list that only the root has.
  const auto parts_at_root = [&](const Side& whole, const Side& all) {
    return is_root ? all.listed && parts(whole, all) : whole.one() && all.none();
  };
  switch (kind) {
    case Kind::kAllReduce:
      return in.one() && out.one();
    case Kind::kBroadcast:
      return (is_root ? in.one() : in.none()) && out.one();
    case Kind::kReduce:
      return in.one() && (is_root ? out.one() : out.none());
    case Kind::kAllGather:
      return parts(in, out);
    case Kind::kReduceScatter:
      return parts(out, in);
    case Kind::kGather:
      return parts_at_root(in, out);
    case Kind::kScatter:
      return parts_at_root(out, in);
    case Kind::kAllToAll:
      if (in.listed) return out.listed && in.first.count == out.first.count;
      return in.one() && out.one() && !in.first.shape.empty() && in.first.shape[0] % ranks == 0 &&
             std::ranges::equal(in.first.shape, out.first.shape);
    default:
      return false;
  }
}

// The count that must be equal on all ranks (see backend/native/channel.py).
std::uint64_t count_of(Kind kind, const Side& in, const Side& out) {
  if (kind == Kind::kAllToAll) return 0;
  return kind == Kind::kReduce || kind == Kind::kAllGather || kind == Kind::kGather ? in.first.count
                                                                                    : out.first.count;
}

// The dtype and element count of the first tensor, for the record.
struct Noted {
  DType dtype = DType::kUInt8;  // also without a tensor
  std::uint64_t count = 0;
};

// The request of a collective with plain tensors; nullopt in unusual or invalid cases.
std::optional<Request> request_of(const Group& group, Kind kind, PyObject* in, PyObject* out, RedOp op,
                                  int root, double seconds, Noted& noted) {
  if (op == RedOp::kPremulSum || root >= group.size()) return std::nullopt;
  if (kind == Kind::kBarrier)
    return in == Py_None && out == Py_None
               ? std::optional(collective_request(group, kind, {}, op, 0, root, seconds))
               : std::nullopt;
  // Python connects the mover when it submits the first collective that is moved.
  if (group.moved() && group.mover() == nullptr) return std::nullopt;
  // In other operations members write the output before all have read the input.
  const bool in_place =
      in == out && (kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kBroadcast);
  Side from, to;
  if (!to.take(out, group.size()) || !(in_place || from.take(in, group.size()))) return std::nullopt;
  if (in_place) from = to;
  if (!fit(kind, from, to, group.size(), root == group.rank())) return std::nullopt;
  const Side& some = from.none() ? to : from;
  if (!legal(some.first.dtype, op)) return std::nullopt;
  if (!from.none() && !to.none() && from.first.dtype != to.first.dtype) return std::nullopt;
  noted = {some.first.dtype, some.count()};
  Request request =
      collective_request(group, kind, some.first.dtype, op, count_of(kind, from, to), root, seconds);
  request.in = std::move(from.spans);
  request.out = std::move(to.spans);
  return overlapping(request, in_place) ? std::nullopt : std::optional(std::move(request));
}

bool truth(PyObject* object) {  // takes the reference
  const bool result = object == Py_True;
  if (object == nullptr) PyErr_Clear();
  Py_XDECREF(object);
  return result;
}

// Whether the call may take the next number now.  No Python code may run until the number is used.
bool can_submit(const FastSubmit& self) {
  return self.open && self.group && !self.group->broken() &&
         !truth(PyObject_CallMethodNoArgs(self.lock, name_locked));
}

// Submits the request and assigns its number, if it is a collective; null if the call must take the slow
// path.
OperationPtr go(FastSubmit& self, Request request) {
  if (!can_submit(self)) return nullptr;
  const bool numbered = request.collective();
  if (numbered) request.channel = self.number;
  const std::shared_ptr<Group> group = self.group;
  if (is_quick(request)) {
    self.number += numbered;
    return group->submit(std::move(request));
  }
  // Other threads run meanwhile, and must not get a number before this request is submitted.
  if (!truth(PyObject_CallMethodOneArg(self.lock, name_acquire, Py_False))) return nullptr;
  OperationPtr op;
  try {
    const WithoutGil released;
    op = group->submit(std::move(request));
  } catch (const std::bad_alloc&) {  // the slow path raises it, if it still occurs
  }
  if (op) self.number += numbered;
  truth(PyObject_CallMethodNoArgs(self.lock, name_release));
  return op;
}

// A call from Python, and the first of its tensors.
struct Given {
  PyObject *kind = nullptr, *in = nullptr, *out = nullptr;
  int root = -1, peer = -1;
  long long tag = -1;
  Noted noted = {};
};

// The future of a call; None if it must take the slow path; null with an exception set.
PyObject* future_of(FastSubmit& self, const Given& call, Request request) {
  // Create all Python objects first, because this may run the garbage collector.
  const bool one = call.in == call.out || call.in == Py_None || call.out == Py_None;
  nb::object keep = one ? nb::borrow(call.out == Py_None ? call.in : call.out)
                        : nb::steal(PyTuple_Pack(2, call.in, call.out));
  nb::object source, future, record;
  const nb::object value =
      PyTuple_CheckExact(call.out) ? nb::steal(PySequence_List(call.out)) : nb::borrow(call.out);
  if (keep.is_valid() && value.is_valid())
    source = nb::steal(reinterpret_cast<PyObject*>(new_source(self.channel, keep.ptr())));
  if (source.is_valid()) future = nb::steal(new_future(reinterpret_cast<Source*>(source.ptr()), value.ptr()));
  const bool recorded = self.append != Py_None;
  if (future.is_valid() && recorded)
    record = nb::steal(reinterpret_cast<PyObject*>(new_record({
        .future = future.ptr(),
        .kind = call.kind,
        .dtype = PyTuple_GET_ITEM(dtypes, static_cast<Py_ssize_t>(call.noted.dtype)),
        .count = call.noted.count,
        .root = call.root,
        .peer = call.peer,
        .tag = call.tag,
    })));
  if (!future.is_valid() || (recorded && !record.is_valid())) return nullptr;
  const bool numbered = request.collective();
  OperationPtr operation = go(self, std::move(request));
  if (!operation) Py_RETURN_NONE;
  const std::uint64_t number = operation->request().channel;
  const std::int64_t submitted = operation->submitted();
  reinterpret_cast<Source*>(source.ptr())->op = std::move(operation);
  if (numbered) set_key(future.ptr(), future_key(self.ident, number));
  if (recorded) {
    if (numbered) as_record(record.ptr())->fields.number = static_cast<long long>(number);
    as_record(record.ptr())->submitted = submitted;
    set_record(future.ptr(), as_record(record.ptr()));
    Py_XDECREF(PyObject_CallOneArg(self.append, record.ptr()));
  }
  if (PyErr_Occurred()) PyErr_Clear();  // without memory for a key or a record, the call proceeds
  return future.release().ptr();
}

// A timeout in seconds; 0 for what is not positive, for which Python raises a detailed error.
double seconds_of(PyObject* timeout) {
  const double seconds = PyFloat_CheckExact(timeout)  ? PyFloat_AS_DOUBLE(timeout)
                         : PyLong_CheckExact(timeout) ? PyLong_AsDouble(timeout)
                                                      : 0.0;
  if (PyErr_Occurred()) PyErr_Clear();
  return seconds > 0 ? seconds : 0.0;
}

// The tensor or tensors of a call, which the program cannot exchange meanwhile.
nb::object fixed(PyObject* given) {
  return PyList_CheckExact(given) ? nb::steal(PyList_AsTuple(given)) : nb::borrow(given);
}

// submit(kind, x, out, op, root, timeout): a future, or None if the call must take the slow path.
PyObject* submit(PyObject* object, PyObject* const* arguments, Py_ssize_t count) {
  FastSubmit& self = *as_shortcut(object);
  if (count != 6) {
    PyErr_SetString(PyExc_TypeError, "submit takes kind, x, out, op, root and timeout");
    return nullptr;
  }
  PyObject* callback = nullptr;
  const long op = PyLong_AsLong(arguments[3]), root = PyLong_AsLong(arguments[4]);
  if (PyErr_Occurred() || PyContextVar_Get(scope, nullptr, &callback) < 0) return nullptr;
  const bool plain = callback == nullptr || callback == Py_None;
  Py_XDECREF(callback);
  const double seconds = seconds_of(arguments[5]);
  // A group's first call may be monitored.
  if (!plain || seconds == 0 || self.number == 0 || !can_submit(self)) Py_RETURN_NONE;
  const nb::object in = fixed(arguments[1]), out = fixed(arguments[2]);
  if (!in.is_valid() || !out.is_valid()) return nullptr;
  Given call{.kind = arguments[0], .in = in.ptr(), .out = out.ptr(), .root = static_cast<int>(root)};
  try {
    auto request = request_of(*self.group, static_cast<Kind>(PyLong_AsLong(call.kind)), call.in, call.out,
                              static_cast<RedOp>(op), call.root, seconds, call.noted);
    if (!request) Py_RETURN_NONE;
    return future_of(self, call, std::move(*request));
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

// The request of a message of one plain tensor with the arguments kind, x, peer, tag and timeout; nullopt in
// unusual or invalid cases.
std::optional<Request> message_of(const Group& group, PyObject* const* arguments, Given& call) {
  const auto kind = static_cast<Kind>(PyLong_AsLong(arguments[0]));
  if (!PyLong_CheckExact(arguments[2]) || !PyLong_CheckExact(arguments[3])) return std::nullopt;
  const long peer = PyLong_AsLong(arguments[2]), tag = PyLong_AsLong(arguments[3]);
  if (PyErr_Occurred()) {  // too large for a long
    PyErr_Clear();
    return std::nullopt;
  }
  const double seconds = seconds_of(arguments[4]);
  const bool sends = kind == Kind::kSend;
  if (seconds == 0 || peer < (sends ? 0 : -1) || peer >= group.size() || peer == group.rank() || tag < 0 ||
      tag > max_tag)
    return std::nullopt;
  const auto tensor = plain_tensor(arguments[1]);
  if (!tensor || tensor->shape.size() > kMaxDims) return std::nullopt;
  Request request = message_request(kind, tensor->dtype, tensor->shape, static_cast<int>(peer),
                                    static_cast<std::uint64_t>(tag), seconds);
  (sends ? request.in : request.out).assign(1, tensor->span);
  call = {.kind = arguments[0],
          .in = sends ? arguments[1] : Py_None,
          .out = sends ? Py_None : arguments[1],
          .peer = static_cast<int>(peer),
          .tag = tag,
          .noted = {tensor->dtype, tensor->count}};
  return request;
}

// message(kind, x, peer, tag, timeout): a future, or None if the call must take the slow path.
PyObject* message(PyObject* object, PyObject* const* arguments, Py_ssize_t count) {
  FastSubmit& self = *as_shortcut(object);
  if (count != 5) {
    PyErr_SetString(PyExc_TypeError, "message takes kind, x, peer, tag and timeout");
    return nullptr;
  }
  if (!can_submit(self)) Py_RETURN_NONE;
  try {
    Given call;
    auto request = message_of(*self.group, arguments, call);
    if (!request || !(request->kind == Kind::kSend ? self.sends : self.receives)) Py_RETURN_NONE;
    return future_of(self, call, std::move(*request));
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

// accepts(kind, x, peer, tag, timeout): whether these are usual, valid arguments of `message`.
PyObject* accepts(PyObject* object, PyObject* const* arguments, Py_ssize_t count) {
  const FastSubmit& self = *as_shortcut(object);
  if (count != 5) {
    PyErr_SetString(PyExc_TypeError, "accepts takes kind, x, peer, tag and timeout");
    return nullptr;
  }
  try {
    Given call;
    return PyBool_FromLong(self.group && message_of(*self.group, arguments, call));
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

PyObject* detach(PyObject* object, PyObject*) {
  as_shortcut(object)->open = 0;
  as_shortcut(object)->group.reset();
  Py_RETURN_NONE;
}

PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *core, *channel, *lock, *append;
  unsigned long long ident;
  if (!PyArg_ParseTuple(arguments, "OOOKO", &core, &channel, &lock, &ident, &append)) return nullptr;
  std::shared_ptr<Group> group;
  if (!nb::try_cast(nb::handle(core), group) || !group) {
    PyErr_SetString(PyExc_TypeError, "Shortcut takes a Group of the core");
    return nullptr;
  }
  auto* self = as_shortcut(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  new (&self->group) std::shared_ptr<Group>(std::move(group));
  self->channel = Py_NewRef(channel);
  self->lock = Py_NewRef(lock);
  self->append = Py_NewRef(append);
  self->ident = ident;
  self->open = 1;
  return reinterpret_cast<PyObject*>(self);
}

int traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(as_shortcut(object)->channel);
  Py_VISIT(as_shortcut(object)->lock);
  Py_VISIT(as_shortcut(object)->append);
  return 0;
}

int clear(PyObject* object) {
  as_shortcut(object)->open = 0;
  Py_CLEAR(as_shortcut(object)->channel);
  Py_CLEAR(as_shortcut(object)->lock);
  Py_CLEAR(as_shortcut(object)->append);
  return 0;
}

void dealloc(PyObject* object) {
  PyObject_GC_UnTrack(object);
  clear(object);
  as_shortcut(object)->group.~shared_ptr();
  free_object(object);
}

PyMethodDef methods[] = {
    {"submit", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(submit)), METH_FASTCALL, nullptr},
    {"message", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(message)), METH_FASTCALL, nullptr},
    {"accepts", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(accepts)), METH_FASTCALL, nullptr},
    {"detach", detach, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyMemberDef members[] = {
    {"number", T_ULONGLONG, offsetof(FastSubmit, number), 0, nullptr},
    {"open", T_BOOL, offsetof(FastSubmit, open), 0, nullptr},
    {"sends", T_BOOL, offsetof(FastSubmit, sends), 0, nullptr},
    {"receives", T_BOOL, offsetof(FastSubmit, receives), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {0, nullptr},
};
PyType_Spec spec{"shoal._core.Shortcut", sizeof(FastSubmit), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                 slots};

void learn_calls(nb::object scope_variable, nb::tuple dtypes_by_code, long largest_tag) {
  if (!PyContextVar_CheckExact(scope_variable.ptr()) || dtypes_by_code.size() != kDTypeCount)
    throw std::invalid_argument("learn_calls takes a ContextVar and a dtype for every code");
  scope = scope_variable.release().ptr();
  dtypes = dtypes_by_code.release().ptr();
  max_tag = largest_tag;
}

}  // namespace
}  // namespace shoal

void bind_shortcut(nb::module_& m) {
  using namespace shoal;
  add_type(m, "Shortcut", spec);
  name_acquire = PyUnicode_InternFromString("acquire");
  name_release = PyUnicode_InternFromString("release");
  name_locked = PyUnicode_InternFromString("locked");
  m.def("learn_calls", &learn_calls, nb::arg("scope"), nb::arg("dtypes"), nb::arg("max_tag"));
}
