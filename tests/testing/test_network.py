"""A network of namespaces: what a cut lets through, and that nothing is left of it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal import ProcessGroup, UsageError
from shoal.testing import Network, no_leaks, processes
from shoal.testing import network as module
from shoal.testing.network import STORE, why_unavailable
from tests.support.networks import network

__all__ = ["network"]


def connect(network: Network, client: str, server: str) -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection between hosts."""
    with network.inside(server):
        listener = socket.create_server((network.address(server), 0))
    with listener:
        with network.inside(client):
            here = socket.create_connection(listener.getsockname(), timeout=10.0)
        there, _ = listener.accept()
    return here, there


def arrives(sender: socket.socket, receiver: socket.socket, patience: float) -> str:
    """What becomes of a byte."""
    sender.settimeout(patience)
    receiver.settimeout(patience)
    try:
        sender.send(b"x")
        return "arrives" if receiver.recv(1) else "ended"
    except TimeoutError:
        return "lost"
    except ConnectionError:
        return "reset"


def tried(network: Network, doing: Callable[[Network], object], lost: list[str]) -> dict[str, str]:
    """What becomes of bytes, over connections that there were before the cut; those ``lost`` are not waited
    for, and others come late after a cut was healed."""
    ways = ("ab", "ba", "ac", "ca")
    with no_leaks():
        ends = {way: connect(network, *way) for way in ways}
        doing(network)
        found = {way: arrives(*ends[way], 0.2 if way in lost else 10.0) for way in ways}
        for end in (end for both in ends.values() for end in both):
            end.close()
    return found


@pytest.mark.parametrize(
    ("doing", "lost"),
    [
        (lambda it: it.drop("a", "b"), ["ab", "ba"]),
        (lambda it: it.drop_one_way("a", ["b"]), ["ab"]),
        (lambda it: it.drop("bc", "a"), ["ab", "ba", "ac", "ca"]),
        (lambda it: it.down("b"), ["ab", "ba"]),
        (lambda it: (it.drop("a", "bc"), it.down("c"), it.heal()), []),
        (lambda it: it.drop("abc", STORE), []),
    ],
)
def test_what_a_cut_lets_through(
    network: Network, doing: Callable[[Network], object], lost: list[str]
) -> None:
    assert tried(network, doing, lost) == {
        way: "lost" if way in lost else "arrives" for way in ("ab", "ba", "ac", "ca")
    }


def test_a_reset_ends_connections_when_they_are_used(network: Network) -> None:
    here, there = connect(network, "a", "b")
    with here, there:
        network.reset("a", "b")
        here.settimeout(10.0)
        here.send(b"x")
        with pytest.raises(ConnectionResetError):
            here.recv(1)
        with network.inside("b"), pytest.raises(ConnectionRefusedError):
            socket.create_connection((network.address("a"), 1), timeout=10.0)


def test_what_is_sent_in_a_cut_arrives_once_it_is_healed(network: Network) -> None:
    here, there = connect(network, "a", "b")
    with here, there:
        network.drop("a", "b")
        here.send(b"x")
        network.heal()
        there.settimeout(10.0)
        assert there.recv(1) == b"x"


def test_a_host_sends_no_faster_than_its_rate(network: Network) -> None:
    here, there = connect(network, "a", "b")
    with here, there:
        network.shape(megabits=80)
        data = bytes(2 << 20)  # 0.2 s, without the first 64 KB or 40 KB
        begun = time.monotonic()
        sender = threading.Thread(target=here.sendall, args=(data,))
        sender.start()
        left = len(data)
        while left:
            left -= len(there.recv(left))
        took = time.monotonic() - begun
        sender.join()
        assert took >= 0.9 * (len(data) - (64 << 10)) * 8 / 80e6
        network.shape()
        here.send(b"x")
        assert there.recv(1) == b"x"


def test_a_kernel_without_a_delay_is_named(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(place: int, program: str, commands: str) -> None:
        raise subprocess.CalledProcessError(2, program, stderr="Error: Specified qdisc kind is unknown.")

    monkeypatch.setattr(module, "_run", run)
    with pytest.raises(UsageError, match=r"delay 50us rate 100mbit: .* may lack this traffic control"):
        network.shape(megabits=100, delay_us=50)


def where(group: ProcessGroup) -> tuple[str, str]:
    namespace = os.readlink("/proc/self/ns/net")
    group.barrier().wait()
    return namespace, group.store.host or ""


def test_ranks_run_on_the_hosts_and_the_test_outside(network: Network) -> None:
    outside = os.readlink("/proc/self/ns/net")
    with no_leaks(), processes(where, 3, hosts=["a", "b", "b"], network=network) as ranks:
        (a, _), (b, store), again = (each.value for each in ranks.join())
    assert again == (b, store) == (b, network.address(STORE))
    assert len({outside, a, b}) == 3
    assert os.readlink("/proc/self/ns/net") == outside


def test_names_that_make_no_sense_are_refused(network: Network) -> None:
    for names in ((), ("a", "a"), ("a", STORE)):
        with pytest.raises(UsageError, match="unique names"):
            Network(*names)
    with pytest.raises(UsageError, match=r"'z'.* the hosts of this network are store, a, b, c"):
        network.drop("a", "z")
    with pytest.raises(UsageError, match="the hosts of this network are a, b, c"):
        processes(where, 2, hosts=["a", "z"], network=network)
    with pytest.raises(UsageError, match="the hosts of this network are a, b, c"):
        processes(where, 2, network=network)


def test_why_there_can_be_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATH", "/nowhere")
    assert why_unavailable() == "the program 'ip' was not found; on Debian, apt install iproute2"


LEAVING = """
import time
from tests.testing.test_network import wait
from shoal.testing import Network, processes
if __name__ == "__main__":
    network = Network("a", "b")
    ranks = processes(wait, 2, hosts=["a", "b"], network=network)
    for rank in range(2):
        print(ranks.store.get(f"namespace/{rank}").decode(), flush=True)
    time.sleep(600)
"""


def wait(group: ProcessGroup) -> None:
    group.store.set(f"namespace/{group.rank}", os.readlink("/proc/self/ns/net").encode())
    time.sleep(600)


def held(namespaces: set[str]) -> list[str]:
    """Who has one of these namespaces, or a descriptor of one."""
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            opened = [f"/proc/{process}/fd/{each}" for each in os.listdir(f"/proc/{process}/fd")]
            for link in [f"/proc/{process}/ns/net", *opened]:
                with contextlib.suppress(OSError):
                    if os.readlink(link) in namespaces:
                        found.append(link)
    return found


def links() -> list[str]:
    return sorted(os.listdir("/sys/class/net"))


def test_nothing_is_left_of_a_test_that_is_killed(tmp_path: Path, network: Network) -> None:
    before = links()
    script = tmp_path / "leaving.py"
    script.write_text(LEAVING)
    root = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        namespaces = {process.stdout.readline().strip() for _ in range(2)}
        assert len(namespaces) == 2
        assert held(namespaces)
        process.send_signal(signal.SIGKILL)
    end = time.monotonic() + 60.0
    while left := held(namespaces):
        assert time.monotonic() < end, left
        time.sleep(0.05)
    assert links() == before
