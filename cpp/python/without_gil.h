// A scope in which other threads may hold the GIL.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace shoal {

// Releases the GIL, and takes it again at the end of the scope.
//
// If the interpreter is being finalized, a daemon thread stays in the destructor until the process ends, as
// in Python 3.14.  Before 3.14, PyEval_RestoreThread() ends the thread by an exception.  This must not leave
// a destructor: nanobind's gil_scoped_release would abort the program.
class WithoutGil {
 public:
  WithoutGil() noexcept : state_(PyEval_SaveThread()) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // abi::__forced_unwind of pthread_exit()
      for (;;) ::pause();
    }
  }

 private:
  PyThreadState* state_;
};

}  // namespace shoal
