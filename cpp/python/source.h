// The source of a future of the core (one operation and its tensors), and the future's fields.
//
// All of this runs under the GIL, which the module requires: steps between calls of Python are atomic.
#pragma once

#include <Python.h>

#include "engine/operation.h"
#include "python/record.h"

namespace shoal {

// An operation, for its future (shoal.future.Source).
struct Source {
  PyObject_HEAD OperationPtr op;
  PyObject* channel;  // the NativeChannel, for work that only Python can do
  PyObject* keep;     // the tensors, until the operation is complete
};

// Creates a source without an operation; null with an exception set.  Takes references to both.
Source* new_source(PyObject* channel, PyObject* keep);

// Creates a pending future of `source` and `value`; null with an exception set.
PyObject* new_future(Source* source, PyObject* value);
void set_key(PyObject* future, std::uint64_t key);
void set_record(PyObject* future, Record* record);

}  // namespace shoal
