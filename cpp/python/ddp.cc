// The gradient reducer for Python: its decisions (lists of integers), and the gradient hook.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "ddp/assignment.h"
#include "ddp/pass.h"
#include "python/bindings.h"
#include "python/tensors.h"
#include "python/without_gil.h"

namespace nb = nanobind;
using shoal::WithoutGil;
using shoal::ddp::Actions;
using shoal::ddp::Mark;
using shoal::ddp::Pass;
using PassEnd = shoal::ddp::End;

namespace {

using Members = std::vector<std::uint32_t>;
using Assigned = std::tuple<Members, std::vector<std::uint64_t>, std::uint64_t>;

std::vector<Assigned> assign_buckets(const std::vector<std::uint64_t>& bytes,
                                     const std::vector<std::uint32_t>& kinds, const Members& order,
                                     std::uint64_t first_cap, std::uint64_t cap) {
  if (bytes.size() != kinds.size()) throw std::invalid_argument("bytes and kinds differ in length");
  std::vector<shoal::ddp::Parameter> parameters;
  parameters.reserve(bytes.size());
  for (std::size_t i = 0; i < bytes.size(); ++i) parameters.push_back({bytes[i], kinds[i]});
  std::vector<Assigned> result;
  for (auto& bucket : shoal::ddp::assign(parameters, order, first_cap, cap))
    result.emplace_back(std::move(bucket.members), std::move(bucket.offsets), bucket.bytes);
  return result;
}

nb::handle grad() {
  static PyObject* const name = PyUnicode_InternFromString("grad");
  return name;
}

// The places of a model's gradients.  The tensors and lists are owned by Python, and the lists may change.
struct Places {
  nb::list views;      // by parameter: the `grad` of a gradient that is in its bucket
  nb::list addresses;  // their addresses, because a view's memory can be replaced

  nb::handle view(std::size_t index) const { return views[index]; }
  bool whole(std::size_t index, nb::handle gradient) const {
    return shoal::address_of(gradient.ptr()) == nb::cast<std::uint64_t>(addresses[index]);
  }
  bool hold(std::size_t index, nb::handle gradient) const {
    return gradient.is(view(index)) && whole(index, gradient);
  }
};

constexpr std::uint64_t kLong = 1 << 17;  // bytes from which a copy releases the GIL

// Copies a gradient that autograd stored elsewhere to its place, and sets the view as gradient; false if a
// copy of bytes is not sufficient.
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
    const WithoutGil released;
    std::memcpy(to, from->span.data, from->span.bytes);
  }
  parameter.attr(grad()) = view;
  return true;
}

// The hook that autograd calls with a parameter whose gradient has arrived.  It calls Python only if the
// gradient is not in its bucket (not `taken`), or if there is something to do.  A gradient that opens a pass
// is left to Python, which checks for references to earlier gradients before the buckets are overwritten.
nb::object gradient_hook(nb::object owner, std::uint32_t index, Places places, bool as_view,
                         nb::callable arrived) {
  auto* pass = nb::cast<Pass*>(owner);
  std::optional<shoal::PlainTensor> like;
  if (as_view) like = shoal::plain_tensor(places.view(index).ptr());
  return nb::cpp_function([owner, pass, index, places, like, arrived](nb::handle parameter) {
    const bool opened = pass->opened();
    const Mark mark = pass->mark(index);
    if (mark == Mark::kIgnored) return;
    const nb::object gradient = parameter.attr(grad());
    const bool taken =
        places.hold(index, gradient) || (like && opened && bring(places, *like, index, parameter, gradient));
    if (!taken || mark != Mark::kArrived) arrived(index, mark, taken);
  });
}

// Actions implemented by the methods of a Python object.
class Methods final : public Actions {
 public:
  explicit Methods(nb::handle object) : object_(object) {}
  bool fill(std::size_t bucket) override { return nb::cast<bool>(object_.attr("fill")(bucket)); }
  void send(std::size_t bucket) override { object_.attr("send")(bucket); }
  void wait(std::size_t bucket) override { object_.attr("wait")(bucket); }
  void deliver(const std::vector<bool>& used) override { object_.attr("deliver")(used); }

 private:
  nb::handle object_;
};

