"""What becomes of the others when a rank ends early, raises, or is killed."""

from __future__ import annotations

import signal

from tests.support.stage import Stage

#: one rank ends in the way that is filled in; the others say what they were told
SURVIVE = """
        dist.init_process_group("shoal")
        total()
        if dist.get_rank() == {rank}:
            {end}
        try:
            total()
        except Exception as error:
            say(type(error).__name__, getattr(error, "ranks", ()), error)
        """


def test_killed_rank_0_is_named_though_the_store_dies_with_it_and_the_others_end(stage: Stage) -> None:
    script = stage.script(SURVIVE.format(rank=0, end="os.kill(os.getpid(), signal.SIGKILL)"))
    killed, *survivors = stage.ranks(script, 3)
    assert killed.code == -signal.SIGKILL
    for survivor in survivors:
        assert (survivor.code, survivor.err) == (0, ""), survivor
        assert survivor.out.startswith("PeerLost (0,)"), survivor
    stage.assert_nothing_is_left()


def test_a_rank_may_leave_after_rank_0_is_gone_and_the_store_with_it(stage: Stage) -> None:
    """And what rank 0 sent without waiting still arrives."""
    script = stage.script(
        """
        dist.init_process_group("shoal")
        pid = torch.tensor(os.getpid())
        dist.broadcast(pid, 0)
        x = torch.full((10_000,), 7.0)
        if dist.get_rank() == 0:
            dist.isend(x, 1)
        else:
            while os.path.exists(f"/proc/{pid}"):
                time.sleep(0.01)
            dist.recv(y := torch.empty(10_000), 0)
            assert y.equal(x)
            dist.destroy_process_group()
        """
    )
    for ended in stage.ranks(script):
        assert (ended.code, ended.out, ended.err) == (0, "", ""), ended
    stage.assert_nothing_is_left()


def test_a_rank_that_raises_tells_the_other(stage: Stage) -> None:
    script = stage.script(SURVIVE.format(rank=1, end='raise ValueError("no such fish")'))
    survivor, raising = stage.ranks(script)
    assert raising.code == 1
    assert raising.err.count("Traceback") == 1, raising
    assert (survivor.code, survivor.err) == (0, ""), survivor
    assert "rank 1" in survivor.out, survivor
    assert "no such fish" in survivor.out, survivor
    stage.assert_nothing_is_left()
