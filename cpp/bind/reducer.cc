// The gradient reducer's decisions for Python: lists of integers in and out, no tensors.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "bind/bindings.h"
#include "reducer/assignment.h"
#include "reducer/readiness.h"

namespace nb = nanobind;
using shoal::reducer::Readiness;

namespace {

using Members = std::vector<std::uint32_t>;
using Assigned = std::tuple<Members, std::vector<std::uint64_t>, std::uint64_t>;

std::vector<Assigned> assign_buckets(const std::vector<std::uint64_t>& bytes,
                                     const std::vector<std::uint32_t>& kinds, const Members& order,
                                     std::uint64_t first_cap, std::uint64_t cap) {
  if (bytes.size() != kinds.size()) throw std::invalid_argument("bytes and kinds differ in length");
  std::vector<shoal::reducer::Parameter> parameters;
  parameters.reserve(bytes.size());
  for (std::size_t i = 0; i < bytes.size(); ++i) parameters.push_back({bytes[i], kinds[i]});
  std::vector<Assigned> result;
  for (auto& bucket : shoal::reducer::assign(parameters, order, first_cap, cap))
    result.emplace_back(std::move(bucket.members), std::move(bucket.offsets), bucket.bytes);
  return result;
}

}  // namespace

void bind_reducer(nb::module_& m) {
  m.attr("BUCKET_ALIGNMENT") = shoal::reducer::kAlignment;
  m.def("assign_buckets", &assign_buckets, nb::arg("bytes"), nb::arg("kinds"), nb::arg("order"),
        nb::arg("first_cap"), nb::arg("cap"),
        "Buckets as (members, offsets in bytes, bytes), in the order in which they are expected to fill.");
  nb::class_<Readiness>(m, "Readiness", "Which gradients have arrived, and which buckets may be sent.")
      .def(
          "__init__",
          [](Readiness* self, const std::vector<Members>& buckets, const Members& expected) {
            new (self) Readiness(buckets, expected);
          },
          nb::arg("buckets"), nb::arg("expected"))
      .def(
          "rebuild",
          [](Readiness& self, const std::vector<Members>& buckets, const Members& expected) {
            self = Readiness(buckets, expected);
          },
          nb::arg("buckets"), nb::arg("expected"), "Start afresh with other buckets.")
      .def("arm", &Readiness::arm, "The next gradient opens a pass.")
      .def("disarm", &Readiness::disarm)
      .def("open", &Readiness::open, "Open a pass now.")
      .def("close", &Readiness::close, "End the pass and forget what arrived in it.")
      .def(
          "mark",
          [](Readiness& self, std::uint32_t parameter) { return static_cast<int>(self.mark(parameter)); },
          nb::arg("parameter"),
          "Record a gradient: 0 ignored, 1 recorded, 2 look at `arrived` and `ready`, 3 unexpected.")
      .def(
          "skip",
          [](Readiness& self, const Members& parameters) {
            for (std::uint32_t parameter : parameters) self.skip(parameter);
          },
          nb::arg("parameters"), "No gradients of these are expected in this pass.")
      .def("learn", &Readiness::learn, "From now on nothing is ready; only count what arrives.")
      .def_prop_ro("opened", &Readiness::opened)
      .def_prop_ro("ready", &Readiness::ready, "Buckets with an index below this are complete.")
      .def_prop_ro("arrived", &Readiness::arrived, "How many gradients have arrived.")
      .def("counts", &Readiness::counts, "How often each gradient has arrived.")
      .def("arrival", &Readiness::arrival, "Parameters in the order in which their gradients arrived.")
      .def("missing", &Readiness::missing, "Parameters whose gradients have not arrived.");
}
