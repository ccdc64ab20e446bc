"""Meeting at mpi://, under the mpiexec of each MPI library."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal import ConfigurationError, RendezvousError, UsageError
from shoal.common import mpi_library
from shoal.rendezvous import mpi as over_mpi
from shoal.rendezvous import rendezvous
from shoal.rendezvous.addresses import LOOPBACK, is_loopback
from shoal.rendezvous.mpi import MpiRank, MpiStore
from tests.support.mpi import WITH_MPICH, Mpi, find

from .together import request

_MEET = """
import sys, threading
from hashlib import sha256
from shoal.rendezvous import rendezvous

def meet(job):
    member = rendezvous("mpi://", timeout=30, job=job)
    member.store.set(str(member.rank), b"1")
    member.store.wait([str(rank) for rank in range(member.size)])
    found.append(member)

found = []
meet("first")
found[0].release(30)
threads = [threading.Thread(target=meet, args=(job,)) for job in "ab"]  # two worlds at a time
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
secrets = {sha256(member.secret).hexdigest()[:8] for member in found}
member = found[0]
for each in found[1:]:
    each.release(30)
import mpi4py.MPI
from shoal.common.mpi_library import library_name
assert mpi4py.MPI.Query_thread() == mpi4py.MPI.THREAD_MULTIPLE
sys.stdout.write(
    f"{library_name(mpi4py.MPI)}: rank {member.rank} of {member.size}, local {member.local_rank} of "
    f"{member.local_size}, at {member.interface}, {len(found)} worlds, secrets {sorted(secrets)}\\n"
)
"""


def test_ranks_meet_without_any_variable(mpi: Mpi, tmp_path: Path) -> None:
    outcome = mpi.run(3, _MEET, folder=tmp_path)
    assert outcome.code == 0, outcome
    assert outcome.err == "", outcome  # also nothing about processes that end without MPI_Finalize
    pattern = (
        r"^(\S.*) v?\d[\d.]*: rank (\d) of 3, local (\d) of 3, at 127\.0\.0\.1, 3 worlds, secrets (\[.*\])$"
    )
    found = re.findall(pattern, outcome.out, re.M)
    assert sorted(each[1:3] for each in found) == [("0", "0"), ("1", "1"), ("2", "2")], outcome
    assert {each[0] for each in found} == {mpi.name}
    assert len({each[3] for each in found}) == 1
    assert found[0][3].count("'") == 2  # one secret


_FAIL = """
import os, sys, time
from shoal import errors
from shoal.rendezvous import rendezvous
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
what, arguments = sys.argv[1], {}
if what == "secret":
    arguments = {"secret": "x"} if rank == 1 else {}
elif what == "late":
    arguments = {"timeout": 0.5}
    if rank == 1:
        from shoal.common.mpi_library import mark_broken, mpi
        mpi()
        mark_broken()
        while not os.path.exists("tried"):
            time.sleep(0.01)
        os._exit(0)
elif what == "size":
    arguments = {"size": 3}
for _ in range(2):
    try:
        rendezvous("mpi://", **arguments)
    except errors.ShoalError as error:
        sys.stdout.write(f"{type(error).__name__} {error}\\n")
sys.stdout.flush()
open("tried", "w").close()
"""


def test_a_secret_of_some_ranks_is_refused_by_all(mpi: Mpi, tmp_path: Path) -> None:
    outcome = mpi.run(2, _FAIL, "secret", folder=tmp_path)
    text = "ConfigurationError mpi://: rank 0 of 2 were given no secret, but the others were"
    assert outcome.out.count(text) == 2, outcome
    again = (
        r"^RendezvousError mpi://: the exchange of addresses failed before in this process \(mpi://: rank 0"
    )
    assert len(re.findall(again, outcome.out, re.M)) == 2, outcome


def test_a_rank_that_does_not_come_is_a_timeout(mpi: Mpi, tmp_path: Path) -> None:
    outcome = mpi.run(2, _FAIL, "late", folder=tmp_path, survives_deaths=True)
    text = (
        "RendezvousTimeout mpi://: after 0.5 s, not all ranks of MPI.COMM_WORLD have called shoal.init with "
        "mpi://; read the output of the other ranks\n"
    )
    assert text in outcome.out, outcome


def test_a_size_that_is_not_that_of_mpi_is_refused(mpi: Mpi, tmp_path: Path) -> None:
    outcome = mpi.run(2, _FAIL, "size", folder=tmp_path)
    text = "gives this process size 3, but in MPI.COMM_WORLD it has size 2; mpi4py uses"
    assert outcome.out.count(text) == 4, outcome


def test_an_mpiexec_of_another_library_is_named(tmp_path: Path) -> None:
    mpich, open_mpi = find("mpich"), find("openmpi")
    if isinstance(mpich, str) or isinstance(open_mpi, str):
        pytest.skip("needs two MPI libraries")
    mixed = {"MPI4PY_LIBMPI": mpich.env["MPI4PY_LIBMPI"], "MPI4PY_CHECK_MPIEXEC": "0"}
    outcome = open_mpi.run(2, _FAIL, "none", folder=tmp_path, env=mixed)
    assert re.search(
        r"ConfigurationError this process was started by an mpiexec of Open MPI, but mpi4py uses MPICH [\d.]+"
        r": start all ranks with one mpiexec of MPICH.*set MPI4PY_LIBMPI",
        outcome.out,
    ), outcome
    mixed = {**open_mpi.env, "MPI4PY_CHECK_MPIEXEC": "0"}
    outcome = mpich.run(2, _FAIL, "none", folder=tmp_path, env=mixed)
    assert re.search(
        r"ConfigurationError MPICH gives this process rank 1 and size 2, but in MPI.COMM_WORLD it has "
        r"rank 0 and size 1; mpi4py uses Open MPI v[\d.]+: start all ranks with one mpiexec of Open MPI",
        outcome.out,
    ), outcome


_LOSE = """
import os, signal, sys, torch
import shoal
group = shoal.init("mpi://", timeout=60)
x = torch.ones(1)
group.all_reduce(x).wait()
if group.rank == 1:
    if sys.argv[1] == "raise":
        raise ValueError("no such fish")
    os.kill(os.getpid(), signal.SIGKILL)
