"""``shoal config``: where the files for C++ programs are."""

from __future__ import annotations

from pathlib import Path

import click

from ...errors import LaunchError

_ROOT = Path(__file__).resolve().parents[2]
#: option -> (path in the package, help)
_PATHS = {
    "--cmake-dir": ("cmake", "Print the directory of shoal-config.cmake: cmake -Dshoal_DIR=..."),
    "--include-dir": ("include", "Print the directory of the headers: g++ -I..."),
    "--library": ("lib/libshoal.a", "Print the path of the static library."),
}


@click.command(short_help="Print where the files for C++ programs are.")
@click.option("--cmake-dir", "chosen", flag_value="--cmake-dir", help=_PATHS["--cmake-dir"][1])
@click.option("--include-dir", "chosen", flag_value="--include-dir", help=_PATHS["--include-dir"][1])
@click.option("--library", "chosen", flag_value="--library", help=_PATHS["--library"][1])
def config(chosen: str | None) -> int:
    """Print where the files for C++ programs are: one of them, or all.

    With CMake: cmake -Dshoal_DIR=$(shoal config --cmake-dir) ...
    """
    if not (_ROOT / "cmake").is_dir():
        raise LaunchError(f"{_ROOT} is a source tree without them; install shoal (pip install .)")
    for option in [chosen] if chosen else _PATHS:
        path = _ROOT / _PATHS[option][0]
        click.echo(path if chosen else f"{option:13} {path}")
    return 0
