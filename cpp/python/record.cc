#include "python/record.h"

#include <nanobind/nanobind.h>
#include <structmember.h>

#include <cstddef>

#include "common/clock.h"
#include "python/bindings.h"

namespace nb = nanobind;

namespace shoal {
namespace {

PyTypeObject* record_type = nullptr;

PyObject* record_new(PyTypeObject*, PyObject* arguments, PyObject* keywords) {
  static const char* names[] = {"future", "kind", "number", "key", "dtype",
                                "count",  "root", "peer",   "tag", nullptr};
  RecordFields fields{};
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OOLKOK|iiL", const_cast<char**>(names),
                                   &fields.future, &fields.kind, &fields.number, &fields.key, &fields.dtype,
                                   &fields.count, &fields.root, &fields.peer, &fields.tag))
    return nullptr;
  Record* record = new_record(fields);
  if (record != nullptr) record->submitted = now_ns();
  return reinterpret_cast<PyObject*>(record);
}

// A record is in no reference cycle: its kind and dtype are constants, and it refers to its future weakly.
void record_dealloc(PyObject* object) {
  auto* self = reinterpret_cast<Record*>(object);
  const RecordFields& fields = self->fields;
  for (PyObject* field : {fields.kind, fields.dtype, fields.future, self->failure}) Py_XDECREF(field);
  free_object(object);
}

PyMemberDef record_members[] = {
    {"submitted", T_LONGLONG, offsetof(Record, submitted), 0, nullptr},
    {"ended", T_LONGLONG, offsetof(Record, ended), 0, nullptr},
    {"number", T_LONGLONG, offsetof(Record, fields.number), READONLY, nullptr},
    {"key", T_ULONGLONG, offsetof(Record, fields.key), READONLY, nullptr},
    {"count", T_ULONGLONG, offsetof(Record, fields.count), READONLY, nullptr},
    {"tag", T_LONGLONG, offsetof(Record, fields.tag), READONLY, nullptr},
    {"root", T_INT, offsetof(Record, fields.root), READONLY, nullptr},
    {"peer", T_INT, offsetof(Record, fields.peer), READONLY, nullptr},
    {"kind", T_OBJECT, offsetof(Record, fields.kind), READONLY, nullptr},
    {"dtype", T_OBJECT, offsetof(Record, fields.dtype), READONLY, nullptr},
    {"future", T_OBJECT, offsetof(Record, fields.future), READONLY, nullptr},
    {"failure", T_OBJECT, offsetof(Record, failure), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyType_Slot record_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(record_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(record_dealloc)},
    {Py_tp_members, record_members},
    {0, nullptr},
};
PyType_Spec record_spec{"shoal._core.Record", sizeof(Record), 0, Py_TPFLAGS_DEFAULT, record_slots};

}  // namespace

Record* new_record(const RecordFields& fields) {
  PyObject* future = PyWeakref_NewRef(fields.future, nullptr);
  if (future == nullptr) return nullptr;
  auto* self = reinterpret_cast<Record*>(record_type->tp_alloc(record_type, 0));
  if (self == nullptr) {
    Py_DECREF(future);
    return nullptr;
  }
  self->fields = fields;
  self->fields.future = future;
  Py_INCREF(fields.kind);
  Py_INCREF(fields.dtype);
  return self;
}

Record* as_record(PyObject* object) {
  return object != nullptr && Py_IS_TYPE(object, record_type) ? reinterpret_cast<Record*>(object) : nullptr;
}

}  // namespace shoal

void bind_record(nb::module_& m) { shoal::record_type = shoal::add_type(m, "Record", shoal::record_spec); }
