#include "bind/bindings.h"

NB_MODULE(_core, m) {
  // A model that lives until the interpreter ends keeps its parameters' hooks: no leak to tell users of.
  nanobind::set_leak_warnings(false);
  m.doc() = "The native core of shoal; see cpp/.";
  bind_engine(m);
  bind_ending(m);
  bind_interrupt(m);
  bind_kernels(m);
  bind_packed(m);
  bind_post(m);
  bind_record(m);
  bind_reducer(m);
  bind_source(m);
  bind_shortcut(m);
}
