"""The rules of docs/design.md that no linter knows: who may import what, and what the public names are."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # before Python 3.11
    import tomli as tomllib

import pytest
from tools import picture
from tools.imports import circles, import_graph, imports, module_name
from torch.utils._device import _device_constructors

import shoal
import shoal.errors
from tests.conftest import LONGEST

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "shoal"
CPP = ROOT / "cpp"
SOURCES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def _imports(path: Path) -> set[str]:
    """Everything that a file imports; ``from a import b`` gives ``a`` and ``a.b``: ``b`` may be a module."""
    return {name for base, each in imports(path) for name in (base, f"{base}.{each}")}


def _importers_of(module: str) -> set[str]:
    return {
        module_name(path)
        for path in SOURCES
        if any(name == module or name.startswith(module + ".") for name in _imports(path))
    }


def test_no_import_leads_in_a_circle() -> None:
    """Imports inside functions count; those under TYPE_CHECKING do not."""
    ways = circles(import_graph(types=False))
    assert not ways, "imports in a circle: " + "; ".join(" -> ".join([*way, way[0]]) for way in ways)


def test_no_folder_has_more_than_21_files() -> None:
    for folder in {path.parent for path in SOURCES}:
        count = len(list(folder.glob("*.py")))
        assert count <= 21, f"{folder} has {count} files: give its topics folders of their own"


def test_sibling_folders_do_not_import_each_other_in_circles() -> None:
    graph = import_graph(types=False)
    found = {}
    for folder in {name.rpartition(".")[0] for name in graph}:
        depth = folder.count(".") + 2
        children: dict[str, set[str]] = {}
        for name, targets in graph.items():
            if name.startswith(folder + "."):
                child = ".".join(name.split(".")[:depth])
                inside = {
                    ".".join(each.split(".")[:depth]) for each in targets if each.startswith(folder + ".")
                }
                children.setdefault(child, set()).update(inside - {child})
        if ways := circles(children):
            found[folder] = ways
    assert not found, f"imports in a circle: {found}"


def _includes() -> dict[str, set[str]]:
    """Each file of the core and what it includes, of the core (``engine/group.h``) and others (``<new>``)."""
    files = {
        str(path.relative_to(CPP)).removeprefix("include/"): path
        for path in CPP.rglob("*")
        if path.suffix in (".cc", ".h")
    }
    pattern = re.compile(r'^#include (?:"([^"]+)"|(<[^>]+>))', re.MULTILINE)
    graph = {name: {a or b for a, b in pattern.findall(path.read_text())} for name, path in files.items()}
    assert sum(map(len, graph.values())) > len(graph), "the includes were not found"
    return graph


def _allowed_includes() -> dict[str, set[str]]:
    """The folders of the core, and the folders whose files each may include: pyproject.toml."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["shoal"]["includes"]
    return {folder: set(named) for folder, named in contract.items()}


def test_a_folder_of_the_core_includes_only_what_it_may() -> None:
    allowed = _allowed_includes()
    assert allowed.keys() == {name.split("/")[0] for name in _includes()}, "a row for each folder"
    breaches = [
        f"{name} includes {other}"
        for name, others in _includes().items()
        for folder in [name.split("/")[0]]
        for other in sorted(others)
        if (
            re.match("<(Python|structmember|nanobind)", other) and folder != "python"
            if other.startswith("<")
            else other.split("/")[0] not in allowed[folder] | {folder}
        )
    ]
    assert not breaches, "pyproject.toml says which folder may include what: " + "; ".join(breaches)


def test_only_the_headers_for_torch_include_torch() -> None:
    found = [
        name
        for name, others in _includes().items()
        if any(re.match("<(torch|ATen|c10)/", other) for other in others)
    ]
    assert found
    assert all(name.startswith("shoal/torch/") for name in found)


def test_no_include_leads_in_a_circle() -> None:
    ways = circles(_includes())
    assert not ways, "includes in a circle: " + "; ".join(" -> ".join([*way, way[0]]) for way in ways)


def test_the_picture_shows_the_imports_as_they_are() -> None:
    assert picture.PICTURE.read_text() == picture.draw(), "draw it anew: python -m tools.picture"


