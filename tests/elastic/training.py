"""What the tests of sessions train, and what each rank remembers of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoal.elastic import Loader, Resize, Samples, Session, State, Step
from shoal.group import ProcessGroup

LENGTH = 50
BATCH = 12  # shared out unevenly over 5 ranks, and no divisor of the length
STEPS = 14

#: called at a named point of a step
Visit = Callable[[str, Step], None]


@dataclass
class Committed:
    """One step that counts, as one rank saw it."""

    number: int
    rank: int
    size: int
    indices: list[int]
    digest: str


@dataclass
class Log:
    """What one rank remembers of its training."""

    steps: list[Committed] = field(default_factory=list)
    events: list[Resize] = field(default_factory=list)
    parameters: list[torch.Tensor] = field(default_factory=list)
    best: float = 0.0
    buffers: list[torch.Tensor] = field(default_factory=list)
    session: Session | None = None


class Training:
    """A net of three layers in double precision, with its data and optimiser; the same on every rank."""

    def __init__(self, *, seed: int = 0, width: int = 10, **samples: Any) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.net = nn.Sequential(
            nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        ).double()
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.double) / 3)
        self.x = torch.randn(LENGTH, 6, generator=generator, dtype=torch.double)
        self.y = self.x.prod(1, keepdim=True)
        self.optimizer = self.make_optimizer()
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.97)
        self.samples = Samples(LENGTH, **(samples or {"batch": BATCH}))
        self.state = State(
            model=self.net, optimizer=self.optimizer, scheduler=self.scheduler, samples=self.samples, best=0.0
        )

    def make_optimizer(self) -> torch.optim.Optimizer:
        """What trains the net."""
        return torch.optim.AdamW(self.net.parameters(), lr=0.02)

    def loss(self, model: nn.Module, indices: torch.Tensor) -> torch.Tensor:
        """The mean over the samples."""
        return nn.functional.mse_loss(model(self.x[indices]), self.y[indices])

    def update(self) -> None:
        """What comes after a commit."""
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def solo_group(self, batches: list[torch.Tensor]) -> list[torch.Tensor]:
        """The parameters after plain training on these batches."""
        for batch in batches:
            self.loss(self.net, batch).backward()
            self.update()
        return [parameter.detach().clone() for parameter in self.net.parameters()]


def nothing(point: str, step: Step) -> None:
    """At no point happens anything."""


def train(
    group: ProcessGroup | None,
    visit: Visit = nothing,
    *,
    until: int = STEPS,
    min: int = 1,
    max: int | None = None,
    active: int | None = None,
    workers: int | None = None,
    training: Training | None = None,
    **samples: Any,
) -> Log:
    """Train in a session, and call ``visit`` at each point of each step; with a Loader of so many workers."""
    training, log = training or Training(**samples), Log()
    loader = None
    if workers is not None:
        loader = Loader(TensorDataset(torch.arange(LENGTH)), num_workers=workers)
    with Session(training.state, group=group, min_size=min, max_size=max, active=active) as session:
        log.session = session
        log.events = session.events
        model = session.parallel(training.net, bucket_cap_mb=0.0005)
        running: list[Step] = []
        training.net[2].weight.register_hook(lambda _: visit("in backward", running[-1]))
        for step in session.steps(until):
            visit("between", step)
            with step:
                running.append(step)
                visit("before backward", step)
                training.state.best += 1.0  # once a step that counts
                indices = step.indices if loader is None else loader.batch(step)[0]
                (training.loss(model, indices) * step.weight).backward()
                rank, size = session.group.rank, session.group.size
                visit("before commit", step)
                step.commit()
                visit("after commit", step)
                training.update()
                visit("after update", step)
                log.steps.append(
                    Committed(step.number, rank, size, indices.tolist(), training.state.digest().hex())
                )
            visit("after the block", step)
        visit("after the last", step)
        log.parameters = [parameter.detach().clone() for parameter in training.net.parameters()]
        log.best = training.state.best
    log.session = None
    return log


def assert_as_undisturbed(
    logs: list[Log],
    *,
    until: int = STEPS,
    active: int | None = None,
    make: Callable[[], Training] = Training,
) -> None:
    """Survivors agree in every bit at every commit, each sample counted once a pass, and the result is that
    of training without a fault."""
    first = logs[0]
    assert len(first.steps) == until
    for log in logs:
        since = until - len(log.steps)  # those that joined have not seen the first ones
        assert [each.number for each in log.steps] == list(range(since, until))
        assert [each.digest for each in log.steps] == [each.digest for each in first.steps[since:]]
        assert log.best == until
        assert all(map(torch.equal, log.parameters, first.parameters))
    training = make()
    batches = []
    for number in range(until):
        together = training.samples.share(0, 1).indices
        here = [each for log in logs for each in log.steps if each.number == number]
        for each in here:
            assert (
                each.indices == training.samples.share(each.rank, each.size, active=active).indices.tolist()
            )
        assert len({each.size for each in here}) == 1
        batches.append(together)
        training.samples.advance(BATCH)
    dealt = torch.cat(batches)[: LENGTH * (until * BATCH // LENGTH)].view(-1, LENGTH)
    assert bool((dealt.sort(1).values == torch.arange(LENGTH)).all())
    for mine, theirs in zip(first.parameters, training.solo_group(batches), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
