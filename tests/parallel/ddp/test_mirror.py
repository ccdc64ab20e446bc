"""When copies of parameters are brought up to date."""

from __future__ import annotations

import torch

from shoal.parallel.ddp.mirror import Mirror


def test_followers_are_written_to_only_after_a_change() -> None:
    source = torch.ones(2, requires_grad=True)
    follower = torch.zeros(2, requires_grad=True)
    mirror = Mirror([source], [[follower]])
    mirror.refresh(0)
    version = follower._version
    mirror.refresh(0)
    assert follower._version == version
    with torch.no_grad():
        source.mul_(2)
    source.requires_grad_(False)
    mirror.refresh(0)
    assert follower.tolist() == [2, 2]
    assert not follower.requires_grad
    version = follower._version
    source.data.mul_(2)  # torch does not notice
    mirror.refresh(1)
    assert follower.tolist() == [4, 4]
    assert follower._version == version