def test_the_page_on_architecture_names_files_that_are_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`([\w/]+(?:\.py|\.cc|/))`", page)
    there = [
        f"/{path.relative_to(ROOT)}{'/' if path.is_dir() else ''}"
        for folder in ("src", "cpp", "tests")
        for path in [ROOT / folder, *(ROOT / folder).rglob("*")]
    ]
    assert len(named) > 20
    assert not [name for name in named if not any(path.endswith(f"/{name}") for path in there)]


def test_a_picture_leaves_out_arrows_that_others_imply() -> None:
    graph = {"a": {"b", "c", "d"}, "b": {"c"}, "c": {"d"}, "d": set()}
    assert picture.without_implied(graph) == {"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": set()}
    with pytest.raises(ValueError, match="c -> d -> c"):
        picture.without_implied({**graph, "d": {"c"}})


def test_a_circle_is_found_and_named(tmp_path: Path) -> None:
    package = tmp_path / "parts"
    package.mkdir()
    (package / "__init__.py").write_text("from .a import x\n")
    (package / "a.py").write_text("def later():\n    from . import b\n")
    (package / "b.py").write_text("from .c import y\n")
    (package / "c.py").write_text("from .a import x\nif TYPE_CHECKING:\n    from .d import z\n")
    (package / "d.py").write_text("import parts.a\n")
    assert circles(import_graph(package, types=False)) == [["parts.a", "parts.b", "parts.c"]]


def test_few_modules_import_the_core() -> None:
    importers = {
        "backend.kernels", "backend.mpi.channel", "backend.mpi.library", "backend.native.channel",
        "backend.native.errors",
        "controller.commands.interrupts", "controller.tensor.autograd", "future.state", "parallel.core",
        "rank_status", "recorder", "statistics",
        "rpc.connection.endpoint", "rank_sampler",
        "backend.supervised",  # types only
    }  # fmt: skip
    assert _importers_of("shoal._core") <= {f"shoal.{each}" for each in importers}


def test_no_module_takes_public_names_from_the_package_itself() -> None:
    """Each is imported from where it is defined, or the layers could be walked around."""
    public = {f"shoal.{name}" for name in shoal.__all__} - {"shoal.__version__"}
    offenders = {module_name(path) for path in SOURCES if public & _imports(path)}
    assert offenders == set()


def test_only_its_backend_features_and_the_benchmark_of_gloo_go_through_torch_distributed() -> None:
    importers = _importers_of("torch.distributed") | _importers_of("torch._C._distributed_c10d")
    others = {name for name in importers if not name.startswith("shoal.compat.")}
    assert others == {"shoal.tools.bench.ranks.gloo", "shoal.common.torch_features"}


@pytest.mark.parametrize(
    "module",
    [
        "shoal",
        "shoal.config",
        "shoal.net",
        "shoal.store",
        "shoal.rendezvous",
        "shoal.launch.commands.run",
        "shoal.launch.commands.store",
        "shoal.tools.bench.command",
        "shoal.tools.traces.command",
    ],
)
def test_torch_is_not_loaded_by(module: str) -> None:
    """`shoal run` and `shoal store` start at once because nothing they need pays for `import torch`."""
    program = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr or f"import {module} loads torch"


def test_every_public_name_exists_and_is_exported_once() -> None:
    names = shoal.__all__
    assert len(names) == len(set(names))
    missing = [name for name in names if not hasattr(shoal, name)]
    assert not missing
    assert set(names) <= set(dir(shoal))


def test_every_exception_is_public_and_documented() -> None:
    for name, value in vars(shoal.errors).items():
        if isinstance(value, type) and issubclass(value, Exception) and name[0] != "_":
            assert value.__doc__, f"{name} has no docstring"
            assert name in shoal.__all__, f"{name} is not public"


def test_files_fit_in_a_readers_head() -> None:
    folders = ("src", "cpp", "tests", "examples")
    files = [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".cc", ".h")
    ]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    too_long = {name: length for name, length in lengths.items() if length > 800}
    assert not too_long, f"one idea a file, 800 lines at most: {too_long}"


