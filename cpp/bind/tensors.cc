#include "bind/tensors.h"

#include <nanobind/nanobind.h>

namespace shoal {
namespace {

// The parts of dlpack.h that are needed, as DLPack 1.2 fixes them.
enum DLTypeCode : std::uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6 };

struct DLTensor {
  void* data;
  std::int32_t device_type, device_id;
  std::int32_t dims;
  std::uint8_t code, bits;
  std::uint16_t lanes;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};
constexpr std::int32_t kCpu = 1;

struct ExchangeApi {
  std::uint32_t major, minor;
  ExchangeApi* previous;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, DLTensor* out);
  void* current_stream;
};

PyTypeObject* tensor_type = nullptr;
PyObject* is_neg = nullptr;
const ExchangeApi* api = nullptr;

std::optional<DType> dtype_of(const DLTensor& x) {
  if (x.lanes != 1) return std::nullopt;
  switch (x.code << 8 | x.bits) {
    case kFloat << 8 | 64:
      return DType::kFloat64;
    case kFloat << 8 | 32:
      return DType::kFloat32;
    case kFloat << 8 | 16:
      return DType::kFloat16;
    case kBfloat << 8 | 16:
      return DType::kBFloat16;
    case kInt << 8 | 8:
      return DType::kInt8;
    case kInt << 8 | 16:
      return DType::kInt16;
    case kInt << 8 | 32:
      return DType::kInt32;
    case kInt << 8 | 64:
      return DType::kInt64;
    case kUInt << 8 | 8:
      return DType::kUInt8;
    case kUInt << 8 | 16:
      return DType::kUInt16;
    case kUInt << 8 | 32:
      return DType::kUInt32;
    case kUInt << 8 | 64:
      return DType::kUInt64;
    case kBool << 8 | 8:
      return DType::kBool;
    default:
      return std::nullopt;  // complex tensors may be lazily conjugated, others cannot be reduced
  }
}

}  // namespace

std::optional<PlainTensor> plain_tensor(PyObject* object) {
  if (api == nullptr || Py_TYPE(object) != tensor_type) return std::nullopt;
  DLTensor x;
  if (api->tensor_from_object(object, &x) != 0) {  // sparse, nested, on a device without memory
    PyErr_Clear();
    return std::nullopt;
  }
  if (x.device_type != kCpu) return std::nullopt;
  std::uint64_t count = 1;
  bool contiguous = true;
  for (std::int32_t i = x.dims - 1; i >= 0; --i) {
    contiguous &= x.shape[i] == 1 || x.strides[i] == static_cast<std::int64_t>(count);
    count *= static_cast<std::uint64_t>(x.shape[i]);
  }
  const auto dtype = dtype_of(x);
  if (!dtype || !(contiguous || count == 0)) return std::nullopt;
  if (x.data == nullptr && count != 0) return std::nullopt;  // freed, or standing for zeros or another tensor
  PyObject* negative = PyObject_CallMethodNoArgs(object, is_neg);  // the table says nothing of lazy negation
  Py_XDECREF(negative);
  if (negative == nullptr) PyErr_Clear();
  if (negative != Py_False) return std::nullopt;
  return PlainTensor{{static_cast<std::byte*>(x.data) + x.byte_offset, count * itemsize(*dtype)},
                     count,
                     *dtype,
                     {x.shape, static_cast<std::size_t>(x.dims)}};
}

std::uint64_t address_of(PyObject* object) {
  DLTensor x;
  if (api != nullptr && Py_TYPE(object) == tensor_type) {
    if (api->tensor_from_object(object, &x) == 0)
      return reinterpret_cast<std::uintptr_t>(x.data) + x.byte_offset;
    PyErr_Clear();
  }
  static PyObject* const data_ptr = PyUnicode_InternFromString("data_ptr");
  const auto address = nanobind::steal(PyObject_CallMethodNoArgs(object, data_ptr));
  if (!address.is_valid()) throw nanobind::python_error();
  return PyLong_AsUnsignedLongLong(address.ptr());
}

void learn_tensors(PyObject* tensor_class) {
  PyObject* capsule = PyObject_GetAttrString(tensor_class, "__dlpack_c_exchange_api__");
  const ExchangeApi* found = nullptr;
  if (capsule != nullptr) {
    found = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    Py_DECREF(capsule);
  }
  PyErr_Clear();
  if (found == nullptr || found->major != 1) return;
  if (is_neg == nullptr) is_neg = PyUnicode_InternFromString("is_neg");
  Py_INCREF(tensor_class);
  tensor_type = reinterpret_cast<PyTypeObject*>(tensor_class);
  api = found;
}

}  // namespace shoal
