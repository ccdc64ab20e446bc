"""The turn of an actor library, Ray or Monarch, for benchmarks/rpc.py, in a separate environment.

    python benchmarks/rpc_actors.py ray '{"calls": 2000}'

Prints the figures as JSON in its last line. Both libraries keep the called object in another process.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from rpc_figures import LARGE, SMALL, Library, Work, measure


class Methods:
    def nothing(self) -> None:
        pass

    def echo(self, x: Any) -> Any:
        return x

    def elements(self, x: Any) -> int:
        return int(x.numel())


def over_ray(work: Work) -> dict[str, float]:
    os.environ["RAY_AUTH_MODE"] = "disabled"  # otherwise it writes a token into the user's home
    import ray  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as folder:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
            object_store_memory=2**30,
        )
        try:
            actor = ray.remote(Methods).remote()

            def begin(method: Any, *args: Any) -> Callable[[], Any]:
                reference = method.remote(*args)
                return lambda: ray.get(reference)

            return figures(begin, actor, work)
        finally:
            ray.shutdown()


def over_monarch(work: Work) -> dict[str, float]:
    from monarch.actor import Actor, endpoint, this_host  # type: ignore[import-not-found]

    class Served(Actor):  # type: ignore[misc]
        nothing = endpoint(Methods.nothing)
        echo = endpoint(Methods.echo)
        elements = endpoint(Methods.elements)

    processes = this_host().spawn_procs(per_host={"gpus": 1})
    actor = processes.spawn("called", Served)

    def begin(method: Any, *args: Any) -> Callable[[], Any]:
        future = method.call_one(*args)
        return lambda: future.get()

    try:
        return figures(begin, actor, work)
    finally:
        processes.stop().get()


def figures(begin: Callable[..., Callable[[], Any]], actor: Any, work: Work) -> dict[str, float]:
    small, large = torch.randn(SMALL), torch.zeros(LARGE // 4)
    library = Library(
        lambda: begin(actor.nothing), lambda: begin(actor.echo, small), lambda: begin(actor.elements, large)
    )
    return measure(library, work)


if __name__ == "__main__":
    torch.set_num_threads(1)
    over = {"ray": over_ray, "monarch": over_monarch}[sys.argv[1]]
    print(json.dumps(over(Work(**json.loads(sys.argv[2])))))
