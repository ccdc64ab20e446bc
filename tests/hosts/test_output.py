"""Output and input of ranks on other hosts, through ssh."""

from __future__ import annotations

import hashlib
import subprocess

import pytest

from tests.support.ssh_hosts import SshHosts

from .conftest import script


@pytest.mark.parametrize("megabytes", [20, pytest.param(200, marks=pytest.mark.stress)])
def test_output_of_eight_ranks_is_whole_and_unmixed(hosts: SshHosts, megabytes: int) -> None:
    lines = megabytes * 1_000_000 // 8 // 200
    name = script(
        hosts,
        f"""
        for number in range({lines}):
            sys.stdout.write(f"{{number:9}} " + str(rank) * 189 + "\\n")
        """,
    )
    with open(hosts.folder / "output", "wb") as file:
        code, _, err = hosts.run("run", "--hosts", "a:4,b:4", name, stdout=file)
    assert (code, err) == (0, b"")
    following = [0] * 8
    with open(hosts.folder / "output", "rb") as found:
        for line in found:
            rank = int(line[1:2])
            assert line == b"[%d] %9d %s\n" % (rank, following[rank], b"%d" % rank * 189)
            following[rank] += 1
    assert following == [lines] * 8
    (hosts.folder / "output").unlink()


def test_stdin_goes_to_rank_0_whole(hosts: SshHosts) -> None:
    text = b"".join(b"line %d\n" % number for number in range(200_000))
    name = script(
        hosts,
        """
        import hashlib
        data = sys.stdin.buffer.read()
        print(len(data), hashlib.sha256(data).hexdigest()[:8])
        """,
    )
    head = hosts.start("run", "--hosts", "b,a", name, stdin=subprocess.PIPE)
    out, err = head.communicate(text, timeout=120)
    sums = [hashlib.sha256(data).hexdigest()[:8].encode() for data in (text, b"")]
    assert sorted(out.splitlines()) == [b"[0] %d %s" % (len(text), sums[0]), b"[1] 0 %s" % sums[1]]
    assert (head.returncode, err) == (0, b"")


def test_a_reader_that_goes_away_ends_the_ranks(hosts: SshHosts) -> None:
    """As `| head` does: the ranks' next writes fail."""
    name = script(hosts, "while True: sys.stdout.write('x' * 99 + '\\n')")
    head = hosts.start("run", "--hosts", "a,b", name, stderr=subprocess.DEVNULL)
    assert head.stdout is not None
    assert head.stdout.readline().endswith(b"x\n")
    head.stdout.close()
    assert head.wait(120) == 1
