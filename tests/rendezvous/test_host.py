"""Which machine a process runs on, and its addresses."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from shoal.rendezvous.host import (
    address_towards,
    here,
    is_loopback,
    is_mine,
    machine_id,
    process_is_gone,
    resolve,
)
from shoal.rendezvous.meet import _interface
from shoal.rendezvous.record import Descriptor
from shoal.rendezvous.venue import Venue


def test_processes_of_one_machine_have_one_identity() -> None:
    program = "from shoal.rendezvous.host import machine_id; print(machine_id())"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == machine_id()
    assert machine_id().startswith(socket.gethostname())


def test_a_process_is_gone_when_it_ended_or_its_number_was_used_again() -> None:
    namespace, pid, start = here().process.rsplit("/", 2)
    assert int(pid) == os.getpid()
    assert not process_is_gone(here().process)
    assert process_is_gone(f"{namespace}/{pid}/{float(start) - 100}")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert process_is_gone(f"{namespace}/{ended.pid}/1.0")
    assert not process_is_gone(f"pid:[1]/{pid}/1.0")  # of another container: unknown


def test_addresses() -> None:
    assert resolve("localhost", 1)[0] == "127.0.0.1"
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert not is_loopback("192.0.2.1")
    assert is_mine("127.0.0.1")
    assert not is_mine("192.0.2.1")
    assert is_mine(address_towards("127.0.0.1"))
    assert is_mine(address_towards("192.0.2.1"))


def test_ranks_on_several_machines_listen_where_the_store_is_reached() -> None:
    def member(machine: str) -> Descriptor:
        return Descriptor("h", machine, "pid:[1]/1/1.0", True, "t")

    venue = Venue(None, address="192.0.2.1")  # type: ignore[arg-type]
    alone = [member("a"), member("a")]
    spread = [member("a"), member("b")]
    assert _interface(alone, venue, None) == "127.0.0.1"
    assert _interface(spread, venue, None) == address_towards("192.0.2.1")