try:
    group.all_reduce(x).wait()
except shoal.PeerLost as error:
    sys.stdout.write(f"rank {group.rank} lost {error.ranks}\\n")
group.close()
"""


def test_a_survivor_of_a_killed_rank_names_it_and_ends_without_mpi_finalize(mpi: Mpi, tmp_path: Path) -> None:
    outcome = mpi.run(2, _LOSE, "kill", folder=tmp_path, survives_deaths=True, timeout=30)
    assert re.findall("^rank .*", outcome.out, re.M) == ["rank 0 lost (1,)"], outcome


def test_a_rank_that_raises_ends_the_job(mpi: Mpi, tmp_path: Path) -> None:
    outcome = mpi.run(2, _LOSE, "raise", folder=tmp_path, timeout=30)
    assert outcome.code != 0, outcome
    assert "ValueError: no such fish" in outcome.err


_DEFAULTS = """
import sys
import torch
import torch.distributed
import shoal
import shoal.distributed

def total(dist):
    x = torch.full((3,), float(dist.get_rank() + 1))
    dist.all_reduce(x)
    return x.tolist()

found = []
with shoal.init() as group:
    found.append(group.all_reduce(torch.ones(2)).wait().tolist())
    found.append((type(group._backend).name, group.world.membership.secret != shoal.rendezvous.user_secret()))
for dist in (shoal.distributed, torch.distributed):
    dist.init_process_group("shoal")
    found.append((dist.get_backend(), total(dist), type(shoal.world.open_groups()[0]._backend).__name__))
    dist.destroy_process_group()
