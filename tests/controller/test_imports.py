"""Operators of a program's own on nodes, which import the modules that register them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shoal
from shoal.controller import Master
from shoal.errors import RemoteOpError, UsageError
from shoal.launch.cli import invoke
from tests.controller import nodes
from tests.controller.nodes import BACKSTOP, SECRET, Program, programs
from tests.controller.own_operators import halve_, positives, scaled

start = pytest.fixture(programs)
Start = Callable[..., Program]
OPERATORS = "tests.controller.own_operators"


@pytest.mark.usefixtures("no_master")
def test_operators_of_imported_modules_run_on_nodes(start: Start, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    start(nodes.joins, url, SECRET)
    with shoal.init_master_worker(url=url, secret=SECRET, imports=[OPERATORS]) as master:
        master.wait_for(1, BACKSTOP)
        x = torch.tensor([1.0, -2.0, 3.0], device="node:0", requires_grad=True)
        y = scaled(x, 3.0)
        assert y.tolist() == [3, -6, 9]
        (y * y).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [18, -36, 54]
        found = positives(x.detach())
        assert (found.device, found.tolist()) == (torch.device("node:0"), [1, 3])
        z = x.detach().clone()
        assert halve_(z) is None
        assert z.tolist() == [0.5, -1, 1.5]


@pytest.mark.parametrize("operation", [lambda x: scaled(x, 3.0), positives])
def test_without_them_the_error_names_the_remedy(
    master: Master, operation: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    with pytest.raises(RemoteOpError, match=r"no operator shoal_test::\w+: .*init_master_worker\(imports="):
        operation(torch.ones(3, device="node:0")).tolist()


@pytest.mark.usefixtures("no_master")
def test_what_cannot_be_imported_says_why(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/store"
    start(nodes.joins, url, SECRET)
    with (
        shoal.init_master_worker(url=url, secret=SECRET, imports=["not.there"]) as master,
        pytest.raises(UsageError, match=r"node 0 cannot import 'not.there': ModuleNotFoundError.*PYTHONPATH"),
    ):
        master.wait_for(1, BACKSTOP)
    for wrong in (OPERATORS, [1], [""]):
        with pytest.raises(UsageError, match="expected a list of module names, such"):
            shoal.init_master_worker(workers=1, imports=wrong)  # type: ignore[arg-type]


@pytest.mark.usefixtures("python_starts")
def test_a_node_finds_the_modules_of_its_master_and_no_others(tmp_path: Path) -> None:
    """The working directory is no part of the path of a script that is elsewhere."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "beside.py").write_text("import sys\npath = list(sys.path)\n")
    for name in ("queue", "ast", "json", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of the working directory')\n")
    script = tmp_path / "scripts" / "script.py"
    script.write_text(
        "import sys, shoal, beside\n"
        "def path():\n"
        "    import sys, beside\n"
        "    return sys.path, beside.path\n"
        "with shoal.init_master_worker(workers=1) as master:\n"
        "    assert master.call(0, path) == (sys.path, sys.path), master.call(0, path)\n"
    )
    ended = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=BACKSTOP,
        check=False, env={**os.environ, "PYTHONPATH": str(Path(shoal.__file__).parents[1])},
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_worker_that_lacks_a_device_or_a_module_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda *given: None)  # of this process, which goes on
    monkeypatch.setattr(sys, "path", list(sys.path))
    for option, value, words in (
        ("--device", "cuda:77", "there is no cuda:77 here: torch sees"),
        ("--device", "soup", "'soup' is not a device: expected cpu, or a GPU such as cuda:0"),
        ("--import", "not.there", "this worker cannot import 'not.there': ModuleNotFoundError"),
    ):
        assert invoke(["worker", "file:///nowhere", option, value]) == 2
        assert f"shoal: {words}" in capsys.readouterr().err
