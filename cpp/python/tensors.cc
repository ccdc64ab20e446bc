#include "python/tensors.h"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>

namespace shoal {
namespace {

// The required parts of dlpack.h, as defined by DLPack 1.2.
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

// A tensor with an owner, whose deleter is called after the last use.
struct Managed {
  std::uint32_t major, minor;
  void* context;
  void (*deleter)(Managed*);
  std::uint64_t flags;
  DLTensor tensor;
};

// A contiguous tensor, followed by its elements.
struct Whole : Managed {
  std::int64_t shape[kMaxDims], strides[kMaxDims];
};
constexpr std::align_val_t kAlignment{64};
constexpr std::size_t kElements = (sizeof(Whole) + 63) / 64 * 64;  // offset of the elements

struct ExchangeApi {
  std::uint32_t major, minor;
  ExchangeApi* previous;
  void* allocate;
  void* managed_from_object;
  int (*managed_to_object)(Managed* tensor, void** object);
  int (*tensor_from_object)(void* object, DLTensor* out);
  void* current_stream;
};

PyTypeObject* tensor_type = nullptr;
PyObject* is_neg = nullptr;
const ExchangeApi* api = nullptr;

struct Dtype {
  DType dtype;
  DLTypeCode code;
  std::uint8_t bits;
};
// Without complex dtypes, whose tensors may be lazily conjugated, and dtypes without reductions.
constexpr Dtype kDtypes[] = {
    {DType::kFloat64, kFloat, 64},   {DType::kFloat32, kFloat, 32}, {DType::kFloat16, kFloat, 16},
    {DType::kBFloat16, kBfloat, 16}, {DType::kInt8, kInt, 8},       {DType::kInt16, kInt, 16},
    {DType::kInt32, kInt, 32},       {DType::kInt64, kInt, 64},     {DType::kUInt8, kUInt, 8},
    {DType::kUInt16, kUInt, 16},     {DType::kUInt32, kUInt, 32},   {DType::kUInt64, kUInt, 64},
    {DType::kBool, kBool, 8},
};

std::optional<DType> dtype_of(const DLTensor& x) {
  if (x.lanes != 1) return std::nullopt;
  for (const auto& [dtype, code, bits] : kDtypes)
    if (x.code == code && x.bits == bits) return dtype;
  return std::nullopt;
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
  if (x.data == nullptr && count != 0) return std::nullopt;  // freed, or a tensor of zeros without memory
  PyObject* negative = PyObject_CallMethodNoArgs(object, is_neg);  // not contained in the DLTensor
  Py_XDECREF(negative);
  if (negative == nullptr) PyErr_Clear();
  if (negative != Py_False) return std::nullopt;
  return PlainTensor{{static_cast<std::byte*>(x.data) + x.byte_offset, count * itemsize(*dtype)},
                     count,
                     *dtype,
                     {x.shape, static_cast<std::size_t>(x.dims)}};
}

PyObject* new_tensor(DType dtype, std::span<const std::int64_t> shape, const std::byte* data,
                     std::size_t bytes) {
  const auto named = std::find_if(std::begin(kDtypes), std::end(kDtypes),
                                  [&](const Dtype& each) { return each.dtype == dtype; });
  if (api == nullptr || named == std::end(kDtypes) || shape.size() > kMaxDims) {
    PyErr_SetString(PyExc_ValueError, "no such tensor can be made");
    return nullptr;
  }
  void* memory = ::operator new(kElements + bytes, kAlignment, std::nothrow);
  if (memory == nullptr) return PyErr_NoMemory();
  auto* whole = new (memory) Whole{};
  std::memcpy(static_cast<std::byte*>(memory) + kElements, data, bytes);
  std::copy(shape.begin(), shape.end(), whole->shape);
  std::int64_t step = 1;
  for (std::size_t i = shape.size(); i-- > 0; step *= shape[i]) whole->strides[i] = step;
  whole->major = api->major;
  whole->minor = api->minor;
  whole->deleter = [](Managed* self) { ::operator delete(static_cast<Whole*>(self), kAlignment); };
  whole->tensor = {static_cast<std::byte*>(memory) + kElements,
                   kCpu,
                   0,
                   static_cast<std::int32_t>(shape.size()),
                   static_cast<std::uint8_t>(named->code),
                   named->bits,
                   1,
                   whole->shape,
                   whole->strides,
                   0};
  void* object = nullptr;
  return api->managed_to_object(whole, &object) == 0 ? static_cast<PyObject*>(object) : nullptr;
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
