"""One library's turn in benchmarks/controller.py, in a process; prints its figures as JSON.

    python benchmarks/controller_turns.py shoal '{"operations": 2000}'

``shoal`` and ``local`` run the same program, on a node and on this process's CPU. In Ray and Monarch an actor
keeps two tensors, and each of its methods is one operation on them.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from controller_figures import (
    FEATURES,
    GRADIENT,
    GRADIENTS,
    IMAGES,
    LARGE,
    PLACE,
    RECORDED,
    ROWS,
    SMALL,
    WIDTH,
    Figures,
    Library,
    Work,
    measure,
)
from torch.nn.functional import cross_entropy

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))


def on(device: str, wait: Callable[[], object]) -> Library:
    x, y = torch.randn(SMALL, device=device), torch.randn(SMALL, device=device)
    number = torch.ones((), device=device)
    layers = [torch.nn.Linear(FEATURES, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)]
    net = torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1)).to(device)
    sgd = torch.optim.SGD(net.parameters(), lr=1e-3, foreach=False)
    adam = torch.optim.Adam(net.parameters(), lr=1e-3, foreach=True)
    data = torch.randn(ROWS, FEATURES, device=device)
    large, here = torch.ones(LARGE // 4), torch.empty(LARGE // 4)
    remote = large.to(device)

    def add(count: int) -> None:
        for _ in range(count):
            x + y

    def step(optimiser: torch.optim.Optimizer) -> None:
        loss = net(data).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    def bring() -> None:
        if device == "cpu":
            here.copy_(large)
        else:
            there = large.to(device)
            wait()
            del there

    def bring_back() -> None:
        if device == "cpu":
            here.copy_(large)
        else:
            remote.cpu()

    return Library(
        wait=wait,
        add=add,
        fetch=number.item,
        step=lambda: step(sgd),
        adam=lambda: step(adam),
        large=bring,
        back=bring_back,
    )


def local(work: Work) -> Figures:
    """Torch alone: 64 MB are one memcpy to mapped memory."""
    library = on("cpu", lambda: None)
    library.between = library.large
    return measure(library, work)


def on_nodes(work: Work) -> Figures:
    return on_one(work) | on_a_place(PLACE, work)


def on_one(work: Work) -> Figures:
    import shoal

    with shoal.init_master_worker(workers=1) as master:
        library = on("node:0", master.synchronize)
        library.replay = replaying(master)
        figures = measure(library, work)
        if work.soak and library.add is not None:
            figures |= soaked(master, library.add, work.soak)
        return figures


def replaying(master: Any) -> Callable[[int], object]:
    """Return a function that issues recorded steps."""
    x, y = torch.randn(SMALL, device="node:0"), torch.randn(SMALL, device="node:0")

    @master.recorded  # type: ignore[untyped-decorator]
    def step() -> None:
        for _ in range(RECORDED):
            x + y

    def replay(steps: int) -> None:
        for _ in range(steps):
            step()

    return replay


def on_a_place(count: int, work: Work) -> Figures:
    import shoal

    with shoal.init_master_worker(workers=count) as master:
        device = master.place(range(count)).device
        x, y = torch.ones(SMALL, device=device), torch.ones(SMALL, device=device)
        gradients = [torch.ones(GRADIENT // 4, device=device) for _ in range(GRADIENTS)]
        large = torch.ones(LARGE // 4, device="node:0")

        def add(operations: int) -> None:
            for _ in range(operations):
                x + y

        def average() -> None:
            master.nodes.average_(gradients)
            master.synchronize()

        def copy() -> None:
            there = large.to("node:1")
            master.synchronize()
            del there

        library = Library(wait=master.synchronize, add_team=add)
        if count > 1:
            library.average, library.between = average, copy
            library.digits = digits_of_nodes(master)
        return measure(library, work)


def digits_of_nodes(master: Any) -> Callable[[int], object]:
    """Return a function that issues recorded training steps of examples/controller_digits.py."""
    from controller_digits import parts
    from digits import load, make_network

    place, digits = master.nodes, load()
    network = make_network(0).to(place.device)
    images, labels = place.replicate(digits.train_images), place.replicate(digits.train_labels)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, weight_decay=3e-3)

    @master.recorded  # type: ignore[untyped-decorator]
    def step(mine: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
        chosen = place.scatter(mine)
        losses = cross_entropy(network(images[chosen]), labels[chosen], reduction="none")
        loss = (losses * place.scatter(weights)).sum()
        optimizer.zero_grad()
        (loss * len(place) / IMAGES).backward()
        place.average_(parameter.grad for parameter in network.parameters())
        optimizer.step()

    def train(steps: int) -> None:
        for batch in batches(len(digits.train_labels), steps):
            step(*parts(batch, len(place)))

    return train


def digits_of_ranks(group: Any) -> Callable[[int], object]:
    """Return a function that makes the same steps on a rank, with DistributedDataParallel."""
    from digits import load, make_network

    import shoal

    digits, network = load(), make_network(0)
    model = shoal.DistributedDataParallel(network, group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=3e-3)

    def train(steps: int) -> None:
        for batch in batches(len(digits.train_labels), steps):
            mine = batch[group.rank :: group.size]
            loss = cross_entropy(model(digits.train_images[mine]), digits.train_labels[mine], reduction="sum")
            optimizer.zero_grad()
            (loss * group.size / IMAGES).backward()
            optimizer.step()
        group.barrier()

    return train


def batches(count: int, steps: int) -> Iterator[torch.Tensor]:
    shuffle = torch.Generator().manual_seed(0)
    for _ in range(steps):
        yield torch.randperm(count, generator=shuffle)[:IMAGES]


def of_ranks(work: Work) -> Figures:
    """The collectives of a program of four ranks without a master."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        mp.spawn(rank, args=(folder, work, str(out)), nprocs=PLACE)  # type: ignore[no-untyped-call]
        figures: Figures = json.loads(out.read_text())
        return figures


