"""The pages tell the truth: links lead somewhere, the first example runs, the error tree is the real one."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tools import reference

import shoal
import shoal.errors
from shoal.errors import ShoalError
from tests.support.networks import unavailable
from tests.support.programs import run_program
from tests.support.quick_launcher import QuickLauncher

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
ERRORS = ROOT / "docs" / "errors.md"


def test_every_link_leads_to_a_file() -> None:
    dead = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", _without_cpp(page.read_text()))
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not dead


def _without_cpp(text: str) -> str:
    """``text`` without blocks of C++, whose lambdas look like links."""
    return re.sub(r"^```cpp\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def test_every_test_that_a_page_names_is_there() -> None:
    named = {
        (page.name, path)
        for page in PAGES
        for path in re.findall(r"`(tests/[\w/]+(?:\.py)?)", page.read_text())
    }
    assert ("security.md", "tests/rendezvous/test_secret.py") in named
    assert not [(page, path) for page, path in named if not (ROOT / path).exists()]


def test_the_design_page_says_what_each_module_of_the_master_worker_mode_is() -> None:
    section = (
        (ROOT / "docs" / "design.md")
        .read_text()
        .partition("## The master-worker mode")[2]
        .partition("\n## ")[0]
    )
    modules = {each.stem for each in (ROOT / "src" / "shoal" / "controller").rglob("*.py")} - {"__init__"}
    assert not {each for each in modules if f"`{each}`" not in section}


def test_every_source_that_the_architecture_names_is_there() -> None:
    folders = "src", "cpp", "tests"
    sources = [f"/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.*")]
    page = (ROOT / "docs" / "architecture.md").read_text() + (ROOT / "docs" / "controller.svg").read_text()
    named = set(re.findall(r"[\w/]+\.(?:py|cc|h)\b", page))
    assert {"space.py", "group/operations.py", "lanes.cc", "rpc/executor.py"} <= named
    assert not {name for name in named if not any(source.endswith(f"/{name}") for source in sources)}


def _programs(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.mark.parametrize("page", ["PYPI.md", "docs/installation.md"])
def test_the_first_example_is_the_same_everywhere(page: str) -> None:
    assert _programs(page)[:1] == _programs("README.md")[:1]


def test_the_description_for_the_package_index_links_to_no_file() -> None:
    """It is read far from the checkout."""
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "PYPI.md").read_text())
    assert not [link for link in links if not link.startswith("https://")]


def test_the_site_leads_to_every_page() -> None:
    """By its navigation, and docs/index.md for those who read in a checkout."""
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"^ *- [^:\n]+: ([\w-]+\.md)$", navigation, re.MULTILINE)
    assert len(listed) == len(set(listed))
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert set(listed) == pages | {"readme.md", "changelog.md", "contributing.md"}
    assert re.findall(r"^ *- [^:\n]+: (api/[\w-]+\.md)$", navigation, re.MULTILINE) == list(reference.pages())
    index = (ROOT / "docs" / "index.md").read_text()
    assert not {page for page in pages - {"index.md"} if f"]({page})" not in index}


def test_the_index_and_the_navigation_list_every_decision() -> None:
    pages = sorted(page.name for page in (ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    assert [int(page.partition("-")[0]) for page in pages] == list(range(1, len(pages) + 1))
    index = (ROOT / "docs" / "decisions" / "index.md").read_text()
    by_topic = re.findall(r"\]\((\d[\w-]+\.md)\)", index)
    assert sorted(by_topic) == pages
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert re.findall(r": decisions/(.+\.md)$", navigation, re.MULTILINE) == ["index.md", *by_topic]


def test_the_first_example_runs_alone(tmp_path: Path) -> None:
    program, *_ = _programs("README.md")
    # The folder is another one, so a relative PYTHONPATH would no longer lead to what is tested.
    environment = {**os.environ, "PYTHONPATH": str(Path(shoal.__file__).parent.parent)}
    command = [sys.executable, "-c", program]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert (result.returncode, result.stdout) == (0, "rank 0 of 1: [1.0, 1.0, 1.0, 1.0]\n"), result.stderr


def test_the_first_example_runs_on_two_ranks_as_the_page_says(
    launcher: QuickLauncher, tmp_path: Path
) -> None:
    script = tmp_path / "program.py"
    script.write_text(_programs("README.md")[0])
    code, out, err = launcher.run(2, str(script))
    assert code == 0, out + err
    assert sorted(out.splitlines()) == [f"[{rank}] rank {rank} of 2: [3.0, 3.0, 3.0, 3.0]" for rank in (0, 1)]


def _printed(page: str) -> list[tuple[str, list[list[str]]]]:
    """The programs below which a page has their output on two ranks, and the lines of each rank."""
    blocks = re.findall(r"```python\n([^`]*)```\n\n```\n(\[0\] [^`]*)```", (ROOT / page).read_text())
    return [
        (program, [re.findall(rf"^\[{rank}\] (.*)$", output, re.MULTILINE) for rank in (0, 1)])
        for program, output in blocks
    ]


PRINTED = [each for page in ("tutorial", "join", "timeouts") for each in _printed(f"docs/{page}.md")]


@pytest.mark.parametrize(
    "program",
    [
        *_programs("README.md")[1:],
        *(
            program
            for page in (
                "tutorial",
                "data-parallel",
                "distributed",
                "comm-hooks",
                "elastic",
                "join",
                "zero",
                "when-it-hangs",
                "operations",
                "errors",
                "timeouts",
                "rpc",
                "controller",
                "compatibility",
                "futures",
                "observability",
                "profiler",
                "recorder",
                "rendezvous",
                "stores",
                "tracing",
            )
            for program in _programs(f"docs/{page}.md")
            if program not in dict(PRINTED)  # the next test runs these
        ),
    ],
    ids=itertools.count(1),
)
def test_every_program_on_the_pages_runs(program: str, tmp_path: Path) -> None:
    """On two ranks, or as the one master.  Pages have fragments in blocks without a language."""
    script = tmp_path / "program.py"
    script.write_text(program.replace("/tmp/", f"{tmp_path}/"))
    is_master = "init_master_worker" in program
    run_program(script, 1 if is_master else 2, folder=tmp_path, is_master=is_master)


@pytest.mark.parametrize(
    ("program", "lines"),
    PRINTED,
    ids=itertools.count(1),
)
def test_a_program_prints_what_the_page_has_below_it(
    program: str, lines: list[list[str]], tmp_path: Path
) -> None:
    script = tmp_path / "program.py"
    script.write_text(program)
    written = run_program(script, 2, folder=tmp_path)
    assert [each.splitlines() for each in written] == lines


def test_the_tests_on_the_page_about_tests_pass(tmp_path: Path) -> None:
    *programs, counts = _programs("docs/testing.md")
    for number, program in enumerate([*programs, programs[0] + counts]):
        (tmp_path / f"test_{number}.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(Path(shoal.__file__).parent.parent)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    passed = 7 if unavailable() else 8
    assert f"{passed} passed" in result.stdout, result.stdout + result.stderr


def _tree(error: type[Exception], indent: str = "") -> list[str]:
    """The subclasses of ``error`` in the order of errors.py, drawn as ``tree`` draws folders."""
    children = [child for child in error.__subclasses__() if child.__module__ == shoal.errors.__name__]
    lines = []
    for child in children:
        last = child is children[-1]
        lines.append(f"{indent}{'└── ' if last else '├── '}{child.__name__}")
        lines += _tree(child, indent + ("    " if last else "│   "))
    return lines


def test_the_page_on_errors_draws_the_tree_as_it_is() -> None:
    drawing = "\n".join(["ShoalError", *_tree(ShoalError)])
    assert f"```\n{drawing}\n```" in ERRORS.read_text(), f"docs/errors.md should have:\n{drawing}"


def test_the_page_on_errors_explains_every_exception() -> None:
    page = ERRORS.read_text()
    names = [
        name
        for name, value in vars(shoal.errors).items()
        if isinstance(value, type) and issubclass(value, Exception) and name[0] != "_"
    ]
    missing = [name for name in names if not re.search(rf"^\| `{name}` \|", page, re.MULTILINE)]
    assert not missing
