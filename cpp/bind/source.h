// The source of a future of the core (one operation, and the tensors that it uses), and the future's fields.
//
// All of this runs under the GIL, which the module asks for: where nothing here calls Python, several steps
// are one to other threads.
#pragma once

#include <Python.h>

#include "bind/record.h"
#include "engine/operation.h"

namespace shoal {

// An operation as its future sees it (shoal.future.Source).
struct Source {
  PyObject_HEAD OperationPtr op;
  PyObject* channel;  // the NativeChannel: what only Python can do
  PyObject* keep;     // the tensors, until the operation is complete
};

// A source without an operation; null with an exception set.  Refers to both.
Source* new_source(PyObject* channel, PyObject* keep);

// A pending future of `source` and `value`; null with an exception set.  Takes the reference to `key`.
PyObject* new_future(Source* source, PyObject* value);
void set_key(PyObject* future, std::uint64_t key);
void set_record(PyObject* future, Record* record);

}  // namespace shoal
