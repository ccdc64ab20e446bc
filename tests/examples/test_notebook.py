"""The notebook of the master-worker mode: its cells run, one after the other, and print what they promise."""

from __future__ import annotations

import json
from pathlib import Path

import nbclient
import nbformat
from traitlets.config import Config

from tests.support.ports import free_port
from tests.support.programs import run_program

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "controller.ipynb"
PRINTED = [
    "[device(type='node', index=0), device(type='node', index=1)]",
    "0 torch.Size([20, 20])",
    "node 0: the loss fell: True",
    "node 1: the loss fell: True",
    "index 7 is out of bounds",
]


def test_the_cells_run_as_a_script(tmp_path: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    script = tmp_path / "notebook.py"
    script.write_text("\n\n".join("".join(each["source"]) for each in cells if each["cell_type"] == "code"))
    (output,) = run_program(script, 1, folder=tmp_path, is_master=True)
    assert [each for each in PRINTED if each not in output] == []
    assert "False" not in output


def test_the_notebook_runs_in_a_kernel(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    # Ports that the client chose might be somebody else's when the notebook's kernel binds them.
    free: set[int] = set()
    while len(free) < 5:
        free.add(free_port())
    names = ("shell", "iopub", "stdin", "hb", "control")
    ports = {f"{each}_port": port for each, port in zip(names, free, strict=True)}
    client = nbclient.NotebookClient(
        notebook,
        timeout=300,
        resources={"metadata": {"path": str(tmp_path)}},
        config=Config({"KernelManager": {"cache_ports": False, **ports}}),
    )
    client.execute()
    output = "".join(each.get("text", "") for cell in notebook.cells for each in cell.get("outputs", []))
    assert [each for each in PRINTED if each not in output] == []


def test_the_notebook_is_stored_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not [each for each in cells if each.get("outputs") or each.get("execution_count")]
