// Texts of the core as Python strings.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

namespace shoal {

// Texts come from peers: decode any bytes to a str that can be printed and sent on.
inline nanobind::object str(const std::string& bytes) {
  PyObject* text =
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "backslashreplace");
  if (text == nullptr) throw nanobind::python_error();
  return nanobind::steal(text);
}

}  // namespace shoal