def rank(number: int, folder: str, work: Work, out: str) -> None:
    """Main function of a rank; rank 0 measures."""
    import shoal

    torch.set_num_threads(1)
    with shoal.init(url=f"file://{folder}/store", rank=number, size=PLACE) as group:
        gradients = [torch.ones(GRADIENT // 4) for _ in range(GRADIENTS)]
        bucket = group.empty(GRADIENTS * GRADIENT // 4)
        parts = list(bucket.split(GRADIENT // 4))

        def average() -> None:
            torch._foreach_copy_(parts, gradients)
            group.all_reduce(bucket, op="avg").wait()
            torch._foreach_copy_(gradients, parts)

        digits = digits_of_ranks(group)
        figures = measure(Library(wait=lambda: None, average=average, digits=digits), work)
        if number == 0:
            Path(out).write_text(json.dumps(figures))


def soaked(master: Any, add: Callable[[int], object], operations: int) -> Figures:
    """Measure the growth of the master and its node after this many operations."""

    def now() -> Figures:
        master.synchronize()
        counts = master.stats()[0]
        return {
            "master grew [MB]": resident(os.getpid()),
            "node grew [MB]": resident(master.pids[0]),
            "more tensors": counts["tensors"],
            "more calls": counts["calls"],
        }

    add(operations // 10)
    before = now()
    begun = time.perf_counter()
    add(operations)
    after = now()
    rate = {"x + y, soaked [1/s]": operations / (time.perf_counter() - begun)}
    return rate | {what: after[what] - before[what] for what in after}


def resident(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


# -- actors -------------------------------------------------------------------------------------


class Held:
    def __init__(self) -> None:
        self.x, self.y = torch.randn(SMALL), torch.randn(SMALL)
        self.sum = self.x

    def add(self) -> None:
        self.sum = self.x + self.y

    def number(self) -> float:
        return float(self.sum[0, 0])

    def bring(self, value: Any) -> int:
        return int(value.numel())


def with_ray(work: Work) -> Figures:
    os.environ["RAY_AUTH_MODE"] = "disabled"  # otherwise it writes a token into the user's home
    import ray  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as folder:
        ray.init(
            num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=folder,
            object_store_memory=2**30,
        )  # fmt: skip
        try:
            actor = ray.remote(Held).remote()
            return acted(actor, lambda method, *args: method.remote(*args), ray.get, work)
        finally:
            ray.shutdown()


def with_monarch(work: Work) -> Figures:
    from monarch.actor import Actor, endpoint, this_host  # type: ignore[import-not-found]

    class Served(Held, Actor):  # type: ignore[misc]
        add = endpoint(Held.add)
        number = endpoint(Held.number)
        bring = endpoint(Held.bring)

    processes = this_host().spawn_procs(per_host={"gpus": 1})
    actor = processes.spawn("held", Served)
    try:
        return acted(actor, lambda method, *args: method.call_one(*args), lambda each: each.get(), work)
    finally:
        processes.stop().get()


def acted(
    actor: Any, begin: Callable[..., Any], end: Callable[[Any], Any], work: Work, window: int = 500
) -> Figures:
    """The operations of an actor, with a window of pending calls that complete in order."""
    large = torch.ones(LARGE // 4)

    def add(count: int) -> None:
        pending = [begin(actor.add) for _ in range(min(window, count))]
        for index in range(count - len(pending)):
            end(pending[index % window])
            pending[index % window] = begin(actor.add)
        for each in pending:
            end(each)

    return measure(
        Library(
            wait=lambda: None,
            add=add,
            fetch=lambda: end(begin(actor.number)),
            large=lambda: end(begin(actor.bring, large)),
        ),
        work,
    )


TURNS: dict[str, Callable[[Work], Figures]] = {
    "shoal": on_nodes,
    "local": local,
    "ranks": of_ranks,
    "ray": with_ray,
    "monarch": with_monarch,
}


def main(name: str, words: str) -> None:
    torch.set_num_threads(1)
    print(json.dumps(TURNS[name](Work(**json.loads(words)))))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
