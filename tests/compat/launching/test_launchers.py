"""Under each launcher ranks meet by ``init_process_group("shoal")`` alone, and end without a word."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from tests.support.stage import PRELUDE, Ended, Stage

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
    """The entry point ``torch.backends`` is what makes the backend known; the store has stale keys later."""
    script = stage.script(
        """
        assert "shoal.group" not in sys.modules, "loaded before it was used"
        for _ in range(3):
            dist.init_process_group("shoal")
            assert dist.get_backend() == "shoal"
            assert total() == [3.0]
            dist.destroy_process_group()
        say([3.0])
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
