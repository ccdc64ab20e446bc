"""The helper process of a C++ program: it meets the other ranks and connects to them.

``cpp/frontend/membership.cc`` starts it with one end of a SOCK_SEQPACKET socket, over which the program sends
the arguments of ``shoal::init`` and its shared memory, and gets the connections to all other ranks.  Then the
helper keeps the membership, and the store if rank 0 serves it, until the program releases it.  It ends when
the program does, because the socket is closed.

Each message is the number of its kind (u32) and little-endian fields; ``cpp/frontend/membership.h`` has the
table.  This module must not import torch: starting the helper would take ten times as long.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from enum import IntEnum
from pathlib import Path
from typing import NoReturn

from ... import config
from ...common.arguments import checked_seconds
from ...common.formatting import describe_error, encodable
from ...errors import ConfigurationError, OutOfResources, RendezvousError, ShoalError
from ...net import resource_error
from ...rendezvous import Membership, rendezvous
from ...tracing.recording import describe, explain, finish
from ...tracing.spool import Spool
from ..identity import Tuning, world_ident
from ..registry import NATIVE
from .mesh import LocalPeer, Mesh, OfferedMemory, connect
from .options import checked_heartbeat, checked_transport, memory_size


class _Kind(IntEnum):
    START = 1
    MEMORY = 2
    RELEASE = 3
    ABANDON = 4
    MEMBER = 11
    PEER = 12
    CONNECTED = 13
    RELEASED = 14
    FAILED = 15


_NUMBER = struct.Struct("<I")
_MEMBER = struct.Struct("<7i2B3d3Q")
_PEER = struct.Struct("<2i3Q")
_MAX_MESSAGE_BYTES = 1 << 20
_MAX_FDS = 2


class _ProgramEnded(Exception):
    """The program closed its end of the socket."""


class _Program:
    """The program at the other end of the socket ``fd``."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.set_inheritable(False)
        threading.Thread(target=self._exit_with_program, daemon=True).start()

    def _exit_with_program(self) -> NoReturn:
        """End this process when the program ends, whatever the other threads wait for."""
        poll = select.poll()
        poll.register(self._socket, 0)  # reports only that the other end is closed
        poll.poll()
        os._exit(0)

    def receive(self, *expected: _Kind) -> tuple[_Kind, bytes, list[int]]:
        """Return kind, fields and descriptors of the next message."""
        data, fds, _, _ = socket.recv_fds(self._socket, _MAX_MESSAGE_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        if not data:
            raise _ProgramEnded
        kind = _Kind(_NUMBER.unpack_from(data)[0])
        if kind not in expected:
            raise RendezvousError(f"the program sent {kind.name}, expected {expected[0].name}")
        return kind, data[_NUMBER.size :], fds

    def send(self, kind: _Kind, fields: bytes = b"", fds: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self._socket, [_NUMBER.pack(kind) + fields], list(fds))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise _ProgramEnded from error

    def send_failure(self, error: BaseException) -> None:
        known = [each for each in type(error).__mro__ if each.__module__ == ShoalError.__module__]
        name = known[0].__name__ if known else "RendezvousError"
        text = str(error) if known else describe_error(error)
        if resource_error(error) is not None:
            name, text = OutOfResources.__name__, f"{text}; raise the limits of the process (ulimit -n)"
        ranks = getattr(error, "ranks", ())
        head = struct.pack(f"<I{len(ranks)}i", len(ranks), *ranks)
        self.send(_Kind.FAILED, head + f"{name}\0{text}".encode("utf-8", "backslashreplace"))


def _start(arguments: dict[str, str]) -> tuple[Membership, bytes, str, float]:
    """Meet the other ranks; return the membership, the fields of MEMBER, transport and timeout."""
    config.check_environment()
    if (backend := config.BACKEND.get()) not in (NATIVE, f"cpu:{NATIVE}"):
        raise ConfigurationError(
            f"SHOAL_BACKEND={backend!r}: C++ programs use the native backend; unset the variable for them"
        )
    if joins := config.JOIN.get():
        raise ConfigurationError(
            f"SHOAL_JOIN={joins!r}: a C++ program cannot join a running session; start it with the others"
        )

    def number(name: str) -> int | None:
        return int(arguments[name]) if name in arguments else None

    seconds = config.TIMEOUT.get()
    if "timeout" in arguments:
        seconds = checked_seconds("timeout", float(arguments["timeout"]))
    tuning = Tuning.chosen(number("concurrency"), arguments.get("algorithm"))
    transport = checked_transport(arguments.get("transport"))
    heartbeat, vote_timeout = checked_heartbeat(None), config.VOTE_TIMEOUT.get()
    name = encodable(arguments["name"])
    membership = rendezvous(
        arguments.get("url"),
        rank=number("rank"),
        size=number("size"),
        timeout=seconds,
        secret=arguments.get("secret"),
        host=arguments.get("host_id"),
        job=arguments.get("job"),
    )
    capacity, limit = memory_size(membership.local_size, None)
    fields = _MEMBER.pack(
        membership.rank, membership.size, membership.local_rank, membership.local_size,
        tuning.concurrency, config.ALGORITHMS.index(tuning.algorithm), config.PROGRESS_THREADS.get(),
        membership.waits_for_stopped, config.QUORUM.get() == "any", seconds, heartbeat, vote_timeout,
        capacity, limit, world_ident(membership.job, membership.epoch, name),
    )  # fmt: skip
    return membership, fields + f"{name}\0{encodable(membership.job_name)}".encode(), transport, seconds


def _connect(program: _Program, membership: Membership, transport: str, timeout: float) -> Spool | None:
    """Connect the program to the other ranks, and pass it the connections; return its spool if traced."""
    _, fields, fds = program.receive(_Kind.MEMORY)
    if len(fds) != _MAX_FDS or len(fields) != 8 * (membership.size + 1):
        raise RendezvousError(
            f"the program sent {len(fds)} descriptors and {len(fields)} bytes for its memory"
        )
    memory_fd, process_fd = fds
    capacity, *rings = struct.unpack(f"<{membership.size + 1}Q", fields)
    mesh = Mesh(hosts=[0])
    try:
        if membership.size > 1:
            memory = OfferedMemory(memory_fd, capacity, rings, process_fd)
            mesh = connect(membership, memory, transport=transport, timeout=timeout)
        with mesh:
            membership.connected()
            for rank, peer in mesh.local.items():
                program.send(_Kind.PEER, _peer(rank, peer), [peer.socket, peer.memory_fd])
            for rank, fd in mesh.remote.items():
                program.send(_Kind.PEER, _PEER.pack(rank, 0, 0, 0, 0), [fd])
        hosts = struct.pack(f"<{len(mesh.hosts)}i", *mesh.hosts)
        directory = config.writable_directory(config.TRACE)
        if directory is None:
            program.send(_Kind.CONNECTED, hosts)
            return None
        spool = Spool(directory, describe(membership, _pid(process_fd)))
        with closing(spool):  # the program has a descriptor of its own
            program.send(_Kind.CONNECTED, hosts, [spool.fileno()])
        return spool
    finally:
        os.close(memory_fd)
        os.close(process_fd)


def _pid(process_fd: int) -> int:
    """Return the process id that a pidfd stands for."""
    lines = Path(f"/proc/self/fdinfo/{process_fd}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pid:"))