def test_every_tensor_that_is_made_names_its_device() -> None:
    """Otherwise the default device of the program decides, which may be "meta" or a GPU."""
    factories = {factory.__name__ for factory in _device_constructors()}
    silent = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            ours = node.func.attr in factories and ast.unparse(node.func.value).split(".")[0] == "torch"
            if ours and not any(keyword.arg == "device" for keyword in node.keywords):
                silent.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert not silent, "without device=:\n" + "\n".join(silent)


def test_messages_are_decoded_in_one_module() -> None:
    """``shoal.common.decoding`` says why."""
    direct = re.compile(r"msgspec\.(convert|(json|msgpack)\.decode)\b|\bDecoder\b|\bDecodeError\b")
    files = set((ROOT / "src").rglob("*.py")) - {ROOT / "src/shoal/common/decoding.py"}
    assert not [str(path) for path in files if direct.search(path.read_text())]


def test_the_files_of_tests_with_which_runs_begin_are_there() -> None:
    assert not [name for name in LONGEST if not (ROOT / "tests" / name).exists()]


def test_the_core_uses_no_streams_of_the_cpp_library() -> None:
    # They look for facets of a locale, and end the process where libstdc++ is linked into the module while
    # another package brings a second one (seen with the compiler of a GPU image, and torch).
    sources = [path for path in (ROOT / "cpp").rglob("*.[ch]*") if "tests" not in path.relative_to(CPP).parts]
    assert len(sources) > 50
    found = [
        path.name
        for path in sources
        if re.search(r"#include <[a-z]*stream>|std::\w*stream\b", path.read_text())
    ]
    assert found == []


#: In training, the calls of ``wait()`` that block the host: (file of shoal.parallel, object) -> the reason.
HOST_WAITS = {
    ("consistency.py", "group.all_gather(digest)"): "bytes on the host",
    ("consistency.py", "group.all_gather(torch.tensor([len(own)], device='cpu'))"): "a number on the host",
    (
        "consistency.py",
        "group.all_gather(parts, text)",
    ): "bytes on the host",
    ("reducer/outcome.py", "self._future"): "flags on the host",
    ("reducer/outcome.py", "group.all_gather(own)"): "flags on the host",
    ("reducer/reducer.py", "self._outcome"): "flags on the host",
    ("reducer/reducer.py", "sparse"): "a SparseReduction, which waits without blocking",
    ("reducer/reducer.py", "reach"): "flags on the host",
    ("reducer/reducer.py", "self._group.broadcast(shown, root=self._participants.first)"): "on the host",
    ("reducer/sparse_gradients.py", "self._counts"): "numbers on the host",
    ("hooks/contract.py", "future"): "a future of torch, which does not block either",
    ("ddp/uneven.py", "numbers"): "numbers on the host",
    ("ddp/uneven.py", "_from_all(self._group, is_last_joiner)"): "numbers on the host",
    ("join.py", "answer"): "numbers on the host",
    (
        "join.py",
        "_count_active(self._group, self._device, _Part.SHADOWS, named=self._throw)",
    ): "no batch left",
    ("join.py", "_count_active(self._group, self._device, _Part.REFUSES, named=self._throw)"): "an error",
    (
        "zero/checkpoint.py",
        "group.gather_object(None if group.rank == to else header, root=to)",
    ): "a checkpoint",
    ("zero/checkpoint.py", "message"): "a checkpoint",
    ("zero/checkpoint.py", "arrival"): "a checkpoint, or a change of the group",
    ("zero/ownership.py", "group.recv_object(sender, tag=STATE_TAG)"): "a change of the group",
    ("zero/ownership.py", "message"): "a change of the group",
    ("zero/ownership.py", "group.all_gather_object(mine)"): "a change of the group",
    ("zero/ownership.py", "group.barrier()"): "a change of the group",
}


def test_training_never_blocks_the_host_until_a_device_has_gradients_or_buffers() -> None:
    """``wait(blocking=False)`` instead; on the CPU it is the same."""
    found = {
        (path.relative_to(PACKAGE / "parallel").as_posix(), ast.unparse(node.func.value))
        for path in sorted((PACKAGE / "parallel").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "wait"
        and not any(keyword.arg == "blocking" for keyword in node.keywords)
    }
    assert found == HOST_WAITS.keys(), "use wait(blocking=False), or name the reason in HOST_WAITS"
