// Packed encoding of small plain values, which most calls and replies consist of: no pickle, and one C call.
//
// Identity is preserved as in a pickle: a mutable object is packed only if no other part of the value is the
// same object or has the same memory.  Everything else is left to pickle.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "python/bindings.h"
#include "python/tensors.h"

namespace nb = nanobind;
using namespace shoal;

namespace {

enum class Tag : std::uint8_t {
  kNone = 0,
  kFalse = 1,
  kTrue = 2,
  kInt = 3,     // 8 bytes
  kFloat = 4,   // 8 bytes
  kStr = 5,     // length, UTF-8
  kBytes = 6,   // length, bytes
  kTuple = 7,   // count, items
  kList = 8,    // count, items
  kDict = 9,    // count, then for each item the key (a kStr) and the value
  kTensor = 10  // dtype, number of dimensions, 8 bytes for each, elements
};

constexpr int kDepth = 8;                    // maximum nesting
constexpr std::size_t kPackedLimit = 32768;  // bytes; a larger pickle is as fast, and stores equal parts once
constexpr std::size_t kMost = 16;            // maximum number of lists, dictionaries and tensors

class Packer {
 public:
  std::string out;

  // False: the value, or something in it, is not plain.
  bool pack(PyObject* value, int depth = kDepth) {
    if (out.size() > kPackedLimit || depth == 0) return false;
    if (value == Py_None) return put(Tag::kNone);
    if (value == Py_False) return put(Tag::kFalse);
    if (value == Py_True) return put(Tag::kTrue);
    if (PyLong_CheckExact(value)) {
      int overflow = 0;
      const std::int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow);
      return overflow == 0 && put(Tag::kInt) && put(number);
    }
    if (PyFloat_CheckExact(value)) return put(Tag::kFloat) && put(PyFloat_AS_DOUBLE(value));
    if (PyUnicode_CheckExact(value)) {
      Py_ssize_t size = 0;
      const char* text = PyUnicode_AsUTF8AndSize(value, &size);
      if (text == nullptr) PyErr_Clear();  // an unpaired surrogate
      return text != nullptr && put(Tag::kStr) && put(text, static_cast<std::size_t>(size));
    }
    if (PyBytes_CheckExact(value))
      return put(Tag::kBytes) &&
             put(PyBytes_AS_STRING(value), static_cast<std::size_t>(PyBytes_GET_SIZE(value)));
    if (PyTuple_CheckExact(value)) {
      const Py_ssize_t count = PyTuple_GET_SIZE(value);
      if (!put(Tag::kTuple) || !put(static_cast<std::uint32_t>(count))) return false;
      for (Py_ssize_t i = 0; i < count; ++i)
        if (!pack(PyTuple_GET_ITEM(value, i), depth - 1)) return false;
      return true;
    }
    if (!is_first(value)) return false;
    if (PyList_CheckExact(value)) return pack_list(value, depth);
    if (PyDict_CheckExact(value)) return pack_dict(value, depth);
    return pack_tensor(value);
  }

 private:
  bool put(Tag tag) {
    out.push_back(static_cast<char>(tag));
    return true;
  }
  template <class T>
    requires std::is_arithmetic_v<T>
  bool put(T number) {
    out.append(reinterpret_cast<const char*>(&number), sizeof number);
    return true;
  }
  bool put(const char* data, std::size_t size) {
    if (size > kPackedLimit) return false;
    put(static_cast<std::uint32_t>(size));
    out.append(data, size);
    return true;
  }

  bool is_first(PyObject* value) {
    if (seen_count_ == kMost ||
        std::find(seen_.begin(), seen_.begin() + seen_count_, value) != seen_.begin() + seen_count_)
      return false;
    seen_[seen_count_++] = value;
    return true;
  }

