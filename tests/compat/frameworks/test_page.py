"""The snippets of docs/frameworks.md give the same results over shoal as over Gloo, bit for bit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.quick_launcher import QuickLauncher

PAGE = Path(__file__).resolve().parents[3] / "docs" / "frameworks.md"

#: Section of the page: the packages that its snippet needs beside torch.
SNIPPETS = {
    "Hugging Face Trainer": ("transformers", "accelerate"),
    "Accelerate": ("accelerate",),
    "Lightning Trainer": ("lightning",),
    "Lightning Fabric": ("lightning",),
    "FSDP2": (),
    "DTensor": (),
    "Distributed checkpoints": (),
}
RAY = "Ray Train"

#: Modules that take seconds to import; the launcher imports those that are installed, once for all ranks.
SLOW_IMPORTS = {
    "accelerate": ["accelerate"],
    "transformers": ["transformers.trainer", "transformers.models.llama.modeling_llama"],
    "lightning": ["lightning.pytorch"],
}

#: Inserted before the group is destroyed: saves the tensors and models that the snippet defined.
SAVE = """
import os as _os
import sys as _sys

_found = {}
for _name, _value in dict(globals()).items():
    if isinstance(_value, torch.nn.Module):
        _found |= {f"{_name}.{key}": each for key, each in _value.state_dict().items()}
    elif isinstance(_value, torch.Tensor):
        _found[_name] = _value
for _name, _value in _found.items():
    _value = _value.to_local() if hasattr(_value, "to_local") else _value
    _found[_name] = _value.detach().contiguous().clone()
_path = _os.path.join(_sys.argv[1], _os.environ["RANK"] + ".pt")
torch.save((torch.distributed.get_backend(), _found), _path)
"""
#: Appended where Gloo runs, because torch's DDP over Gloo can hang when the process ends.
EXIT = "_os._exit(0)\n"

LAST_LINES = r"^(dist\.destroy_process_group\(\)|accelerator\.end_training\(\).*)\n\Z"


def snippets() -> dict[str, str]:
    """The first program of each section of the page."""
    found = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        heading = section.partition("\n")[0]
        program = re.search(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
        if program:
            found[heading] = program[1]
    return found


def over_gloo(program: str) -> str:
    """The program with Gloo's name instead of shoal's."""
    assert program.count('"shoal"') == 1
    return program.replace('"shoal"', '"gloo"')


def instrumented(program: str) -> str:
    """The program, which saves its results before it destroys its group."""
    last = re.search(LAST_LINES, program, re.MULTILINE)
    if last is None:
        return program + SAVE
    return program[: last.start()] + SAVE + last[0]


def require(*packages: str) -> None:
    """Skip the test where a package is missing."""
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


@pytest.fixture(scope="module")
def framework_launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QuickLauncher]:
    """Launches ranks that have the frameworks imported already."""
    modules = [name for package, names in SLOW_IMPORTS.items() if find_spec(package) for name in names]
    with QuickLauncher(tmp_path_factory.mktemp("launcher"), modules) as launcher:
        yield launcher


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def results(
    launcher: QuickLauncher, program: str, folder: Path, backend: str
) -> list[dict[str, torch.Tensor]]:
    """Run the program on two ranks and return the tensors of each."""
    folder.mkdir()
    script = folder / "program.py"
    # The ranks inherit the folder of the launcher, and the snippets write checkpoints.
    script.write_text(f"import os\nos.chdir({str(folder)!r})\n{program}")
    code, out, err = launcher.run(2, str(script), str(folder))
    assert code == 0, out + err
    saved = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]
    assert [used for used, _ in saved] == [backend] * 2
    return [tensors for _, tensors in saved]


def test_every_snippet_of_the_page_is_tested() -> None:
    assert set(snippets()) == {*SNIPPETS, RAY}


@pytest.mark.parametrize("heading", SNIPPETS)
def test_the_snippet_gives_the_results_of_gloo(
    heading: str, framework_launcher: QuickLauncher, tmp_path: Path
) -> None:
    require(*SNIPPETS[heading])
    program = snippets()[heading]
    ours = results(framework_launcher, instrumented(program), tmp_path / "shoal", "shoal")
    theirs = results(framework_launcher, instrumented(over_gloo(program)) + EXIT, tmp_path / "gloo", "gloo")
    for rank in range(2):
        assert ours[rank].keys() == theirs[rank].keys() != set()
        for name, value in ours[rank].items():
            assert torch.equal(value, theirs[rank][name]), f"rank {rank}, {name}"


def test_a_checkpoint_of_the_snippet_is_restored_exactly(
    framework_launcher: QuickLauncher, tmp_path: Path
) -> None:
    program = instrumented(snippets()["Distributed checkpoints"])
    for found in results(framework_launcher, program, tmp_path / "shoal", "shoal"):
        assert torch.equal(found["model.weight"], found["restored.weight"])
        assert torch.equal(found["model.bias"], found["restored.bias"])


REFUSALS = """
import os

