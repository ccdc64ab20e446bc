#include "bind/bindings.h"

NB_MODULE(_core, m) {
  m.doc() = "The native core of shoal; see cpp/.";
  bind_engine(m);
  bind_kernels(m);
  bind_reducer(m);
}
