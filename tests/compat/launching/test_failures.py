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


def test_survivors_make_the_default_group_again_with_fewer_ranks(stage: Stage) -> None:
    """As docs/compatibility.md has it; the groups of torch that the lost rank is not in go on meanwhile."""
    script = stage.script(
        """
        import shoal
        dist.init_process_group("shoal")
        without_1, of_all = dist.new_group([0, 2]), dist.new_group([0, 1, 2])
        total()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            total()
        except shoal.PeerLost as error:
            alive = [rank for rank in range(dist.get_world_size()) if rank not in error.ranks]
        x = torch.ones(1)
        dist.all_reduce(x, group=without_1)
        say("without 1:", x.item())
        for call in (lambda: dist.all_reduce(x, group=of_all), lambda: dist.new_group([0, 2])):
            try:
                call()
            except shoal.PeerLost as error:
                say("PeerLost", error.ranks)
        rank = alive.index(dist.get_rank())
        dist.destroy_process_group()
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(len(alive)))
        dist.init_process_group("shoal")
        say("again:", total())
        dist.destroy_process_group()
        """
    )
    first, killed, last = stage.ranks(script, 3)
    assert killed.code == -signal.SIGKILL
    for survivor in (first, last):
        said = "without 1: 2.0\nPeerLost (1,)\nPeerLost (1,)\nagain: [3.0]\n"
        assert (survivor.code, survivor.out) == (0, said), survivor
    stage.assert_nothing_is_left()


def test_survivors_of_rank_0_make_the_default_group_again_at_a_store_that_outlives_it(stage: Stage) -> None:
    script = stage.script(
        """
        import shoal
        store = dist.FileStore("meeting", -1)
        rank, size, groups = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), 0
        while True:
            place = dist.PrefixStore(f"group {groups}", store)
            dist.init_process_group("shoal", store=place, rank=rank, world_size=size)
            try:
                before = total()
                if groups == 0 and rank == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                say(before, total())
                break
            except shoal.PeerLost as error:
                alive = [rank for rank in range(size) if rank not in error.ranks]
                rank, size, groups = alive.index(rank), len(alive), groups + 1
                dist.destroy_process_group()
        dist.destroy_process_group()
        """
    )
    killed, *survivors = stage.ranks(script, 3)
    assert killed.code == -signal.SIGKILL
    assert [(each.code, each.out) for each in survivors] == [(0, "[3.0] [3.0]\n")] * 2, survivors
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
