"""The binding to NCCL, with the installed library if there is one; needs no GPU."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.backend.nccl import library
from shoal.backend.nccl.library import LEAST_VERSION, UNIQUE_ID_BYTES, BoundNccl, Result, load
from shoal.errors import ConfigurationError
from tests.support.cpp_programs import COMPILER

STUB = Path(__file__).parents[1] / "support/nccl_stub.cc"


def test_a_machine_without_a_gpu_is_refused_in_words() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(
        ConfigurationError, match=r"rank 0: backend='nccl' needs a CUDA device, and torch \S+"
    ):
        shoal.init(backend="nccl")
    assert "nccl.bindings.nccl" not in sys.modules


def test_the_binding_calls_the_installed_library() -> None:
    pytest.importorskip("nccl.bindings.nccl", reason="nccl4py is not installed")
    try:
        nccl = load()
    except ConfigurationError as error:
        pytest.skip(str(error))
    assert nccl.version() >= LEAST_VERSION
    unique_id = nccl.unique_id()
    assert len(unique_id) == UNIQUE_ID_BYTES
    # ncclBootstrapHandle: a magic number, and the address of the root, an IPv4 or IPv6 socket
    assert int.from_bytes(unique_id[8:10], sys.byteorder) in (socket.AF_INET, socket.AF_INET6)
    assert nccl.error_string(Result.IN_PROGRESS) == "NCCL operation in progress"
    if not torch.cuda.is_available():
        with pytest.raises(Exception, match="UnhandledCudaError"):
            nccl.init(1, nccl.unique_id(), 0, None)


def test_the_configuration_of_a_communicator_is_passed_to_the_binding() -> None:
    bindings = pytest.importorskip("nccl.bindings.nccl", reason="nccl4py is not installed")
    given: list[Any] = []

    class Bindings:
        def __getattr__(self, name: str) -> Any:
            return (
                (lambda *args: given.append(args))
                if name == "comm_init_rank_config"
                else getattr(bindings, name)
            )

    nccl, unique_id = BoundNccl(Bindings()), bytes(range(UNIQUE_ID_BYTES))  # type: ignore[arg-type]
    nccl.init(4, unique_id, 3, None)
    nccl.init(4, unique_id, 3, 8)
    default = bindings.Config().max_ctas
    for (size, ident, rank, config), max_ctas in zip(given, (default, 8), strict=True):
        assert (size, rank, config.blocking, config.max_ctas) == (4, 3, 0, max_ctas)
        assert ctypes.string_at(ident.ptr, UNIQUE_ID_BYTES) == unique_id


_CALLS = """
from shoal.backend.nccl.library import Reduction, Result, load

nccl = load()
assert nccl.version() == 22809
comm = nccl.init(4, nccl.unique_id(), 3, 8)
assert nccl.async_error(comm) == Result.IN_PROGRESS
assert nccl.last_error(comm) == "the last error"
assert nccl.error_string(6) == "remote error"
for name in ("all_reduce", "reduce_scatter"):
    getattr(nccl, name)(2**46 + 1, 2**46 + 2, 2**33, 7, Reduction.AVG, comm, 2**46 + 3)
nccl.group_start()
nccl.reduce(1, 0, 3, 4, Reduction.MAX, 2, comm, 5)
nccl.broadcast(1, 2, 3, 4, 2, comm, 5)
nccl.all_gather(1, 2, 3, 4, comm, 5)
nccl.send(1, 2, 3, 4, comm, 5)
nccl.recv(1, 2, 3, 4, comm, 5)
nccl.group_end()
nccl.finalize(comm)
nccl.destroy(comm)
nccl.abort(comm)
"""


def test_the_library_gets_the_arguments_in_the_order_of_its_header(tmp_path: Path) -> None:
    pytest.importorskip("nccl.bindings.nccl", reason="nccl4py is not installed")
    stub = tmp_path / "libnccl.so.2"
    options = ["-std=c++17", "-shared", "-fPIC"]
    if torch.version.cuda is None:  # otherwise torch loads the real library, which has all functions
        options.append("-Wl,-soname,libnccl.so.2")
    subprocess.run([COMPILER, *options, str(STUB), "-o", str(stub)], check=True)
    program, environment = [sys.executable, "-c", _CALLS], {**os.environ, "LD_PRELOAD": str(stub)}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    comm, send, receive, stream = 0x7F0123456780, 2**46 + 1, 2**46 + 2, 2**46 + 3
    assert done.stdout.splitlines() == [
        f"init 4 1 127 3 {0xCAFEBEEF} 0 8",
        f"async_error {comm}",
        f"last_error {comm}",
        f"all_reduce {send} {receive} {2**33} 7 4 {comm} {stream}",
        f"reduce_scatter {send} {receive} {2**33} 7 4 {comm} {stream}",
        "group_start",
        f"reduce 1 0 3 4 2 2 {comm} 5",
        f"broadcast 1 2 3 4 2 {comm} 5",
        f"all_gather 1 2 3 4 {comm} 5",
        f"send 1 2 3 4 {comm} 5",
        f"recv 1 2 3 4 {comm} 5",
        "group_end",
        *(f"{name} {comm}" for name in ("finalize", "destroy", "abort")),
    ]


def test_a_unique_id_is_read_from_memory_that_is_still_there() -> None:
    bindings = pytest.importorskip("nccl.bindings.nccl", reason="nccl4py is not installed")
    expected = bytes(range(1, UNIQUE_ID_BYTES + 1))

    class Bindings:
        def __getattr__(self, name: str) -> Any:
            return getattr(bindings, name)

        def get_unique_id(self) -> Any:
            made = bindings.UniqueId()
            ctypes.memmove(made.ptr, expected, UNIQUE_ID_BYTES)
            return made

    assert BoundNccl(Bindings()).unique_id() == expected  # type: ignore[arg-type]


def test_a_library_that_is_too_old_or_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bindings:
        def __getattr__(self, name: str) -> object:
            return lambda: 22005

    monkeypatch.setattr(library, "import_module", lambda name: Bindings())
    with pytest.raises(ConfigurationError, match=r"needs NCCL 2\.21\.0 or newer, found 2\.20\.5"):
        load()

    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(library, "import_module", missing)
    with pytest.raises(ConfigurationError, match=r"needs the package nccl4py: .*pip install 'shoal\[nccl\]'"):
        load()


def test_blocking_communicators_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "1")
    with pytest.raises(ConfigurationError, match=r"rank 0: .*; unset NCCL_COMM_BLOCKING"):
        shoal.init(backend="nccl")
