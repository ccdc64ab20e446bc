// The gradient reducer for Python: its decisions (lists of integers in and out), and the hook of a gradient.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "bind/bindings.h"
#include "bind/tensors.h"
#include "reducer/assignment.h"
#include "reducer/readiness.h"

namespace nb = nanobind;
using shoal::reducer::Mark;
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

nb::handle grad() {
  static PyObject* const name = PyUnicode_InternFromString("grad");
  return name;
}

// Where the gradients of a model belong.  The tensors are Python's, and its lists may change.
struct Places {
  nb::list views;      // by parameter: what its `grad` is when the gradient is in its bucket
  nb::list addresses;  // where these lie, because what a view refers to can be changed

  nb::handle view(std::size_t index) const { return views[index]; }
  bool whole(std::size_t index, nb::handle gradient) const {
    return shoal::address_of(gradient.ptr()) == nb::cast<std::uint64_t>(addresses[index]);
  }
  bool hold(std::size_t index, nb::handle gradient) const {
    return gradient.is(view(index)) && whole(index, gradient);
  }
};

constexpr std::uint64_t kLong = 1 << 17;  // bytes that take so long to copy that others should run meanwhile

// Copies a gradient that autograd put elsewhere to its place, and makes it the view of that; false where it
// takes more than copying bytes.
bool bring(const Places& places, const shoal::PlainTensor& like, std::size_t index, nb::handle parameter,
           nb::handle gradient) {
  const auto from = shoal::plain_tensor(gradient.ptr());
  if (!from || from->dtype != like.dtype || from->count != like.count) return false;
  nb::handle view = places.view(index);
  const std::uint64_t address = shoal::address_of(view.ptr());
  if (address != nb::cast<std::uint64_t>(places.addresses[index])) return false;
  auto* to = reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(address));
  if (from->span.bytes < kLong) {
    std::memcpy(to, from->span.data, from->span.bytes);
  } else {
    nb::gil_scoped_release release;
    std::memcpy(to, from->span.data, from->span.bytes);
  }
  parameter.attr(grad()) = view;
  return true;
}

// What autograd calls with a parameter whose gradient has arrived.  Python is asked only if the gradient is
// not in its bucket, or if there is something to do.
nb::object gradient_hook(nb::object readiness, std::uint32_t index, Places places, bool as_view,
                         nb::callable attend) {
  auto* marks = nb::cast<Readiness*>(readiness);
  std::optional<shoal::PlainTensor> like;
  if (as_view) like = shoal::plain_tensor(places.view(index).ptr());
  return nb::cpp_function([readiness, marks, index, places, like, attend](nb::handle parameter) {
    const Mark mark = marks->mark(index);
    if (mark == Mark::kIgnored) return;
    const nb::object gradient = parameter.attr(grad());
    const bool taken =
        places.hold(index, gradient) || (like && bring(places, *like, index, parameter, gradient));
    if (!taken || mark != Mark::kArrived) attend(index, static_cast<int>(mark), taken);
  });
}

// Whether the values of all dictionaries, one after another, are these very objects.
bool values_are(const nb::list& dictionaries, const nb::list& values) {
  std::size_t next = 0;
  for (nb::handle dictionary : dictionaries) {
    if (!PyDict_Check(dictionary.ptr())) throw std::invalid_argument("values_are() looks into dictionaries");
    Py_ssize_t place = 0;
    PyObject *key, *value;
    while (PyDict_Next(dictionary.ptr(), &place, &key, &value)) {
      if (next == values.size() || PyList_GET_ITEM(values.ptr(), static_cast<Py_ssize_t>(next)) != value)
        return false;
      ++next;
    }
  }
  return next == values.size();
}

}  // namespace

void bind_reducer(nb::module_& m) {
  m.attr("BUCKET_ALIGNMENT") = shoal::reducer::kAlignment;
  m.def("assign_buckets", &assign_buckets, nb::arg("bytes"), nb::arg("kinds"), nb::arg("order"),
        nb::arg("first_cap"), nb::arg("cap"),
        "Buckets as (members, offsets in bytes, bytes), in the order in which they are expected to fill.");
  m.def(
      "gradient_hook",
      [](nb::object readiness, std::uint32_t parameter, nb::list views, nb::list addresses, bool as_view,
         nb::callable attend) {
        return gradient_hook(std::move(readiness), parameter, {std::move(views), std::move(addresses)},
                             as_view, std::move(attend));
      },
      nb::arg("readiness"), nb::arg("parameter"), nb::arg("views"), nb::arg("addresses"), nb::arg("as_view"),
      nb::arg("attend"),
      "A hook that marks a gradient.  It calls `attend(parameter, mark, taken)` unless there is nothing to "
      "do;\n"
      "`taken`: the gradient is the view of its place.");
  m.def("values_are", &values_are, nb::arg("dictionaries"), nb::arg("values"));
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
