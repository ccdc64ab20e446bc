"""``shoal doctor --hosts`` under ``shoal run --hosts`` checks the network between the hosts of a job."""

from __future__ import annotations

from tests.support.ssh_hosts import SshHosts


def test_a_cut_between_two_hosts_of_a_job_is_named(hosts: SshHosts) -> None:
    hosts.network.drop("a", "b")
    options = ("--no-prefix", "--hosts", "a,b,c", "-m", "shoal")
    code, out, err = hosts.run("run", *options, "doctor", "--hosts")
    a, b = hosts.network.address("a"), hosts.network.address("b")
    assert code == 1, out + err
    lines = [line for line in out.decode().splitlines() if line.startswith("  fail ")]
    assert lines, out + err
    for line in lines:
        assert f" at {a}:" in line
        assert f" at {b}:" in line
        assert line.count("no answer within 5 s") == 2
    assert b"2 of 3 pairs of hosts connected in both directions" in out
    assert b"shoal: rank" in err
