// The exit code of a program that turns out to have failed when its last line has been run.
//
// What Python's atexit calls cannot change the exit code.  The C library's exit() comes later, when Python
// has called all of them and has flushed its files.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "bind/bindings.h"

namespace nb = nanobind;

namespace {

int exit_code = 0;
pid_t owner = 0;  // whose it is: a forked child's end says nothing of it

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
  std::atexit(end);  // now, so that it comes after what is registered later
  m.def("exit_with", &exit_with, nb::arg("code"),
        "The process ends with this code, from 1 to 255, should it end in good order.");
}
