"""Under each launcher ranks meet by ``init_process_group("shoal")`` alone, and end without a word."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.mpi import mpiexec_of
from tests.support.stage import PRELUDE, ROOT, Ended, Stage

TORCHRUN = (str(Path(sysconfig.get_path("scripts")) / "torchrun"), "--nproc-per-node", "2")
DISTRIBUTED_RUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
SHOAL_RUN = ("-m", "shoal", "run", "-n", "2")


def assert_both_summed(stage: Stage, ended: Ended) -> None:
    assert (ended.code, ended.err) == (0, ""), ended
    assert [line.removeprefix("[0] ").removeprefix("[1] ") for line in ended.out.splitlines()] == [
        "[3.0]"
    ] * 2
    stage.assert_nothing_is_left()


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
    assert_both_summed(stage, stage.run(*TORCHRUN, script))


def test_under_shoal_run_a_script_may_import_shoal_last_and_leave_the_group_to_the_exit(stage: Stage) -> None:
    """Many scripts never call destroy_process_group."""
    script = stage.script(
        """
        import shoal
        dist.init_process_group("shoal")
        subgroup = dist.new_group([0, 1])
        say(total())
        """
    )
    assert_both_summed(stage, stage.run(*SHOAL_RUN, script))


def test_torchrun_starts_the_ranks_again_after_one_was_killed(stage: Stage) -> None:
    script = stage.script(
        """
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        dist.init_process_group("shoal")
        assert total() == [3.0]
        if attempt == 0 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        say(attempt, total())
        dist.destroy_process_group()
        """,
        prelude="import shoal\n" + PRELUDE,
    )
    ended = stage.run(*DISTRIBUTED_RUN, "--max-restarts", "1", script)
    assert ended.code == 0, ended
    assert ended.out.splitlines() == ["1 [3.0]"] * 2
    stage.assert_nothing_is_left()


def test_under_torchrun_a_rank_hears_within_a_second_that_another_one_was_killed(stage: Stage) -> None:
    """Which torchrun itself, as it is told to here, looks for every four seconds."""
    script = stage.script(
        """
        dist.init_process_group("shoal")
        try:
            total()  # rank 1 may be killed before this has returned on rank 0
            if dist.get_rank() == 1:
                with open("killed", "w") as file:
                    file.write(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            total()
        except shoal.PeerLost as error:
            took = time.monotonic() - float(open("killed").read())
            say(error.ranks, took < 1.0)
        """,
        prelude="import shoal\n" + PRELUDE,
    )
    ended = stage.run(*DISTRIBUTED_RUN, "--monitor-interval", "4", script)
    assert ended.code == 1, ended
    assert ended.out.splitlines() == ["(1,) True"], ended
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
    script = stage.script(BOTH_WAYS)
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
    expected = ["0 1 [1.0] [1.0]"] if launcher == "python" else [f"{r} 2 [3.0] [3.0]" for r in (0, 1)]
    assert sorted(ended.out.splitlines()) == expected
    stage.assert_nothing_is_left()