// Whether the values of all dictionaries, in order, are identical to these objects.
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
  m.attr("BUCKET_ALIGNMENT") = shoal::ddp::kAlignment;
  m.def("assign_buckets", &assign_buckets, nb::arg("bytes"), nb::arg("kinds"), nb::arg("order"),
        nb::arg("first_cap"), nb::arg("cap"));
  m.def(
      "gradient_hook",
      [](nb::object pass_, std::uint32_t parameter, nb::list views, nb::list addresses, bool as_view,
         nb::callable arrived) {
        return gradient_hook(std::move(pass_), parameter, {std::move(views), std::move(addresses)}, as_view,
                             std::move(arrived));
      },
      nb::arg("pass_"), nb::arg("parameter"), nb::arg("views"), nb::arg("addresses"), nb::arg("as_view"),
      nb::arg("arrived"));
  m.def("values_are", &values_are, nb::arg("dictionaries"), nb::arg("values"));
  m.attr("OUTCOME") = shoal::ddp::kOutcome;
  nb::enum_<Mark>(m, "Mark")
      .value("IGNORED", Mark::kIgnored)
      .value("ARRIVED", Mark::kArrived)
      .value("PROCEED", Mark::kProceed)
      .value("UNEXPECTED", Mark::kUnexpected);
  nb::enum_<PassEnd>(m, "PassEnd")
      .value("NOTHING", PassEnd::kNothing)
      .value("WELL", PassEnd::kWell)
      .value("TROUBLE", PassEnd::kTrouble);
  nb::class_<Pass>(m, "Pass")
      .def(
          "__init__",
          [](Pass* self, const std::vector<Members>& buckets, const Members& expected, bool find_unused,
             bool learn, bool fill_all, std::uint32_t copies) {
            new (self) Pass({find_unused, learn, fill_all, copies}, buckets, expected);
          },
          nb::arg("buckets"), nb::arg("expected"), nb::kw_only(), nb::arg("find_unused") = false,
          nb::arg("learn") = false, nb::arg("fill_all") = false, nb::arg("copies") = 1)
      .def(
          "rebuild",
          [](Pass& self, const std::vector<Members>& buckets, const Members& expected) {
            self.rebuild(buckets, expected);
          },
          nb::arg("buckets"), nb::arg("expected"))
      .def_prop_rw("separate", &Pass::separate, &Pass::set_separate)
      .def("expect", &Pass::expect, nb::arg("counts"), nb::arg("copies"))
      .def("ignore", &Pass::ignore)
      .def("open", &Pass::open)
      .def(
          "mark", [](Pass& self, std::uint32_t parameter) { return self.mark(parameter); },
          nb::arg("parameter"))
      .def(
          "begin",
          [](Pass& self, nb::handle actions, const Members& unreached) {
            Methods methods(actions);
            self.begin(methods, unreached);
          },
          nb::arg("actions"), nb::arg("unreached"))
      .def(
          "launch",
          [](Pass& self, nb::handle actions) {
            Methods methods(actions);
            self.launch(methods);
          },
          nb::arg("actions"))
      .def(
          "finish",
          [](Pass& self, nb::handle actions, bool interrupted, bool shadow) {
            Methods methods(actions);
            return self.finish(methods, interrupted, shadow);
          },
          nb::arg("actions"), nb::arg("interrupted") = false, nb::arg("shadow") = false)
      .def("tail", &Pass::tail)
      .def("flags", &Pass::flags, nb::arg("present"))
      .def(
          "decode_tail",
          [](Pass& self, const shoal::ddp::Tail& mean, double epsilon) { self.decode(mean, epsilon); },
          nb::arg("mean"), nb::arg("epsilon"))
      .def(
          "decode_flags", [](Pass& self, const std::vector<std::uint8_t>& maximum) { self.decode(maximum); },
          nb::arg("maximum"))
      .def("close", &Pass::close)
      .def("take_order", &Pass::take_order)
      .def_prop_ro("opened", &Pass::opened)
      .def_prop_ro("gaps", &Pass::gaps)
      .def_prop_ro("number", &Pass::number)
      .def_prop_ro("extra", [](const Pass& self) { return self.report().extra; })
      .def_prop_ro("expected", &Pass::expected)
      .def_prop_ro("ready", [](const Pass& self) { return self.readiness().ready(); })
      .def_prop_ro("arrived", [](const Pass& self) { return self.readiness().arrived(); })
      .def("counts", [](const Pass& self) { return self.readiness().counts(); })
      .def("missing", &Pass::missing);
}
