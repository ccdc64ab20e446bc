// The MPI library of the process for shoal.backend.mpi, which passes addresses and handles as numbers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unordered_map.h>
#include <nanobind/stl/vector.h>

#include "engine/context.h"
#include "mpi/library.h"
#include "mpi/mover.h"
#include "python/bindings.h"

namespace nb = nanobind;
using namespace shoal;

void bind_mpi(nb::module_& m) {
  using Reductions = std::map<std::pair<int, int>, std::tuple<mpi::Handle, mpi::Handle, bool>>;
  nb::class_<mpi::Library>(m, "MpiLibrary")
      .def_static(
          "make",
          [](const mpi::Library::Functions& functions, std::size_t handle_bytes, std::intptr_t in_place,
             int any_source, int any_tag, mpi::Handle comm_self) {
            return mpi::Library::make(functions, handle_bytes,
                                      {reinterpret_cast<void*>(in_place), any_source, any_tag, comm_self});
          },
          nb::arg("functions"), nb::arg("handle_bytes"), nb::arg("in_place"), nb::arg("any_source"),
          nb::arg("any_tag"), nb::arg("comm_self"))
      .def_static("names", [] { return std::pair(mpi::Library::with_counts(), mpi::Library::others()); });
  m.def(
      "move_by_mpi",
      [](Group& group, std::shared_ptr<mpi::Library> library, std::vector<mpi::Handle> comms,
         std::map<std::size_t, mpi::Handle> types, const Reductions& reductions, bool exchanges) {
        if (static_cast<int>(comms.size()) != group.lane_count())
          throw std::invalid_argument("a group needs a communicator for each lane");
        mpi::MpiMover::Options options{group.rank(),     group.size(), std::move(comms),
                                       std::move(types), {},           exchanges};
        for (const auto& [key, value] : reductions)
          options.reductions[key] = {std::get<0>(value), std::get<1>(value), std::get<2>(value)};
        group.set_mover(std::make_shared<mpi::MpiMover>(std::move(library), std::move(options)));
      },
      nb::arg("group"), nb::arg("library"), nb::arg("comms"), nb::arg("types"), nb::arg("reductions"),
      nb::arg("exchanges"));
}