from transformers import HfArgumentParser, TrainingArguments

try:
    TrainingArguments("out", use_cpu=True, ddp_backend="shoal").device
except ValueError as error:
    print(error)
try:
    HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(["--ddp_backend", "shoal"])
except SystemExit as error:
    print("exit", error)
"""


def test_transformers_refuses_the_name_as_the_page_says(
    framework_launcher: QuickLauncher, tmp_path: Path
) -> None:
    require("transformers", "accelerate")
    script = tmp_path / "program.py"
    script.write_text(REFUSALS)
    code, out, err = framework_launcher.run(1, str(script))
    assert code == 0, out + err
    said = "Your assigned backend shoal is not available, please use gloo"
    assert out.splitlines() == [f"[0] {said}", "[0] exit 2"]
    assert said in PAGE.read_text()
    assert "invalid choice: 'shoal'" in err
    assert "'ccl'" not in err  # the list of choices


@pytest.mark.parametrize("package", ["transformers", "accelerate", "lightning", "ray"])
def test_the_page_names_the_version_that_is_installed(package: str) -> None:
    try:
        installed = version(package)
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    assert f"| {package} {installed}" in PAGE.read_text()


#: Inserted before the snippet: a cluster on the loopback address of this machine.
RAY_CLUSTER = """
import sys

import ray

ray.init(
    num_cpus=2,
    include_dashboard=False,
    object_store_memory=100 * 2**20,
    _temp_dir=sys.argv[1],
)
"""
RAY_RESULT = """
import json

print("RESULT " + json.dumps(result.return_value))
ray.shutdown()
"""


def ray_result(program: str, folder: Path) -> dict[str, Any]:
    """Run the program in a cluster of Ray and return what rank 0 returned."""
    folder.mkdir()
    script = folder / "program.py"
    script.write_text(RAY_CLUSTER + program + RAY_RESULT)
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    settings = {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the address of the node is that of loopback
    }
    with tempfile.TemporaryDirectory(prefix="ray") as temporary:  # short, for the paths of its sockets
        done = subprocess.run(
            [sys.executable, str(script), temporary],
            cwd=folder,
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = re.findall("^RESULT (.*)$", done.stdout, re.MULTILINE)
    result: dict[str, Any] = json.loads(line)
    return result


def test_the_snippet_for_ray_gives_the_losses_of_gloo(tmp_path: Path) -> None:
    require("ray", "pyarrow", "pandas")
    program = snippets()[RAY]
    ours = ray_result(program, tmp_path / "shoal")
    theirs = ray_result(over_gloo(program), tmp_path / "gloo")
    assert (ours["backend"], theirs["backend"]) == ("shoal", "gloo")
    assert ours["losses"] == theirs["losses"]
    assert len(ours["losses"]) == 8
