// The flight recorder's record of one operation (shoal.recorder).
#pragma once

#include <Python.h>

namespace shoal {

// The fields that the creator of a record sets.
struct RecordFields {
  PyObject* future;              // in a record: a weak reference to it
  PyObject *kind, *dtype;        // an OpKind; a torch.dtype, or None
  long long number = -1;         // in the group's sequence; -1 if it has none
  unsigned long long key = 0;    // of an operation issued in a callback; else 0
  unsigned long long count = 0;  // elements
  int root = -1, peer = -1;      // -1: none
  long long tag = -1;            // -1: none
};

struct Record {
  PyObject_HEAD RecordFields fields;
  long long submitted;  // CLOCK_MONOTONIC, nanoseconds
  long long ended;      // the same: when it was done, or seen to be; 0 before
  PyObject* failure;    // a string; null while there is none
};

// Creates a record without the time of its submission, and refers to `future` weakly; null with an exception
// set.
Record* new_record(const RecordFields& fields);
// Casts an object to a record; null if it is another object.
Record* as_record(PyObject* object);

}  // namespace shoal
