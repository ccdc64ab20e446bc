"""Training on several hosts gives what it gives on one, and goes on when a host is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.quick_launcher import QuickLauncher
from tests.support.ssh_hosts import HEAD, SshHosts

ROOT = Path(__file__).resolve().parents[2]

#: rank 0 tells the parameters that it ends with; at step 5 it may let the test do something
TRAINING = f"""
import json, os, sys, time, types
sys.path.insert(0, {str(ROOT)!r})
import torch
import shoal

# Optimisers import the compiler, which takes a second and is not used.
compiler = types.ModuleType("torch._dynamo")
compiler.disable = lambda function, *_, **__: function
compiler.graph_break = lambda: None
sys.modules[compiler.__name__] = torch._dynamo = compiler

from tests.elastic.training import train

torch.set_num_threads(1)
waits = "wait" in sys.argv
group = shoal.init()
x = torch.tensor([float(group.rank)])
group.all_reduce(x).wait()
assert x.item() == sum(range(group.size)), x

def visit(point, step):
    here = (step.number, point) == (5, "in backward") and not os.path.exists("told-5")
    if waits and group.rank == 0 and here:
        open("told-5", "w").close()
        while not os.path.exists("told-go"):
            time.sleep(0.01)

log = train(group, visit, min=2)
if group.rank == 0:
    result = dict(
        sizes=[step.size for step in log.steps],
        parameters=[p.flatten().tolist() for p in log.parameters],
        events=[(event.previous_size, event.size) for event in log.events],
    )
    with open("told-result", "w") as file:
        json.dump(result, file)
group.close(0.3)  # or it would wait for those who do not hear it
"""


def result(hosts: SshHosts) -> dict[str, list[list[float]]]:
    found: dict[str, list[list[float]]] = json.loads((hosts.folder / "told-result").read_text())
    return found


def test_three_hosts_of_one_or_two_ranks_train_what_one_host_of_four_does(
    hosts: SshHosts, launcher: QuickLauncher
) -> None:
    (hosts.folder / "script.py").write_text(TRAINING)
    code, _, err = hosts.run("run", "--hosts", "a:1,b:2,c:1", "script.py")
    assert code == 0, err.decode()
    several = result(hosts)
    (hosts.folder / "told-result").unlink()
    script = hosts.folder / "one_host.py"
    script.write_text(f"import os\nos.chdir({str(hosts.folder)!r})\n{TRAINING}")
    returned, out, said = launcher.run(4, str(script))
    assert returned == 0, out + said
    one = result(hosts)
    assert len(several["parameters"]) == len(one["parameters"]) > 3
    for mine, theirs in zip(several["parameters"], one["parameters"], strict=True):
        torch.testing.assert_close(
            torch.tensor(mine, dtype=torch.double), torch.tensor(theirs, dtype=torch.double),
            rtol=1e-9, atol=1e-9,
        )  # fmt: skip


@pytest.mark.parametrize("lost", ["b"])
def test_training_goes_on_through_the_loss_of_a_host(hosts: SshHosts, lost: str) -> None:
    (hosts.folder / "script.py").write_text(TRAINING)
    environment = {**hosts.environment(), "SHOAL_HEARTBEAT_TIMEOUT": "5"}
    head = hosts.start("run", "--hosts", "a:1,b:2,c:1", "--min", "2", "script.py", "wait", env=environment)
    hosts.await_told(5)
    hosts.network.drop(lost, [HEAD, *(set("abc") - {lost})])
    (hosts.folder / "told-go").touch()
    _, err = head.communicate(timeout=120)
    text = err.decode()
    assert head.returncode == 0, text
    assert f"shoal: host {lost} is lost, and with it ranks 1, 2: " in text
    assert text.endswith("shoal: 2 of 4 ranks finished; ranks 1, 2 were lost with the host\n"), text
    found = result(hosts)
    assert found["events"] == [[4, 2]]
    assert (found["sizes"][0], found["sizes"][-1], len(found["sizes"])) == (4, 2, 14)
    hosts.await_agents_end(lost)
