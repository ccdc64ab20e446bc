"""Train on handwritten digits with a parameter server and three trainers, one of which dies.

    $ python examples/parameter_server.py
    update 1080/1080 ━━━━━━━━━━━━━━━━━━━━━━━━━━━━ loss 0.0158  test accuracy 98.6% 0:00:05
    after 531 updates: worker 'chief': train at 'trainer1': the worker (process 4711) was lost ...
    trainer1 goes on after 180 of its updates as process 4716
    test accuracy 98.61 % (355 of 360 digits) after 1080 updates, 360 by each of 3 trainers

Images and network are those of `examples/digits.py`. This process, the `chief`, starts four others, which
join under their names and serve calls until the chief has left. It creates the parameter server, an actor at
the worker `server`, and calls `train` at each trainer with a reference to that actor. A trainer computes
gradients as fast as it can, sends each to the server and receives the current parameters. Trainers do not
wait for one
another: a gradient may be of older parameters than those it is applied to (asynchronous SGD, as in
DistBelief, Dean et al. 2012), so the result differs a little from run to run.

Halfway `trainer1` is killed. Its call of `train` fails with `WorkerLost`; the others do not notice it. The
chief starts a new process under the same name, which makes the remaining updates.

Jobs of `shoal run` end when a rank dies, so this program starts its processes itself. They meet in a file; on
several hosts they would meet at a store, `join(name, url="tcp://...")`.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator

import torch
from digits import Digits, load, make_network
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeElapsedColumn
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import shoal

TRAINERS = ["trainer0", "trainer1", "trainer2"]
#: the trainer that dies
VICTIM = "trainer1"
#: seconds between two polls of the chief
LOOK = 0.1
#: imports these modules once; workers are forked from it
FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(["torch", "sklearn.datasets", "sklearn.model_selection", "shoal.rpc"])


class ParameterServer:
    """The parameters and their optimizer. An actor: its methods run one at a time."""

    def __init__(self, updates: int, seed: int) -> None:
        self.network = make_network(seed)
        # Without momentum: late gradients have a similar effect, and with both the loss may grow.
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.6, weight_decay=3e-3)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, updates)
        self.by: Counter[str] = Counter()
        self.loss = 0.0

    def pull(self) -> torch.Tensor:
        """Return a copy of all parameters; the next method may change them while it is sent."""
        return parameters_to_vector(self.network.parameters()).detach()

    def push(self, gradient: torch.Tensor, loss: float) -> torch.Tensor:
        """Make a step with the gradient of all parameters; return the new parameters."""
        begin = 0
        for parameter in self.network.parameters():
            parameter.grad = gradient[begin : begin + parameter.numel()].view_as(parameter)
            begin += parameter.numel()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)  # gradients of old parameters may be large
        self.optimizer.step()
        self.schedule.step()
        self.by[shoal.rpc.current().caller] += 1
        self.loss += 0.1 * (loss - self.loss)
        return self.pull()

    def standing(self) -> tuple[Counter[str], float, torch.Tensor]:
        """Return each trainer's number of updates, the recent loss, and the parameters."""
        return self.by, self.loss, self.pull()


