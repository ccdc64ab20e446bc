#include "python/bindings.h"

NB_MODULE(_core, m) {
  // A model that exists until the interpreter exits keeps its parameters' hooks: not a leak worth a warning.
  nanobind::set_leak_warnings(false);
  m.doc() = "The native core of shoal; see cpp/.";
  bind_constant_override(m);
  bind_engine(m);
  bind_ending(m);
  bind_interrupt(m);
  bind_kernels(m);
  bind_mpi(m);
  bind_packed(m);
  bind_post(m);
  bind_record(m);
  bind_reducer(m);
  bind_source(m);
  bind_shortcut(m);
  bind_statistics(m);
}
