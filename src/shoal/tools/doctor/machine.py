"""Checks of this machine: cores, memory, limits, and the features of the kernel that ranks use."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from ... import config
from ...common.formatting import counted, format_numbers
from ...errors import ConfigurationError
from ...rendezvous import private_directory
from ..findings import Finding, fail, ok, warn
from . import cgroups, settings

#: numbers of system calls that Python does not have, or only if it was built on a recent Linux
_PIDFD_OPEN = 434
_GET_ROBUST_LIST = {"x86_64": 274, "aarch64": 100}
#: limits below which a job of several ranks may fail
_LEAST_MEMORY, _LEAST_SHM = 2**30, 2**28
_LEAST_FILES, _LEAST_PROCESSES, _LEAST_BACKLOG = 4096, 500, 512

_libc = ctypes.CDLL(None, use_errno=True)


def local_ranks() -> int:
    """The number of ranks on this host, if a launcher has set it; otherwise 1."""
    launch = settings.launch()
    return (launch and launch.local_size) or 1


def usable_cores() -> float:
    """Cores of the affinity mask, or the CPU quota if it is less."""
    cores = len(os.sched_getaffinity(0))
    return min(cores, cgroups.cpu_quota() or cores)


def cores() -> Finding:
    """Cores that this process may use, compared with the ranks of this host."""
    usable, quota, ranks = os.sched_getaffinity(0), cgroups.cpu_quota(), local_ranks()
    fact = f"{format_numbers('core', usable)} of {os.cpu_count()}"
    if quota is not None:
        fact += f", with a CPU quota of {quota:g} cores"
    if ranks > usable_cores():
        return warn(
            f"{fact}, for {counted(ranks, 'rank')}: ranks that wait take CPU time from the others",
            "start at most one rank per core, or allow this job more cores",
        )
    if quota is not None and quota < len(usable):
        return warn(
            f"{fact}: programs that start a thread per core are stopped for part of each 0.1 s",
            f"raise the CPU limit of the container or unit to {len(usable)}, or let all ranks together use "
            f"{counted(max(1, int(quota)), 'thread')}",
        )
    return ok(fact)


def threads() -> Finding:
    """OMP_NUM_THREADS, which determines the threads of torch's operators in each rank."""
    text, limit, ranks = os.environ.get("OMP_NUM_THREADS", ""), usable_cores(), local_ranks()
    best = max(1, int(limit) // ranks)
    if not text:
        if ranks == 1:
            return ok("OMP_NUM_THREADS is not set: `shoal run` and torchrun set it")
        return warn(
            f"OMP_NUM_THREADS is not set: each of {ranks} ranks starts a thread per core",
            f"set OMP_NUM_THREADS={best}",
        )
    first = text.split(",")[0].strip()
    if not first.isdecimal() or int(first) == 0:
        return warn(f"OMP_NUM_THREADS={text!r} is no number of threads", f"set OMP_NUM_THREADS={best}")
    if int(first) * ranks > max(1, limit):
        return warn(
            f"OMP_NUM_THREADS={text} for {counted(ranks, 'rank')} on {limit:g} usable cores",
            f"set OMP_NUM_THREADS={best}",
        )
    return ok(f"OMP_NUM_THREADS={text}")


def memory() -> Finding:
    """Available memory: of the machine, of the control group, and for shared memory of ranks."""
    machine = psutil.virtual_memory()
    left, fact = machine.available, f"{_size(machine.available)} of {_size(machine.total)} available"
    group = cgroups.memory()
    if group is not None:
        limit, used = group
        left = min(left, max(0, limit - used))
        fact += f", control group {_size(used)} of {_size(limit)} used"
    try:
        shared = config.SHARED_MEMORY_LIMIT.get()
    except ConfigurationError:  # reported by settings.variables
        shared = None
    if shared is not None:
        fact += f", SHOAL_SHARED_MEMORY_LIMIT {_size(shared)}"
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        return warn(
            f"{fact}, address space of a process limited to {_size(address_space)}: torch and the shared "
            "memory of all ranks of this host have to fit",
            "ulimit -v unlimited",
        )
    if left < _LEAST_MEMORY:
        return warn(fact, "end other programs, or raise the memory limit of the container or job")
    if shared is not None and shared * local_ranks() > left:
        return warn(
            f"{fact}: the kernel kills a rank before it reaches the limit",
            f"set SHOAL_SHARED_MEMORY_LIMIT to at most {_size(left // local_ranks())}",
        )
    return ok(fact)


def shared_memory_directory() -> Finding:
    """/dev/shm, which the workers of a DataLoader use; ranks of shoal use memfd."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError as error:
        return warn(
            f"/dev/shm cannot be used ({error.strerror}): a DataLoader with workers fails",
            "mount a tmpfs at /dev/shm",
        )
    free = found.f_bavail * found.f_frsize
    fact = f"/dev/shm has {_size(free)} free; workers of a DataLoader use it, shoal does not"
    if free < _LEAST_SHM:
        return warn(
            fact, "docker run --shm-size=8g, or in Kubernetes an emptyDir with medium: Memory at /dev/shm"
        )
    return ok(fact)


def open_files() -> Finding:
    """The limit of file descriptors: a rank needs 2 for each other rank, a store one per rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    fact = f"{soft} open files, which shoal raises up to {most}"
    if hard != resource.RLIM_INFINITY and hard < _LEAST_FILES:
        return warn(
            f"{fact}: enough for {hard // 3} ranks",
            "raise the limit: ulimit -Hn 65536, LimitNOFILE= of systemd, or --ulimit nofile= of docker",
        )
    return ok(fact)


def processes() -> Finding:
    """The limits of processes and threads."""
    limits: list[tuple[str, int]] = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:
        mine = sum(_threads_of(each) for each in psutil.process_iter(["uids"]) if _is_mine(each))
        limits.append(("ulimit -u", soft - mine))
    group = cgroups.processes()
    if group is not None:
        limits.append(("the control group", group[0] - group[1]))
    running = sum(_threads_of(each) for each in psutil.process_iter())
    limits += [
        (f"kernel.{name}", value - running)
        for name in ("pid_max", "threads-max")
        if (value := _kernel_number(f"kernel/{name}")) is not None
    ]
    if not limits:
        return ok("no limit of processes and threads is known")
    source, left = min(limits, key=lambda each: each[1])
    fact = f"{max(0, left)} more processes and threads can start, limited by {source}"
    if left < _LEAST_PROCESSES:
        return warn(fact, f"raise the limit of {source}, or start fewer ranks and threads")
    return ok(fact)


def _is_mine(process: psutil.Process) -> bool:
    uids = process.info["uids"]
    return uids is not None and uids.real == os.getuid()


def _threads_of(process: psutil.Process) -> int:
    try:
        return process.num_threads()
    except psutil.Error:
        return 0


def connection_backlog() -> Finding:
    """net.core.somaxconn, which limits ranks that connect at once."""
    backlog = _kernel_number("net/core/somaxconn")
    if backlog is None:
        return ok("net.core.somaxconn is unknown")
    if backlog < _LEAST_BACKLOG:
        return warn(
            f"net.core.somaxconn is {backlog}: of more ranks that connect at once, some retry after 1 s",
            "sysctl net.core.somaxconn=4096",
        )
    return ok(f"net.core.somaxconn is {backlog}")


def temporary_files() -> Finding:
    """The directory of files that processes of this user share."""
    advice = "set TMPDIR to a writable directory of this host, or SHOAL_SECRET and SHOAL_STORE for every job"
    try:
        folder = Path(tempfile.gettempdir())
    except OSError as error:
        return warn(f"there is no directory for temporary files: {error.strerror or error}", advice)
    try:
        if (folder / f"shoal-{os.geteuid()}").exists():
            folder = private_directory()
    except ConfigurationError as error:
        return warn(str(error), advice)
    if not os.access(folder, os.W_OK | os.X_OK):
        return warn(f"{folder} cannot be written to", advice)
    return ok(f"temporary files are in {folder}")


def memfd() -> Finding:
    """memfd_create, which makes the memory that ranks share."""
    if not hasattr(os, "memfd_create"):
        return ok("memfd_create is not checked: this Python does not have it (the self test uses it)")
    try:
        fd = os.memfd_create("shoal-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            with mmap.mmap(fd, mmap.PAGESIZE) as memory:
                memory[0] = 1
        finally:
            os.close(fd)
    except OSError as error:
        return fail(
            f"ranks cannot share memory (memfd_create: {error.strerror})",
            "allow memfd_create in the seccomp profile of the container or sandbox",
        )
    return ok("memfd_create works: ranks can share memory")


def pidfd() -> Finding:
    """pidfd_open, by which a rank notices the death of another."""
    descriptor = _libc.syscall(_PIDFD_OPEN, os.getpid(), 0)
    if descriptor < 0:
        return warn(
            f"no pidfd_open ({os.strerror(ctypes.get_errno())}): the loss of a rank that has forked is "
            "noticed late, and C++ programs cannot join",
            "use Linux 5.3 or newer, and allow pidfd_open in the seccomp profile",
        )
    os.close(descriptor)
    return ok("pidfd_open works: a lost rank is noticed at once")


def robust_list() -> Finding:
    """Robust futexes, by which a rank notices the death of another before its memory is freed."""
    number = _GET_ROBUST_LIST.get(platform.machine())
    if number is None:
        return ok(f"robust futexes are not checked on {platform.machine()}")
    head, length = ctypes.c_void_p(), ctypes.c_size_t()
    if _libc.syscall(number, 0, ctypes.byref(head), ctypes.byref(length)):
        return warn(
            f"no robust futexes ({os.strerror(ctypes.get_errno())}): a lost rank with much memory is noticed "
            "after the kernel has freed it",
            "allow get_robust_list and set_robust_list in the seccomp profile",
        )
    return ok("robust futexes work: a lost rank is noticed before its memory is freed")


def proc() -> Finding:
    """/proc of another process of this user: its state and descriptors."""
    program = "import sys; sys.stdout.write('x'); sys.stdout.flush(); sys.stdin.read()"
    try:
        other = subprocess.Popen(
            [sys.executable, "-ISc", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
    except OSError as error:
        return ok(f"/proc is not checked, because no process can be started ({error.strerror})")
    with other:
        folder = Path(f"/proc/{other.pid}")
        assert other.stdout is not None
        other.stdout.read(1)  # it is Python now, not the copy of this process
        try:
            (folder / "stat").read_text(errors="replace")
            links = [os.readlink(each) for each in (folder / "fd").iterdir()]
        except OSError as error:
            return warn(
                f"/proc of other processes cannot be read ({error.strerror}): a lost rank is noticed late, "
                "and tools cannot find ranks",
                "mount /proc without hidepid and subset=pid, and run all ranks as one user",
            )
    return ok(f"/proc/PID/fd of other processes of this user can be read ({counted(len(links), 'link')})")


def _kernel_number(name: str) -> int | None:
    try:
        return int(Path("/proc/sys", name).read_text())
    except (OSError, ValueError):
        return None


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GB" if count < 1024 else f"{count / 1024:.1f} TB"
