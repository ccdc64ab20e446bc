"""Under each launcher ranks meet by ``init_process_group("shoal")`` alone, and end without a word."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.mpi import mpiexec_of
from tests.support.stage import PRELUDE, ROOT, Stage

TORCHRUN = (str(Path(sysconfig.get_path("scripts")) / "torchrun"), "--nproc-per-node", "2")
DISTRIBUTED_RUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
SHOAL_RUN = ("-m", "shoal", "run", "-n", "2")


def test_torchrun_needs_no_import_of_shoal_and_ranks_may_meet_again(stage: Stage) -> None:
    """The entry point ``torch.backends`` is what makes the backend known; the store has stale keys later.

    At the end by torch's functions as shoal has them.
    """
    script = stage.script(
        """
        assert "shoal.group" not in sys.modules, "loaded before it was used"
        for _ in range(3):
            dist.init_process_group("shoal")
            assert dist.get_backend() == "shoal"
            assert total() == [3.0]
            dist.destroy_process_group()
        import shoal.distributed as dist
        dist.init_process_group()
        say(total())
        dist.destroy_process_group()
        """
    )
    ended = stage.run(*TORCHRUN, script)
    assert (ended.code, ended.err, ended.out.splitlines()) == (0, "", ["[3.0]"] * 2), ended
    stage.assert_nothing_is_left()


def test_under_torchrun_a_killed_rank_is_named_within_a_second_and_the_ranks_start_again(
    stage: Stage,
) -> None:
    """Torchrun itself, as it is told to here, looks for dead ranks every four seconds."""
    script = stage.script(
        """
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        dist.init_process_group("shoal")
        try:
            total()  # rank 1 may be killed before this has returned on rank 0
            if attempt == 0 and dist.get_rank() == 1:
                with open("killed", "w") as file:
                    file.write(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            say(attempt, total())
        except shoal.PeerLost as error:
            took = time.monotonic() - float(open("killed").read())
            say(attempt, error.ranks, took < 1.0)
            sys.exit(3)
        dist.destroy_process_group()
        """,
        prelude="import shoal\n" + PRELUDE,
    )
    ended = stage.run(*DISTRIBUTED_RUN, "--max-restarts", "1", "--monitor-interval", "4", script)
    assert ended.code == 0, ended
    assert ended.out.splitlines() == ["0 (1,) True", *["1 [3.0]"] * 2], ended
    stage.assert_nothing_is_left()


#: torch.distributed, then torch's functions as shoal has them; the first test does so under torchrun
BOTH_WAYS = """
    dist.init_process_group("shoal")
    assert dist.get_backend() == "shoal"
    first = total()
    dist.destroy_process_group()
    import shoal.distributed as dist
    dist.init_process_group()
    say(dist.get_rank(), dist.get_world_size(), first, total())
    dist.destroy_process_group()
    """
#: Many scripts never call destroy_process_group.
LEFT_TO_THE_EXIT = """
    import torch.distributed as dist
    dist.init_process_group("shoal")
    subgroup = dist.new_group(list(range(dist.get_world_size())))
    say(dist.get_rank(), total())
    """


@pytest.mark.parametrize(
    "launcher",
    [
        "shoal run",
        "mpich",
        "openmpi",
        pytest.param("openmpi 5", marks=pytest.mark.stress),
        "python",
    ],
)
def test_one_script_meets_under_every_launcher(
    stage: Stage, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    # A script may import shoal, after torch, or not.
    begin, end = ("    import shoal\n", "") if launcher == "python" else ("", LEFT_TO_THE_EXIT)
    script = stage.script(begin + BOTH_WAYS + end)
    environment = {
        # Open MPI refuses root, and more ranks than cores, unless told otherwise.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    if launcher.startswith(("mpich", "openmpi")):
        ended = stage.execute(mpiexec_of(launcher), "-n", "2", sys.executable, script, **environment)
    elif launcher == "python":
        ended = stage.run(script)
    else:
        ended = stage.run(*SHOAL_RUN, "--no-prefix", script)
    assert (ended.code, ended.err) == (0, ""), ended
    summed = [line for r in (0, 1) for line in (f"{r} 2 [3.0] [3.0]", f"{r} [3.0]")]
    expected = ["0 1 [1.0] [1.0]"] if launcher == "python" else summed
    assert sorted(ended.out.splitlines()) == expected
    stage.assert_nothing_is_left()
