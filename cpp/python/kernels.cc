// The kernels for Python, which passes addresses and counts: for engines that only move bytes, and for tests.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/reduce.h"
#include "python/bindings.h"
#include "python/without_gil.h"

namespace nb = nanobind;
using namespace shoal::kernels;
using shoal::WithoutGil;

namespace {

using Addresses = std::vector<uintptr_t>;

std::vector<void*> pointers(const Addresses& addresses) {
  std::vector<void*> result;
  for (uintptr_t address : addresses) result.push_back(reinterpret_cast<void*>(address));
  return result;
}

}  // namespace

void bind_kernels(nb::module_& core) {
  using shoal::DType;
  using shoal::RedOp;

  nb::module_ m = core.def_submodule("kernels", "The kernels under the collectives, for tests.");
  nb::class_<Reduction>(m, "Reduction")
      .def(
          "__init__",
          [](Reduction* self, int dtype, int op, uint32_t divisor) {
            new (self) Reduction{static_cast<DType>(dtype), static_cast<RedOp>(op), divisor};
          },
          nb::arg("dtype"), nb::arg("op"), nb::arg("divisor") = 1);

  m.attr("DTYPE_COUNT") = shoal::kDTypeCount;
  m.attr("REDOP_COUNT") = shoal::kRedOpCount;
  nb::enum_<RedOp>(m, "RedOp")
      .value("SUM", RedOp::kSum)
      .value("AVG", RedOp::kAvg)
      .value("PRODUCT", RedOp::kProduct)
      .value("MIN", RedOp::kMin)
      .value("MAX", RedOp::kMax)
      .value("BAND", RedOp::kBand)
      .value("BOR", RedOp::kBor)
      .value("BXOR", RedOp::kBxor)
      .value("PREMUL_SUM", RedOp::kPremulSum);
  m.def("dtype_name", [](int dtype) { return std::string(shoal::name(static_cast<DType>(dtype))); });
  m.def("redop_name", [](int op) { return std::string(shoal::name(static_cast<RedOp>(op))); });
  m.def("itemsize", [](int dtype) { return shoal::itemsize(static_cast<DType>(dtype)); });
  m.def("legal",
        [](int dtype, int op) { return shoal::legal(static_cast<DType>(dtype), static_cast<RedOp>(op)); });

  m.def("highest_level", &highest_level);
  m.def("set_level", &set_level, nb::arg("level"));
  m.def("accumulator_size", &accumulator_size, nb::arg("reduction"));
  m.def(
      "reduce",
      [](const Reduction& reduction, const Addresses& dsts, const Addresses& srcs, size_t count,
         bool stream) { reduce(reduction, pointers(dsts), pointers(srcs), count, stream); },
      nb::arg("reduction"), nb::arg("dsts"), nb::arg("srcs"), nb::arg("count"), nb::arg("stream") = false,
      nb::call_guard<WithoutGil>());
  m.def(
      "reduce_partial",
      [](const Reduction& reduction, uintptr_t acc, const Addresses& srcs, size_t count) {
        reduce_partial(reduction, reinterpret_cast<void*>(acc), pointers(srcs), count);
      },
      nb::arg("reduction"), nb::arg("acc"), nb::arg("srcs"), nb::arg("count"));
  m.def(
      "combine_partials",
      [](const Reduction& reduction, uintptr_t acc, const Addresses& accs, size_t count) {
        combine_partials(reduction, reinterpret_cast<void*>(acc), pointers(accs), count);
      },
      nb::arg("reduction"), nb::arg("acc"), nb::arg("accs"), nb::arg("count"));
  m.def(
      "finish_partials",
      [](const Reduction& reduction, uintptr_t dst, const Addresses& accs, size_t count) {
        finish_partials(reduction, reinterpret_cast<void*>(dst), pointers(accs), count);
      },
      nb::arg("reduction"), nb::arg("dst"), nb::arg("accs"), nb::arg("count"));
  m.def(
      "copy",
      [](uintptr_t dst, uintptr_t src, size_t bytes, bool stream) {
        copy(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), bytes, stream);
      },
      nb::arg("dst"), nb::arg("src"), nb::arg("bytes"), nb::arg("stream") = false,
      nb::call_guard<WithoutGil>());
}