  // Examining a tensor may run code that changes the list.
  bool pack_list(PyObject* list, int depth) {
    const Py_ssize_t count = PyList_GET_SIZE(list);
    put(Tag::kList);
    put(static_cast<std::uint32_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (i >= PyList_GET_SIZE(list)) return false;
      const nb::object item = nb::borrow(PyList_GET_ITEM(list, i));
      if (!pack(item.ptr(), depth - 1)) return false;
    }
    return PyList_GET_SIZE(list) == count;
  }

  bool pack_dict(PyObject* dict, int depth) {
    const Py_ssize_t count = PyDict_Size(dict);
    put(Tag::kDict);
    put(static_cast<std::uint32_t>(count));
    PyObject *key, *value;
    Py_ssize_t at = 0, packed = 0;
    while (PyDict_Next(dict, &at, &key, &value)) {
      if (!PyUnicode_CheckExact(key)) return false;
      const nb::object name = nb::borrow(key), item = nb::borrow(value);
      if (!pack(name.ptr(), depth - 1) || !pack(item.ptr(), depth - 1)) return false;
      ++packed;
    }
    return packed == count && PyDict_Size(dict) == count;
  }

  bool pack_tensor(PyObject* object) {
    const auto x = plain_tensor(object);
    if (!x || x->count == 0 || x->span.bytes > kPackedLimit - out.size() || !is_bare(object)) return false;
    const std::byte *begin = x->span.data, *end = begin + x->span.bytes;
    for (std::size_t i = 0; i < span_count_; ++i)
      if (begin < spans_[i].second && spans_[i].first < end) return false;
    spans_[span_count_++] = {begin, end};
    put(Tag::kTensor);
    put(static_cast<std::uint8_t>(x->dtype));
    put(static_cast<std::uint8_t>(x->shape.size()));
    for (const std::int64_t size : x->shape) put(size);
    out.append(reinterpret_cast<const char*>(begin), x->span.bytes);
    return true;
  }

  // Whether the tensor has only its elements: no required gradient, and no additional attributes.
  static bool is_bare(PyObject* tensor) {
    static PyObject* const requires_grad = PyUnicode_InternFromString("requires_grad");
    static PyObject* const attributes = PyUnicode_InternFromString("__dict__");
    const nb::object asked = nb::steal(PyObject_GetAttr(tensor, requires_grad));
    const nb::object given = nb::steal(PyObject_GetAttr(tensor, attributes));
    PyErr_Clear();
    return asked.ptr() == Py_False && given.is_valid() && PyDict_Size(given.ptr()) == 0;
  }

  std::array<PyObject*, kMost> seen_;
  std::size_t seen_count_ = 0;
  std::array<std::pair<const std::byte*, const std::byte*>, kMost> spans_;
  std::size_t span_count_ = 0;
};

// Decodes a peer's data: every length is checked against the remaining bytes.
class Unpacker {
 public:
  Unpacker(const std::byte* begin, std::size_t size) : at_(begin), left_(size) {}

  nb::object value(int depth = kDepth) {
    if (depth == 0) flawed("is too deep");
    switch (number<Tag>()) {
      case Tag::kNone:
        return nb::none();
      case Tag::kFalse:
        return nb::bool_(false);
      case Tag::kTrue:
        return nb::bool_(true);
      case Tag::kInt:
        return made(PyLong_FromLongLong(number<std::int64_t>()));
      case Tag::kFloat:
        return made(PyFloat_FromDouble(number<double>()));
      case Tag::kStr: {
        const auto [text, size] = text_of();
        return made(PyUnicode_DecodeUTF8(text, size, nullptr));
      }
      case Tag::kBytes: {
        const auto [text, size] = text_of();
        return made(PyBytes_FromStringAndSize(text, size));
      }
      case Tag::kTuple: {
        const Py_ssize_t count = count_of(1);
        nb::object tuple = made(PyTuple_New(count));
        for (Py_ssize_t i = 0; i < count; ++i)
          PyTuple_SET_ITEM(tuple.ptr(), i, value(depth - 1).release().ptr());
        return tuple;
      }
      case Tag::kList: {
        const Py_ssize_t count = count_of(1);
        nb::object list = made(PyList_New(count));
        for (Py_ssize_t i = 0; i < count; ++i)
          PyList_SET_ITEM(list.ptr(), i, value(depth - 1).release().ptr());
        return list;
      }
      case Tag::kDict: {
        nb::object dict = made(PyDict_New());
        for (Py_ssize_t left = count_of(2); left > 0; --left) {
          nb::object key = value(depth - 1);
          if (!PyUnicode_CheckExact(key.ptr())) flawed("has a key that is no string");
          if (PyDict_SetItem(dict.ptr(), key.ptr(), value(depth - 1).ptr()) != 0) throw nb::python_error();
        }
        return dict;
      }
      case Tag::kTensor:
        return tensor();
    }
    flawed("has an unknown tag");
  }