def batches(count: int, size: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield the image indices of batches, endlessly; each image occurs once per epoch."""
    shuffle = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=shuffle).split(size)


def train(server: shoal.rpc.Actor, updates: int, batch: int, seed: int, dies: bool = False) -> None:
    """Send gradients to the server; with ``dies``, kill this process after half of the updates."""
    digits, network = load(), make_network(seed)
    parameters = server.pull().wait()
    mine = batches(len(digits.train_labels), batch, seed)
    for update in range(updates):
        if dies and update == updates // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        vector_to_parameters(parameters, network.parameters())
        images = next(mine)
        loss = cross_entropy(network(digits.train_images[images]), digits.train_labels[images])
        gradients = torch.autograd.grad(loss, list(network.parameters()))
        parameters = server.push(parameters_to_vector(gradients), loss.item()).wait()


def work(url: str, name: str) -> None:
    """Run a worker until the chief has left; the main function of the started processes."""
    torch.set_num_threads(1)
    with shoal.rpc.join(name, url=url) as agent:
        agent.wait(until="chief")


class Chief:
    """Starts the workers and their training."""

    def __init__(self, agent: shoal.rpc.Agent, url: str) -> None:
        self.agent = agent
        self.url = url
        self.processes: dict[str, multiprocessing.process.BaseProcess] = {}
        self.calls: dict[str, shoal.Future[None]] = {}

    def start(self, name: str) -> None:
        self.processes[name] = FORK_SERVER.Process(target=work, args=(self.url, name), name=name)
        self.processes[name].start()

    def train(self, name: str, *arguments: object) -> None:
        """Call :func:`train` at a worker as soon as it has joined, without a timeout."""
        trainer = self.agent.peer(name, timeout=60).options(timeout=math.inf)
        self.calls[name] = trainer.call(train, *arguments)

    def lost(self) -> dict[str, shoal.WorkerLost]:
        """Return the errors of trainers that have died; raise any other error."""
        found = {}
        for name, call in self.calls.items():
            try:
                if call.done():
                    call.value()
            except shoal.WorkerLost as error:
                found[name] = error
        return found

    @property
    def finished(self) -> bool:
        return all(call.done() and call.exception() is None for call in self.calls.values())


@torch.no_grad()
def evaluate(network: nn.Module, parameters: torch.Tensor, digits: Digits) -> int:
    """Return the number of test images that a network with these parameters classifies correctly."""
    vector_to_parameters(parameters, network.parameters())
    return int((network(digits.test_images).argmax(dim=1) == digits.test_labels).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on handwritten digits with a parameter server.")
    parser.add_argument("--updates", type=int, default=360, help="updates of each trainer")
    parser.add_argument("--batch", type=int, default=32, help="images in a gradient")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial network and the batches")
    options = parser.parse_args()

    digits, network = load(), make_network(options.seed)
    total, count = options.updates * len(TRAINERS), len(digits.test_labels)
    console = Console(highlight=False, soft_wrap=True)
    columns = (
        "update {task.completed}/{task.total}",
        BarColumn(),
        "{task.fields[news]}",
        TimeElapsedColumn(),
    )
    with tempfile.TemporaryDirectory() as folder:
        url = f"file://{folder}/place"
        with (
            shoal.rpc.join("chief", url=url) as agent,
            Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        ):
            task = progress.add_task("training", total=total, news="")
            chief = Chief(agent, url)
            for name in ("server", *TRAINERS):
                chief.start(name)
            server = agent.peer("server").actor(ParameterServer, total, options.seed)
            for seed, name in enumerate(TRAINERS, options.seed):
                chief.train(name, server, options.updates, options.batch, seed, name == VICTIM)
            finished = False
            while not finished:
                time.sleep(LOOK)
                finished = chief.finished
                by, loss, parameters = server.standing().wait()
                right, done = evaluate(network, parameters, digits), sum(by.values())
                news = f"loss {loss:.4f}  test accuracy {right / count:.1%}"
                progress.update(task, completed=done, news=news)
                for name, error in chief.lost().items():
                    by, _, _ = server.standing().wait()  # includes all updates before the death
                    console.print(f"after {sum(by.values())} updates: {error}")
                    chief.start(name)
                    left = options.updates - by[name]
                    chief.train(name, server, left, options.batch, options.seed + len(TRAINERS))
                    process = chief.processes[name].pid
                    console.print(f"{name} goes on after {by[name]} of its updates as process {process}")
            console.print(
                f"test accuracy {100 * right / count:.2f} % ({right} of {count} digits) "
                f"after {done} updates, {options.updates} by each of {len(TRAINERS)} trainers"
            )
        for process in chief.processes.values():  # they end because the chief has left
            process.join()


if __name__ == "__main__":
    main()
