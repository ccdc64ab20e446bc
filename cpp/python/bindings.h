// Each file of the binding adds its part to the native module; module.cc calls them all.
//
// Types and docstrings for Python are in src/shoal/_core.pyi.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

void bind_constant_override(nanobind::module_& m);
void bind_engine(nanobind::module_& m);
void bind_ending(nanobind::module_& m);
void bind_interrupt(nanobind::module_& m);
void bind_kernels(nanobind::module_& m);
void bind_mpi(nanobind::module_& m);
void bind_packed(nanobind::module_& m);
void bind_post(nanobind::module_& m);
void bind_record(nanobind::module_& m);
void bind_reducer(nanobind::module_& m);
void bind_shortcut(nanobind::module_& m);
void bind_source(nanobind::module_& m);
void bind_statistics(nanobind::module_& m);

namespace shoal {

// Texts come from peers: decode any bytes to a str that can be printed and sent on.
inline nanobind::object str(const std::string& bytes) {
  PyObject* text =
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "backslashreplace");
  if (text == nullptr) throw nanobind::python_error();
  return nanobind::steal(text);
}

// Adds a type that is written with the C API to the module; it exists as long as the process.
inline PyTypeObject* add_type(nanobind::module_& m, const char* name, PyType_Spec& spec) {
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) throw nanobind::python_error();
  m.attr(name) = nanobind::borrow(type);
  return reinterpret_cast<PyTypeObject*>(type);
}

// The last step of a tp_dealloc.
inline void free_object(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}

}  // namespace shoal