  void end() const {
    if (left_ != 0) flawed("goes on behind its end");
  }

 private:
  [[noreturn]] static void flawed(const char* how) {
    throw nb::value_error((std::string("a packed value ") + how).c_str());
  }
  static nb::object made(PyObject* object) {
    if (object == nullptr) throw nb::python_error();
    return nb::steal(object);
  }
  const std::byte* skip(std::size_t bytes) {
    if (bytes > left_) flawed("is cut off");
    left_ -= bytes;
    return std::exchange(at_, at_ + bytes);
  }
  template <class T>
  T number() {
    T value;
    std::memcpy(&value, skip(sizeof value), sizeof value);
    return value;
  }
  Py_ssize_t count_of(std::size_t least) {
    const auto count = number<std::uint32_t>();
    if (count > left_ / least) flawed("is cut off");
    return static_cast<Py_ssize_t>(count);
  }
  std::pair<const char*, Py_ssize_t> text_of() {
    const Py_ssize_t size = count_of(1);
    return {reinterpret_cast<const char*>(skip(static_cast<std::size_t>(size))), size};
  }
  nb::object tensor() {
    const auto dtype = number<DType>();
    const auto dims = number<std::uint8_t>();
    if (itemsize(dtype) == 0 || dims > kMaxDims) flawed("has a tensor that cannot be");
    std::array<std::int64_t, kMaxDims> shape;
    std::size_t bytes = itemsize(dtype);
    for (std::uint8_t i = 0; i < dims; ++i) {
      shape[i] = number<std::int64_t>();
      // Sizes are never zero, so the product stays below the number of remaining bytes.
      if (shape[i] <= 0 || static_cast<std::uint64_t>(shape[i]) > left_ / bytes)
        flawed("has a tensor that cannot be");
      bytes *= static_cast<std::size_t>(shape[i]);
    }
    return made(new_tensor(dtype, {shape.data(), dims}, skip(bytes), bytes));
  }

  const std::byte* at_;
  std::size_t left_;
};

// Returns `prefix` and the packed value; None: the value is not plain.
nb::object pack(nb::handle value, nb::bytes prefix) {
  Packer packer;
  packer.out.assign(prefix.c_str(), prefix.size());
  if (!packer.pack(value.ptr())) return nb::none();
  return nb::bytes(packer.out.data(), packer.out.size());
}

nb::object unpack(nb::handle packed, std::size_t from) {
  Py_buffer view;
  if (PyObject_GetBuffer(packed.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
  const std::unique_ptr<Py_buffer, decltype(&PyBuffer_Release)> released(&view, &PyBuffer_Release);
  const auto size = static_cast<std::size_t>(view.len);
  from = std::min(from, size);
  Unpacker unpacker(static_cast<const std::byte*>(view.buf) + from, size - from);
  nb::object value = unpacker.value();
  unpacker.end();
  return value;
}

}  // namespace

void bind_packed(nb::module_& m) {
  m.def("pack", &pack, nb::arg("value").none(), nb::arg("prefix"));
  m.def("unpack", &unpack, nb::arg("packed"), nb::arg("start"));
}
