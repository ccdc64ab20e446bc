// Handling of Ctrl-C in combination with torch's C++.
//
// Python calls a handler of SIGINT in the main thread, between two bytecodes and in functions of its C API
// that check signals.  Torch calls such functions where C++ must not throw (to look up overrides of a device
// written in Python), and an exception there ends the process.  This handler then schedules the signal again
// a moment later.  It is a C function, so that no interpreter loop runs for it.
#include <dlfcn.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <unwind.h>

#include <cstdint>
#include <cstring>

#include "python/bindings.h"

#ifndef sigev_notify_thread_id  // glibc does not define it
#define sigev_notify_thread_id _sigev_un._tid
#endif

namespace nb = nanobind;

namespace {

constexpr long kResendDelayNs = 1'000'000;  // nanoseconds until the signal is sent again

timer_t timer;
pid_t owner = 0;  // the process with the timer: a forked child has none

// Sends SIGINT to this thread, the main one, after `nanoseconds`; 0: does not send it.  Unlike a flag for
// Python, a signal interrupts a blocking system call.
void send_after(long nanoseconds) {
  if (owner != getpid()) {
    if (nanoseconds == 0) return;
    sigevent event{};
    event.sigev_notify = SIGEV_THREAD_ID;  // another thread could take it while the main thread waits
    event.sigev_notify_thread_id = static_cast<pid_t>(syscall(SYS_gettid));
    event.sigev_signo = SIGINT;
    if (timer_create(CLOCK_MONOTONIC, &event, &timer) != 0) {
      PyErr_SetInterrupt();
      return;
    }
    owner = getpid();
  }
  const itimerspec when{{0, 0}, {0, nanoseconds}};
  timer_settime(timer, 0, &when, nullptr);
}

// An address in the stack frame of the interpreter loop that runs the innermost bytecode.
std::uintptr_t innermost_loop() {
  PyThreadState* state = PyThreadState_Get();
#if PY_VERSION_HEX < 0x030D0000
  return reinterpret_cast<std::uintptr_t>(state->cframe);
#else
  // The loop begins with a Python frame on the stack; all others are in memory below it.
  struct Frame {
    void* executable;
    Frame* previous;
  };
  const auto here = reinterpret_cast<std::uintptr_t>(__builtin_frame_address(0));
  auto* frame = reinterpret_cast<Frame*>(state->current_frame);
  while (frame != nullptr && reinterpret_cast<std::uintptr_t>(frame) < here) frame = frame->previous;
  return reinterpret_cast<std::uintptr_t>(frame);
#endif
}

bool is_of_torch(std::uintptr_t code) {
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(code), &info) == 0 || info.dli_fname == nullptr) return false;
  const char* slash = std::strrchr(info.dli_fname, '/');
  const char* name = slash == nullptr ? info.dli_fname : slash + 1;
  return std::strncmp(name, "libtorch", 8) == 0 || std::strncmp(name, "libc10", 6) == 0;
}

struct Search {
  std::uintptr_t loop;
  bool found;
};

_Unwind_Reason_Code look(_Unwind_Context* context, void* given) {
  auto& search = *static_cast<Search*>(given);
  if (_Unwind_GetCFA(context) > search.loop) return _URC_END_OF_STACK;
  search.found = is_of_torch(_Unwind_GetIP(context));
  return search.found ? _URC_END_OF_STACK : _URC_NO_REASON;
}

// Whether torch, rather than a bytecode, has called the function that checks signals.
bool called_by_torch() {
  Search search{innermost_loop(), false};
  _Unwind_Backtrace(look, &search);
  return search.found;
}

// Whether an uninterruptible function is running, according to the innermost function in `marks`.
bool in_uncut(PyObject* marks) {
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  PyObject* mark = nullptr;
  while (frame != nullptr && mark == nullptr) {
    auto* code = reinterpret_cast<PyObject*>(PyFrame_GetCode(frame));
    mark = PyDict_GetItem(marks, code);
    Py_DECREF(code);
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  return mark == Py_True;
}

// The handler; `self` is (the program's handler, marks).
PyObject* guarded(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  PyObject *type, *value, *traceback;  // of an error that is set when torch calls
  PyErr_Fetch(&type, &value, &traceback);
  PyObject* result = Py_None;
  if (called_by_torch() || in_uncut(PyTuple_GET_ITEM(self, 1))) {
    send_after(kResendDelayNs);
    Py_INCREF(result);
  } else {
    send_after(0);
    result = PyObject_Vectorcall(PyTuple_GET_ITEM(self, 0), args, static_cast<std::size_t>(count), nullptr);
  }
  if (result != nullptr) {
    PyErr_Restore(type, value, traceback);
  } else {
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
  }
  return result;
}

PyMethodDef guarded_method{"guarded_interrupt",
                           reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(guarded)), METH_FASTCALL,
                           nullptr};

// A handler of SIGINT that calls `handler` where an exception may be raised, and otherwise a moment later.
nb::object guard_interrupts(nb::object handler, nb::dict marks) {
  nb::tuple self = nb::make_tuple(handler, marks);
  return nb::steal(PyCFunction_NewEx(&guarded_method, self.ptr(), nullptr));
}

// The handler that such a one calls; None: it is another.
nb::object guarded_handler(nb::object handler) {
  PyObject* object = handler.ptr();
  if (!PyCFunction_Check(object) || PyCFunction_GET_FUNCTION(object) != guarded_method.ml_meth)
    return nb::none();
  return nb::borrow(PyTuple_GET_ITEM(PyCFunction_GET_SELF(object), 0));
}

}  // namespace

void bind_interrupt(nb::module_& m) {
  m.def("guard_interrupts", &guard_interrupts, nb::arg("handler"), nb::arg("marks"));
  m.def("guarded_handler", &guarded_handler, nb::arg("handler").none());
}