torch.distributed.init_process_group("shoal")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
model(torch.ones(2, 4)).sum().backward()
found.append(model.module.weight.grad.tolist() == [[2.0] * 4] * 2)
torch.distributed.destroy_process_group()
sys.stdout.write(f"{found}\\n")
"""


@WITH_MPICH
def test_a_variable_makes_mpi_the_backend_and_the_place_to_meet(mpi: Mpi, tmp_path: Path) -> None:
    outcome = mpi.run(2, _DEFAULTS, folder=tmp_path, env={"SHOAL_BACKEND": "mpi"})
    assert outcome.code == 0, outcome
    each = "('shoal', [3.0, 3.0, 3.0], 'MpiBackend')"
    once = f"[[2.0, 2.0], ('mpi', True), {each}, {each}, True]"
    assert outcome.out.splitlines() == [once] * 2, outcome


_ALONE = """
from shoal.rendezvous import rendezvous
member = rendezvous("mpi://")
print(member.rank, member.size, member.local_rank, member.local_size)
member.release(1)
"""


def test_a_process_without_mpiexec_is_a_group_of_one(mpi: Mpi, tmp_path: Path) -> None:
    alone = Mpi(mpi.name, sys.executable, mpi.env)
    outcome = alone.execute([sys.executable, "-c", _ALONE], folder=tmp_path)
    assert (outcome.code, outcome.out) == (0, "0 1 0 1\n"), outcome


# -- the parts ---------------------------------------------------------------------------------------


def test_the_url_is_nothing_but_the_scheme() -> None:
    for url in ("mpi://host", "mpi://host:1", "mpi:///path", "mpi://?x=1"):
        with pytest.raises(UsageError, match=r"expected mpi:// and nothing else"):
            rendezvous(url)


def test_what_is_missing_is_said_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_library, "_module", None)

    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(mpi_library, "import_module", absent)
    with pytest.raises(ConfigurationError, match=r"MPI needs mpi4py: pip install 'shoal\[mpi\]'"):
        rendezvous("mpi://")

    def without_library(name: str) -> Any:
        if name == "mpi4py":
            return type("Package", (), {"rc": type("Rc", (), {})})
        raise RuntimeError("cannot load MPI library\nlibmpi.so: no such file")

    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    monkeypatch.setattr(mpi_library, "import_module", without_library)
    with pytest.raises(
        ConfigurationError, match=r"pip install mpich.*MPI4PY_LIBMPI.*libmpi.so: no such file"
    ):
        rendezvous("mpi://")


class _SomeMpi:
    """A module that was initialised by the program."""

    THREAD_MULTIPLE = 3

    def __init__(self, level: int = 3, finalized: bool = False) -> None:
        self.level, self.finalized = level, finalized

    def Query_thread(self) -> int:
        return self.level

    def Is_initialized(self) -> bool:
        return True

    def Is_finalized(self) -> bool:
        return self.finalized

    def Get_library_version(self) -> str:
        return "Some MPI v1.2, package: x"


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        (_SomeMpi(level=1), r"Some MPI v1.2 was initialised without THREAD_MULTIPLE.*mpi4py.rc.thread_level"),
        (_SomeMpi(finalized=True), "MPI was finalised in this process"),
    ],
)
def test_an_mpi_that_the_program_initialised_is_checked(
    module: _SomeMpi, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = type("Package", (), {"rc": None})
    monkeypatch.setattr(mpi_library, "_module", None)
    monkeypatch.setattr(mpi_library, "_owner", 0)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", module)
    monkeypatch.setattr(mpi_library, "import_module", lambda name: package if name == "mpi4py" else module)
    with pytest.raises(ConfigurationError, match=problem):
        mpi_library.mpi()


def test_a_fork_of_a_process_that_uses_mpi_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_library, "_owner", 1)
    with pytest.raises(ConfigurationError, match="this process was forked after MPI was initialised"):
        mpi_library.mpi()


def _machine(number: int, address: str = "") -> MpiRank:
    return MpiRank(bytes([number] * 16), address, False)


def test_the_store_is_where_all_ranks_can_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given = request("mpi://")
    assert over_mpi._address_for(given, [_machine(1), _machine(1)]) == LOOPBACK
    monkeypatch.setattr(over_mpi, "address_on_route_to", lambda target: f"on the way to {target}")
    monkeypatch.setattr(over_mpi, "is_loopback", lambda address: address == LOOPBACK)
    ranks = [_machine(1, "10.0.0.1"), _machine(1, "10.0.0.1"), _machine(2), _machine(3, "10.1.0.3")]
    assert over_mpi._address_for(given, ranks) == "on the way to 10.1.0.3"
    assert over_mpi._address_for(given, ranks[:3]) == "10.0.0.1"
    named = request("mpi://", environ={"SHOAL_INTERFACE": "192.0.2.7"})
    assert over_mpi._address_for(named, ranks) == "192.0.2.7"
    with pytest.raises(
        ConfigurationError, match="that the ranks on other hosts can reach: set SHOAL_INTERFACE"
    ):
        over_mpi._address_for(given, [_machine(1), _machine(2)])


def test_a_rank_tells_no_loopback_address() -> None:
    address = over_mpi._own_address(request("mpi://"))
    assert address == "" or not is_loopback(address)
    named = request("mpi://", environ={"SHOAL_INTERFACE": "localhost"})
    assert over_mpi._own_address(named) == LOOPBACK


def test_messages_are_checked() -> None:
    message = bytearray(512)
    store = MpiStore("127.0.0.1", 1234, b"secret")
    over_mpi._pack(store, message)
    assert over_mpi._checked(over_mpi._unpack(message, 0, MpiStore), 1) == store
    for damaged in (bytearray(512), b"\xff" * 512, message[:20], b"\x00\x01\xc0" + message):
        with pytest.raises(RendezvousError, match=r"the message of rank 2 is malformed .* the same version"):
            over_mpi._unpack(bytearray(damaged), 2, MpiRank)
    for wrong in (MpiStore("here", 1, b"x"), MpiStore("127.0.0.1", 0, b"x"), MpiStore("127.0.0.1", 1, b"")):
        with pytest.raises(RendezvousError, match=r"rank 0 sent .* to rank 1"):
            over_mpi._checked(wrong, 1)
    with pytest.raises(RendezvousError, match="rank 0 cannot serve the store: no port"):
        over_mpi._checked(MpiStore(error="no port"), 1)
