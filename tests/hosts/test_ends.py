"""A job on several hosts ends on all of them, and its exit code is that of the rank that failed first."""

from __future__ import annotations

import pytest

from tests.support.ssh_hosts import SshHosts

from .conftest import script


def test_ranks_are_numbered_host_by_host(hosts: SshHosts) -> None:
    name = script(
        hosts,
        """
        names = ("SHOAL_LOCAL_RANK", "SHOAL_LOCAL_SIZE", "SHOAL_SIZE", "WORLD_SIZE", "LOCAL_RANK")
        print(*map(os.environ.__getitem__, names), os.environ["SSH_CONNECTION"].split()[2], os.getcwd())
        """,
    )
    code, out, err = hosts.run("run", "--hosts", "a:2,b:1,c:2", "-n", "4", name)
    places = [("a", 0, 2), ("a", 1, 2), ("b", 0, 1), ("c", 0, 1)]
    expected = [
        f"[{rank}] {local} {count} 4 4 {local} {hosts.network.address(host)} {hosts.folder}"
        for rank, (host, local, count) in enumerate(places)
    ]
    assert (code, sorted(out.decode().splitlines()), err) == (0, expected, b"")


@pytest.mark.parametrize("who", range(4))
def test_the_exit_code_is_that_of_the_rank_that_failed_wherever_it_ran(hosts: SshHosts, who: int) -> None:
    name = script(
        hosts,
        f"""
        if rank == {who}:
            print("no such fish", file=sys.stderr)
            sys.exit(7)
        time.sleep(600)
        """,
    )
    code, _, err = hosts.run("run", "--hosts", "a:2,b:2", name)
    assert code == 7
    assert f"shoal: rank {who} on {'aabb'[who]} failed first: exit code 7, after " in err.decode()
    assert err.endswith(b"  | no such fish\n")
