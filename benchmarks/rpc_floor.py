"""The lower limit of calls ("floor"): the same bytes through bare sockets and shared memory, for rpc.py.

A raw loop sends 64 MB from a tensor, and the other process reads them into memory. *Warm* memory has been
written before, like a buffer that is reused. *Fresh* memory is newly mapped each time, like a tensor that was
just
allocated: the kernel zeroes its pages, with a fault for each. In one process, a memcpy fills warm pages of
shared memory.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rpc_figures import LARGE, Library, Work, measure, times

KINDS = ("unix", "tcp")
#: the first byte of a body's head
WARM, FRESH = b"w", b"f"


def floor(number: int, place: Path, work: Work) -> dict[str, float]:
    """Main function of the two processes; the first one returns the figures."""
    figures: dict[str, float] = {}
    if number == 1:
        for kind in KINDS:
            with listening(kind, place) as listener, listener.accept()[0] as stream:
                answer(stream)
        return figures
    large = torch.ones(LARGE, dtype=torch.uint8)
    body = large.numpy()
    latency = dataclasses.replace(work, pipelined=0)
    for kind in KINDS:
        with connected(kind, place) as stream:
            small = measure(Library(lambda stream=stream: ping(stream, b"\0" * 160)), latency)
            figures |= {f"{kind} {what}": value for what, value in small.items()}
            for name, memory in (("warm", WARM), ("fresh", FRESH)):
                figures[f"64 MB over {kind}, {name} [ms]"] = _median(
                    lambda stream=stream, memory=memory: ping(stream, body, memory), work
                )
    descriptor = os.memfd_create("benchmark")
    try:
        os.ftruncate(descriptor, LARGE)
        with mmap.mmap(descriptor, LARGE) as shared:
            target = ctypes.addressof(ctypes.c_char.from_buffer(shared))
            source = large.data_ptr()
            copied = _median(lambda: lambda: ctypes.memmove(target, source, LARGE), work)
    finally:
        os.close(descriptor)
    figures["64 MB to shared memory, warm [ms]"] = copied
    return figures


def _median(begin: Callable[[], Callable[[], Any]], work: Work) -> float:
    """Return the median in milliseconds, without the first call, which maps memory."""
    return statistics.median(times(begin, work.large + 1)[1:]) * 1e3


def listening(kind: str, place: Path) -> socket.socket:
    """Create a listener that the other process finds through a file."""
    if kind == "unix":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(place / "socket"))
        listener.listen()
    else:
        listener = socket.create_server(("127.0.0.1", 0))
        ready = place / "port.new"
        ready.write_text(str(listener.getsockname()[1]))
        ready.rename(place / "port")
    return listener


def connected(kind: str, place: Path) -> socket.socket:
    while True:  # until the other process listens
        try:
            if kind == "tcp":
                stream = socket.create_connection(("127.0.0.1", int((place / "port").read_text())))
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return stream
            stream = socket.socket(socket.AF_UNIX)
            try:
                stream.connect(str(place / "socket"))
            except OSError:
                stream.close()
                raise
            return stream
        except (FileNotFoundError, ConnectionRefusedError):
            time.sleep(0.01)


def ping(stream: socket.socket, body: Any, memory: bytes = WARM) -> Callable[[], Any]:
    """Send a head and a body; return a function that waits for the answer."""
    stream.sendall(memory + len(body).to_bytes(8, "little"))
    stream.sendall(body)
    return lambda: stream.recv(1)


def answer(stream: socket.socket) -> None:
    """Answer each body with its last byte until the peer closes the connection."""
    warm = memoryview(bytearray(b"\xff" * LARGE))
    while head := stream.recv(9, socket.MSG_WAITALL):
        left = length = int.from_bytes(head[1:], "little")
        memory = warm if head[:1] == WARM else memoryview(mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE))
        while left:
            left -= stream.recv_into(memory[length - left : length])
        stream.sendall(memory[length - 1 : length])
