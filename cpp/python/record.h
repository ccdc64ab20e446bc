// The flight recorder's record of one operation (shoal.recorder).
#pragma once

#include <Python.h>

#include <cstdint>

namespace shoal {

struct Record {
  PyObject_HEAD std::int64_t submitted;  // CLOCK_MONOTONIC, nanoseconds
  std::int64_t ended;                    // the same: when it was done, or seen to be; 0 before
  std::int64_t number;                   // in the group's sequence; -1 if it has none
  std::uint64_t key;                     // of an operation issued in a callback; else 0
  std::uint64_t count;                   // elements
  std::int64_t tag;                      // -1: none
  int root;                              // -1: none
  int peer;                              // -1: none
  PyObject* kind;                        // OpKind
  PyObject* dtype;                       // torch.dtype, or None
  PyObject* future;                      // a weak reference
  PyObject* failure;                     // a string; null while there is none
};

// The fields of a record that its creator sets.
struct RecordFields {
  PyObject *future, *kind, *dtype;
  std::int64_t number = -1;
  std::uint64_t key = 0, count = 0;
  int root = -1, peer = -1;
  std::int64_t tag = -1;
};

// Creates a record without the time of its submission; null with an exception set.
Record* new_record(const RecordFields& fields);
// Casts an object to a record; null if it is another object.
Record* as_record(PyObject* object);

}  // namespace shoal
