// A function that torch calls also while an exception is set.
//
// An exception of an operation leaves a backward pass through C++ of torch, which meanwhile asks the device
// guard for its device, and ends the process if this call throws.  Python code must not run while an
// exception is set, so this is a function in C++.
#include "python/bindings.h"

namespace nb = nanobind;

namespace {

// pybind11 takes the function for an override, unlike a PyCFunction, and makes no bound method of it.
nb::object constant_override(nb::object value, nb::object on_error) {
  return nb::cpp_function([value = std::move(value), on_error = std::move(on_error)] {
    if (PyErr_Occurred() != nullptr) {
      try {
        const nb::python_error pending;  // clears it
        on_error(pending.value());
      } catch (nb::python_error& error) {
        error.discard_as_unraisable("the device guard");
      }
    }
    return value;
  });
}

}  // namespace

void bind_constant_override(nb::module_& m) {
  m.def("constant_override", &constant_override, nb::arg("value"), nb::arg("on_error"));
}
