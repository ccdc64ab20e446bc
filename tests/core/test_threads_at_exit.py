"""A daemon thread inside the core does not abort the program when this ends."""

import subprocess
import sys

_PROGRAM = """
import ctypes, threading, time
from shoal import _core

allocate = ctypes.CDLL(None).calloc
allocate.restype = ctypes.c_void_p
count = 1 << 25  # bytes; a copy takes milliseconds, so that the program ends during one
dst, src = allocate(1, count), allocate(1, count)

def copy():
    while True:
        _core.kernels.copy(dst, src, count)

for _ in range(4):
    threading.Thread(target=copy, daemon=True).start()
time.sleep(0.1)
print("end", flush=True)
"""


def test_daemon_threads_in_the_core_let_the_program_end() -> None:
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
