"""Which machine a process runs on, and its addresses."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from shoal.rendezvous import host
from shoal.rendezvous.host import (
    address_towards,
    here,
    is_loopback,
    is_mine,
    machine_id,
    now,
    process_is_gone,
    resolve,
)
from shoal.rendezvous.place import RendezvousPoint
from shoal.rendezvous.venue import Venue
from shoal.store import MemoryStore
from tests.support.waiting import until

from .together import request


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


def test_a_process_that_nobody_waited_for_is_gone() -> None:
    namespace = here().process.split("/")[0]
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    start = host._state(child)
    assert start is not None
    assert process_is_gone(f"{namespace}/{child}/{start[0]}")
    os.waitpid(child, 0)


def test_a_process_whose_first_thread_ended_is_not_gone() -> None:
    program = (
        "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(60,)).start();"
        "ctypes.PyDLL(None).pthread_exit(0)"  # keeps the lock of the interpreter, which does no harm here
    )
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        stat = Path(f"/proc/{process.pid}/stat")
        until(lambda: ") Z " in stat.read_text())
        state = host._state(process.pid)
        assert state is not None
        assert not process_is_gone(f"{here().process.split('/')[0]}/{process.pid}/{state[0]}")
    finally:
        process.kill()
        process.wait()


def test_a_process_that_proc_hides_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = here().process
    monkeypatch.setattr(host, "_state", lambda pid: None)
    assert not process_is_gone(mine)
    assert not process_is_gone(here().process)  # with an unknown start


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
    place = RendezvousPoint.at(Venue(MemoryStore(), job="job", epoch=0, address="192.0.2.1"), request())
    assert place.interface({"a"}) == "127.0.0.1"
    assert place.interface({"a", "b"}) == place.interface() == address_towards("192.0.2.1")


def test_a_process_was_started_after_whatever_came_before_it() -> None:
    script = """
    import os, time
    from shoal.rendezvous.host import now, started
    def in_child():
        before, child = now(), os.fork()
        if not child:
            os._exit(not before <= started() <= now())
        assert os.waitpid(child, 0)[1] == 0
    for _ in range(20):
        in_child()
    print(started())
    """
    before = now()
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, stdout=subprocess.PIPE)
    assert before <= float(out.stdout) <= now()
