#include "python/source.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <structmember.h>

#include <array>
#include <cstddef>
#include <new>
#include <utility>
#include <vector>

#include "collectives/calls.h"
#include "engine/context.h"
#include "engine/group.h"
#include "python/bindings.h"
#include "python/without_gil.h"

namespace nb = nanobind;

namespace shoal {
namespace {

// Maximum seconds of one blocking wait: Python runs signal handlers in between.
constexpr double kSlice = 0.1;

PyTypeObject* source_type = nullptr;
PyObject* name_blocking = nullptr;  // interned, like the names of keywords

// The fields of a future (shoal.future.state.FutureState); none is null.  Python reads members of
// type T_OBJECT_EX as fast as slots, others more slowly.
struct FutureFields {
  PyObject_HEAD PyObject* done;  // True or False
  PyObject* claims;
  PyObject* source;
  PyObject* finish;
  PyObject* value;
  PyObject* key;
  PyObject* keep;
  PyObject* device;
  PyObject* error;
  PyObject* subscribers;
  PyObject* record;
  PyObject* callbacks;  // an int
};

PyTypeObject* future_type = nullptr;  // the subclass for futures of the core
PyObject* python_wait = nullptr;      // Future.wait

void set(PyObject*& field, PyObject* value) {
  PyObject* before = std::exchange(field, value);
  Py_XDECREF(before);
}

// -- sources --------------------------------------------------------------------------------------

Source* as_source(PyObject* object) { return reinterpret_cast<Source*>(object); }

bool complete(Source* self) { return !self->op || self->op->done() || self->op->orphaned(); }

void release_tensors(Source* self) {
  PyObject* keep = std::exchange(self->keep, nullptr);
  if (self->op && self->op->abandoned()) return;  // the memory is still used: leaked on purpose
  Py_XDECREF(keep);
}

// Blocks without the GIL, and releases the tensors if the operation is complete.  Returns 1 if it is, 0 on
// timeout, -1 with an exception set.
int wait(Source* self, double seconds) {
  if (!complete(self)) {
    const OperationPtr op = self->op;
    try {
      const WithoutGil released;
      op->group().context().wait(*op, until(seconds));
    } catch (const std::bad_alloc&) {
      PyErr_NoMemory();
      return -1;
    }
  }
  const bool done = complete(self);
  if (done) release_tensors(self);
  return done;
}

PyObject* source_new(PyTypeObject*, PyObject* arguments, PyObject*) {
  PyObject *channel, *core, *keep;
  if (!PyArg_ParseTuple(arguments, "OOO", &channel, &core, &keep)) return nullptr;
  OperationPtr op;
  if (!nb::try_cast(nb::handle(core), op) || !op) {
    PyErr_SetString(PyExc_TypeError, "Source takes an Operation of the core");
    return nullptr;
  }
  Source* self = new_source(channel, keep);
  if (self != nullptr) self->op = std::move(op);
  return reinterpret_cast<PyObject*>(self);
}

PyObject* source_wait(PyObject* self, PyObject* timeout) {
  const double seconds = timeout == Py_None ? 1e12 : PyFloat_AsDouble(timeout);
  if (seconds == -1.0 && PyErr_Occurred()) return nullptr;
  const int done = wait(as_source(self), seconds);
  return done < 0 ? nullptr : PyBool_FromLong(done);
}

PyObject* source_done(PyObject* self, PyObject*) {
  const bool done = complete(as_source(self));
  if (done)
    release_tensors(as_source(self));
  else
    as_source(self)->op->group().context().polled_by_caller();
  return PyBool_FromLong(done);
}

// Cancels the operation, and releases the tensors.
PyObject* source_cancel(PyObject* object, PyObject*) {
  Source* self = as_source(object);
  if (complete(self)) Py_RETURN_FALSE;
  const OperationPtr op = self->op;
  bool ended;
  {
    const WithoutGil released;
    ended = op->cancel();
  }
  if (complete(self)) release_tensors(self);
  return PyBool_FromLong(ended);
}

PyObject* core_of(Source* self) { return nb::cast(self->op).release().ptr(); }

PyObject* source_exception(PyObject* object, PyObject*) {
  Source* self = as_source(object);
  if (self->op->error().code == ErrorCode::kNone) Py_RETURN_NONE;
  nb::object core = nb::steal(core_of(self));
  return PyObject_CallMethod(self->channel, "error_of", "O", core.ptr());
}

PyObject* source_notify(PyObject* object, PyObject* fn) {
  Source* self = as_source(object);
  nb::object core = nb::steal(core_of(self));
  return PyObject_CallMethod(self->channel, "notify", "OOO", core.ptr(), object, fn);
}

// The core uses the user's memory until the operation is complete, also if nobody refers to its future.  So a
// source that becomes garbage before that passes the tensors to the channel.
void source_finalize(PyObject* object) {
  Source* self = as_source(object);
  if (self->keep == nullptr || complete(self)) return;
  nb::error_scope before;
  nb::object core = nb::steal(core_of(self));
  PyObject* kept = PyObject_CallMethod(self->channel, "keep", "OO", core.ptr(), self->keep);
  if (kept == nullptr) {
    Py_INCREF(self->keep);  // better leaked than overwritten after being reused
    PyErr_WriteUnraisable(object);
  }
  Py_XDECREF(kept);
}

int source_traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(as_source(object)->channel);
  Py_VISIT(as_source(object)->keep);
  return 0;
}

int source_clear(PyObject* object) {
  Py_CLEAR(as_source(object)->channel);
  release_tensors(as_source(object));
  return 0;
}

void source_dealloc(PyObject* object) {
  if (PyObject_CallFinalizerFromDealloc(object) < 0) return;
  PyObject_GC_UnTrack(object);
  source_clear(object);
  as_source(object)->op.~shared_ptr();
  free_object(object);
}

PyObject* source_ended(PyObject* object, PyObject*) {
  return PyLong_FromLongLong(as_source(object)->op->ended());
}

PyMethodDef source_methods[] = {
    {"wait", source_wait, METH_O, nullptr},
    {"done", source_done, METH_NOARGS, nullptr},
    {"cancel", source_cancel, METH_NOARGS, nullptr},
    {"exception", source_exception, METH_NOARGS, nullptr},
    {"notify", source_notify, METH_O, nullptr},
    {"ended", source_ended, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot source_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(source_new)},
    {Py_tp_methods, source_methods},
    {Py_tp_finalize, reinterpret_cast<void*>(source_finalize)},
    {Py_tp_traverse, reinterpret_cast<void*>(source_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(source_clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(source_dealloc)},
    {0, nullptr},
};
PyType_Spec source_spec{"shoal._core.Source", sizeof(Source), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                        source_slots};

// -- futures --------------------------------------------------------------------------------------

FutureFields* as_future(PyObject* object) { return reinterpret_cast<FutureFields*>(object); }

auto references(FutureFields* self) {
  return std::array{&self->done,  &self->claims,      &self->source, &self->finish,
                    &self->value, &self->key,         &self->keep,   &self->device,
                    &self->error, &self->subscribers, &self->record, &self->callbacks};
}

// A pending future without a source.
PyObject* future_new(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* object = type->tp_alloc(type, 0);
  if (object == nullptr) return nullptr;
  FutureFields* self = as_future(object);
  for (PyObject** field : references(self)) *field = Py_NewRef(Py_None);
  set(self->done, Py_NewRef(Py_False));
  set(self->callbacks, PyLong_FromLong(0));
  set(self->claims, PyList_New(0));
  if (self->claims != nullptr) return object;
  Py_DECREF(object);
  return nullptr;
}

int future_traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  for (PyObject** field : references(as_future(object))) Py_VISIT(*field);
  return 0;
}

int future_clear(PyObject* object) {
  for (PyObject** field : references(as_future(object))) Py_CLEAR(*field);
  return 0;
}

void future_dealloc(PyObject* object) {
  PyObject_GC_UnTrack(object);
  future_clear(object);
  free_object(object);
}

PyMemberDef future_members[] = {
    {"_claims", T_OBJECT_EX, offsetof(FutureFields, claims), 0, nullptr},
    {"_source", T_OBJECT_EX, offsetof(FutureFields, source), 0, nullptr},
    {"_finish", T_OBJECT_EX, offsetof(FutureFields, finish), 0, nullptr},
    {"_value", T_OBJECT_EX, offsetof(FutureFields, value), 0, nullptr},
    {"key", T_OBJECT_EX, offsetof(FutureFields, key), 0, nullptr},
    {"_keep", T_OBJECT_EX, offsetof(FutureFields, keep), 0, nullptr},
    {"_device", T_OBJECT_EX, offsetof(FutureFields, device), 0, nullptr},
    {"_error", T_OBJECT_EX, offsetof(FutureFields, error), 0, nullptr},
    {"_subscribers", T_OBJECT_EX, offsetof(FutureFields, subscribers), 0, nullptr},
    {"record", T_OBJECT_EX, offsetof(FutureFields, record), 0, nullptr},
    {"_callbacks", T_OBJECT_EX, offsetof(FutureFields, callbacks), 0, nullptr},
    {"_done", T_OBJECT_EX, offsetof(FutureFields, done), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyType_Slot future_slots[] = {
    {Py_tp_members, future_members},
    {Py_tp_traverse, reinterpret_cast<void*>(future_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(future_clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(future_dealloc)},
    {Py_tp_new, reinterpret_cast<void*>(future_new)},
    {0, nullptr},
};
PyType_Spec future_spec{"shoal._core.FutureFields", sizeof(FutureFields), 0,
                        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, future_slots};

// Whether the outcome is a known value.
bool has_value(const FutureFields& self) {
  return self.done == Py_True && self.error == Py_None && self.device == Py_None;
}

// Does the work of FutureState._settle and _publish, if there is no error, no other thread has begun it, and
// no callback waits; otherwise does nothing and returns false.
bool publish(FutureFields& self, Source* source) {
  if (self.done == Py_True) return has_value(self);
  if (source->op->error().code != ErrorCode::kNone || self.claims == nullptr ||
      !PyList_CheckExact(self.claims) || PyList_GET_SIZE(self.claims) > 0 || self.finish != Py_None ||
      self.device != Py_None || self.subscribers != Py_None)
    return false;
  if (PyList_Append(self.claims, Py_None) < 0) {
    PyErr_Clear();
    return false;
  }
  if (Record* record = as_record(self.record)) record->ended = source->op->ended();
  set(self.done, Py_NewRef(Py_True));
  set(self.source, Py_NewRef(Py_None));
  return true;
}

// Waits for at most kSlice, and publishes the outcome in the usual case.
bool settled(FutureFields& self) {
  if (self.done == Py_True) return has_value(self);
  PyObject* object = self.source;
  if (object == nullptr || !Py_IS_TYPE(object, source_type)) return false;
  Py_INCREF(object);  // another thread may publish meanwhile
  const int waited = wait(as_source(object), kSlice);
  if (waited < 0) PyErr_Clear();  // Python raises the error
  const bool done = waited == 1 && publish(self, as_source(object));
  Py_DECREF(object);
  return done;
}

// Whether a call has no argument but `blocking=`, which does not affect results on the CPU.
bool plain_wait(Py_ssize_t count, PyObject* names) {
  if (count != 0) return false;
  if (names == nullptr) return true;
  return PyTuple_GET_SIZE(names) == 1 && PyTuple_GET_ITEM(names, 0) == name_blocking;
}

// Future.wait; unusual cases continue in Python.
PyObject* future_wait(PyObject* self, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
  if (plain_wait(count, names) && settled(*as_future(self))) return Py_NewRef(as_future(self)->value);
  std::vector<PyObject*> all{self};
  all.insert(all.end(), arguments, arguments + count + (names == nullptr ? 0 : PyTuple_GET_SIZE(names)));
  return PyObject_Vectorcall(python_wait, all.data(), static_cast<std::size_t>(count) + 1, names);
}

PyMethodDef wait_method{"wait", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(future_wait)),
                        METH_FASTCALL | METH_KEYWORDS, "See shoal.Future.wait."};

// Takes over `wait` of a class of futures; `wait` is for unusual cases.
void learn_futures(nb::handle type, nb::object wait) {
  auto* futures = reinterpret_cast<PyTypeObject*>(type.ptr());
  nb::object method = nb::steal(PyDescr_NewMethod(futures, &wait_method));
  if (!method.is_valid()) throw nb::python_error();
  nb::setattr(type, "wait", method);
  nb::setattr(type, "result", method);
  Py_INCREF(futures);  // for as long as the process lives
  future_type = futures;
  python_wait = wait.release().ptr();
}

}  // namespace

Source* new_source(PyObject* channel, PyObject* keep) {
  auto* self = as_source(source_type->tp_alloc(source_type, 0));
  if (self == nullptr) return nullptr;
  new (&self->op) OperationPtr;
  self->channel = Py_NewRef(channel);
  self->keep = Py_NewRef(keep);
  return self;
}

PyObject* new_future(Source* source, PyObject* value) {
  PyObject* object = future_new(future_type, nullptr, nullptr);
  if (object == nullptr) return nullptr;
  set(as_future(object)->source, Py_NewRef(reinterpret_cast<PyObject*>(source)));
  set(as_future(object)->value, Py_NewRef(value));
  return object;
}

void set_key(PyObject* self, std::uint64_t key) {
  if (PyObject* value = PyLong_FromUnsignedLongLong(key)) set(as_future(self)->key, value);
}

void set_record(PyObject* self, Record* record) {
  set(as_future(self)->record, Py_NewRef(reinterpret_cast<PyObject*>(record)));
}

}  // namespace shoal

void bind_source(nb::module_& m) {
  shoal::source_type = shoal::add_type(m, "Source", shoal::source_spec);
  shoal::name_blocking = PyUnicode_InternFromString("blocking");
  shoal::add_type(m, "FutureFields", shoal::future_spec);
  m.def("learn_futures", &shoal::learn_futures, nb::arg("future_class"), nb::arg("wait"));
}