def _write_trace(spool: Spool) -> None:
    """Write the trace of a program that has ended its groups; an error is printed, and the spool stays."""
    try:
        finish(spool)
    except OSError as error:
        print(f"shoal: {explain(error)}", file=sys.stderr)


def _peer(rank: int, peer: LocalPeer) -> bytes:
    return _PEER.pack(rank, peer.pid, peer.capacity, peer.out, peer.in_)


def serve(program: _Program) -> None:
    """Run a rendezvous for ``program``, and keep the membership until it is released."""
    _, fields, _ = program.receive(_Kind.START)
    words = fields.decode("utf-8", "surrogateescape").split("\0")[:-1]
    arguments = dict(zip(words[::2], words[1::2], strict=True))
    membership, member, transport, timeout = _start(arguments)
    try:
        program.send(_Kind.MEMBER, member)
        spool = _connect(program, membership, transport, timeout)
        kind, fields, _ = program.receive(_Kind.RELEASE, _Kind.ABANDON)
    except BaseException as error:
        membership.abandon(error)
        raise
    if kind is _Kind.ABANDON:
        membership.abandon(RendezvousError(fields.decode("utf-8", "replace")))
    else:
        membership.release(*struct.unpack("<d", fields))
        if spool is not None:
            _write_trace(spool)
    program.send(_Kind.RELEASED)


def main() -> None:
    """Serve the program at the descriptor that the first argument names, until it ends."""
    # Ctrl-C and the end of a job reach the program, which releases the membership or ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    program = _Program(int(sys.argv[1]))
    while True:
        try:
            try:
                serve(program)
            except (ShoalError, OSError, ValueError, KeyError, struct.error) as error:
                program.send_failure(error)
        except _ProgramEnded:
            return
