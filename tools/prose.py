"""Check the words of the project: ``python -m tools.prose [PATH...]``, in ``make lint``.

It checks docstrings, comments and messages of Python and C++ files and the text of Markdown pages for
openings and phrases that must be read twice, pages for lines over 110 columns, and the subjects of the last
commits for their length. Code in backquotes and in code blocks is not prose.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CHECKED = ["src", "cpp", "tools", "benchmarks", "examples", "docs", "README.md", "CONTRIBUTING.md"]
WIDTH_COLUMNS = 110
SUBJECT_COLUMNS = 72
SUBJECTS = 50
"""The number of newest commits whose subjects are checked."""

OPENINGS = re.compile(r"(What|Who|Whose|Of|Those|So many|As many|So much|As much)\b")
PHRASES: dict[str, str] = {
    r"so many": "at most N, or the number of",
    r"in (the )?place of": "instead of",
    r"one's own": "user-defined",
    r"(let|lets|letting) go": "release",
    r"com(e|es|ing) to (its|an|their) end": "end",
    r"shall": "must, or will",
    r"(is|are|was|were|be|been|being) told": "is notified, or receives (name the message)",
    r"hears?|heard|hearing": "receive",
    r"(say|says|said|saying) so": "report (name the message)",
    r"gone|departed": "lost, failed, evicted, or left",
    r"(is|are|was|were) over": "completed",
    r"given up": "cancelled, or evicted",
    r"absent": "missing",
    r"(that|who|which) lives?": "surviving, or running",
    r"(is|are) none of": "is not one of",
    r"(is|are) looked": "check",
    r"anew": "again",
    r"thereupon|whereupon|therein|thereby|whereby|hitherto|henceforth": "a plain word",
    r"crews?|fleets?|agency|agencies|lobby|herald|drowsy|rouse[sd]?|hush\w*": "a term of the field",
}
_PHRASES = [(re.compile(rf"\b({phrase})\b", re.IGNORECASE), advice) for phrase, advice in PHRASES.items()]


class Text(NamedTuple):
    """A piece of prose: the line where it starts, the text, and whether its first word is checked."""

    line: int
    text: str
    opens: bool


def problems(path: Path) -> Iterator[str]:
    """Yield ``path:line: problem`` for each fault of style in the file at `path`."""
    source = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    if path.suffix == ".md":
        pieces = _page(source)
    elif path.suffix == ".py":
        pieces = _python(source)
    else:
        pieces = _cpp(source)
    for piece in pieces:
        if piece.opens and (found := OPENINGS.match(piece.text.lstrip())):
            yield f"{name}:{piece.line}: begins with {found.group()!r}: begin with a noun or an imperative"
        for number, text in enumerate(_without_code(piece.text).split("\n"), piece.line):
            for phrase, advice in _PHRASES:
                if found := phrase.search(text):
                    yield f"{name}:{number}: {found.group()!r}: say {advice}"
    if path.suffix == ".md":
        for number, text in _wide(source):
            yield f"{name}:{number}: {len(text)} columns; wrap prose at {WIDTH_COLUMNS}"


def subjects() -> Iterator[str]:
    """Yield a problem for each of the newest commits whose subject is too long."""
    log = subprocess.run(
        ["git", "log", "--no-merges", f"-{SUBJECTS}", "--format=%h %s"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )  # outside a clone git fails and there is nothing to check
    for line in log.stdout.splitlines():
        commit, _, subject = line.partition(" ")
        if len(subject) > SUBJECT_COLUMNS:
            yield f"commit {commit}: {len(subject)} columns; a subject has at most {SUBJECT_COLUMNS}"


def _python(source: str) -> Iterator[Text]:
    documented: set[int] = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            documented.add(id(node.value))
            if isinstance(node.value.value, str):
                yield Text(node.lineno, node.value.value, opens=True)
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) and id(node) not in documented else None
        if isinstance(text, str) and text.count(" ") > 1:
            yield Text(node.lineno, text, opens=False)
    previous = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            yield Text(line, token.string.lstrip("#! "), opens=line != previous + 1)
            previous = line


def _cpp(source: str) -> Iterator[Text]:
    previous = -1
    for number, line in enumerate(source.splitlines(), 1):
        bare = re.sub(r'"(\\.|[^"\\])*"', lambda found: " " * len(found.group()), line)
        for found in re.finditer(r'"((\\.|[^"\\])*)"', line):
            if found.group(1).count(" ") > 1:
                yield Text(number, found.group(1), opens=False)
        start = bare.find("//")
        if start >= 0:
            yield Text(number, line[start:].lstrip("/< "), opens=number != previous + 1)
            previous = number


def _page(source: str) -> Iterator[Text]:
    for number, line in _prose_lines(source):
        yield Text(number, line, opens=False)


def _prose_lines(source: str) -> Iterator[tuple[int, str]]:
    fence = ""
    for number, line in enumerate(source.splitlines(), 1):
        found = re.match(r"\s*(```+|~~~+)", line)
        if found and (not fence or line.strip() == fence):
            fence = "" if fence else found.group(1)
        elif not fence:
            yield number, line


def _wide(source: str) -> Iterator[tuple[int, str]]:
    for number, line in _prose_lines(source):
        unbreakable = line.lstrip().startswith(("|", "#", "<", "!["))
        if len(line) > WIDTH_COLUMNS and not unbreakable and " " in line.strip(" -*")[:WIDTH_COLUMNS]:
            yield number, line


def _without_code(text: str) -> str:
    """Blank out code in backquotes, and quoted words such as ``'gone'``."""
    return re.sub(r"(`+)[^`]*?\1|'\w+'", lambda found: re.sub(r"[^\n]", "_", found.group()), text)


def files(paths: list[Path]) -> Iterator[Path]:
    """Yield the files to check below `paths`."""
    for path in paths:
        if path.is_dir():
            for suffix in ("py", "md", "cc", "h"):
                found = sorted(path.rglob(f"*.{suffix}"))
                yield from (each for each in found if each != Path(__file__).resolve())
        elif path != Path(__file__).resolve():  # which has the phrases themselves
            yield path


def main(arguments: list[str]) -> int:
    """Print the problems of `arguments`, or of the whole project; return the exit code."""
    paths = [Path(argument).resolve() for argument in arguments] or [ROOT / name for name in CHECKED]
    found = [problem for path in files(paths) for problem in problems(path)]
    found += [] if arguments else subjects()
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
