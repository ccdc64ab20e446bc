// The exit code of a program whose failure is found after its last line.
//
// Python's atexit callbacks cannot change the exit code.  The C library's exit() runs later, when Python has
// called all of them and has flushed its files.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "python/bindings.h"

namespace nb = nanobind;

namespace {

int exit_code = 0;
pid_t owner = 0;  // the process that set it; it does not apply to a forked child

void end() {
  if (exit_code == 0 || owner != getpid()) return;
  std::fflush(nullptr);
  _exit(exit_code);
}

void exit_with(int code) {
  exit_code = code;
  owner = getpid();
}

}  // namespace

void bind_ending(nb::module_& m) {
  std::atexit(end);  // now, so that it runs after callbacks registered later
  m.def("exit_with", &exit_with, nb::arg("code"));
}
