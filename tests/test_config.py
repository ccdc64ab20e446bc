"""The table of environment variables."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shoal import config
from shoal.errors import ConfigurationError

ROOT = Path(__file__).resolve().parent.parent


def test_a_variable_that_is_not_set_or_empty_has_its_default() -> None:
    assert config.RANK.get({}) is None
    assert config.RANK.get({"SHOAL_RANK": " "}) is None
    assert config.TIMEOUT.get({}) == 300.0


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        (config.RANK, "0", 0),
        (config.SIZE, " 8 ", 8),
        (config.TIMEOUT, "0.5", 0.5),
        (config.TRANSPORT, "SHM", "shm"),
        (config.SHARED_MEMORY_LIMIT, "64M", 64 * 2**20),
        (config.SHARED_MEMORY_LIMIT, "1073741824", 2**30),
        (config.STORE, "tcp://127.0.0.1:1", "tcp://127.0.0.1:1"),
    ],
)
def test_a_legal_value_is_read(variable: config.Variable[object], text: str, value: object) -> None:
    assert variable.get({variable.name: text}) == value


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        (config.RANK, "-1"),
        (config.RANK, "one"),
        (config.RECORDER_SIZE, "99999999999999999999"),
        (config.SIZE, "0"),
        (config.TIMEOUT, "0"),
        (config.TIMEOUT, "nan"),
        (config.TIMEOUT, "inf"),
        (config.TRANSPORT, "carrier-pigeon"),
        (config.SHARED_MEMORY_LIMIT, "M"),
        (config.SHARED_MEMORY_LIMIT, "-5"),
    ],
)
def test_an_illegal_value_is_an_error_that_names_the_variable(
    variable: config.Variable[object], text: str
) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{variable.name}='{text}': expected {variable.expected}"):
        variable.get({variable.name: text})


def test_the_secret_comes_from_the_variable_or_the_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("from the file\n")
    assert config.secret({}) == b""
    assert config.secret({"SHOAL_SECRET_FILE": str(path)}) == b"from the file"
    assert config.secret({"SHOAL_SECRET_FILE": str(path), "SHOAL_SECRET": "direct"}) == b"direct"


def test_a_secret_that_is_not_utf8_is_the_same_from_each_source(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"not \xff utf-8")
    text = b"not \xff utf-8".decode("utf-8", "surrogateescape")  # as in os.environ
    assert config.secret({"SHOAL_SECRET": text}) == config.secret({"SHOAL_SECRET_FILE": str(path)})
    assert config.encoded_secret(text) == path.read_bytes()


def test_a_secret_file_that_is_missing_or_empty_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"SHOAL_SECRET_FILE=.*No such file"):
        config.secret({"SHOAL_SECRET_FILE": str(tmp_path / "absent")})
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigurationError, match=r"SHOAL_SECRET_FILE=.*empty"):
        config.secret({"SHOAL_SECRET_FILE": str(tmp_path / "empty")})


def test_a_secret_file_that_never_ends_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in ("/dev/null", str(tmp_path / "fifo")):
        with pytest.raises(ConfigurationError, match=rf"SHOAL_SECRET_FILE='{path}' cannot .* not a regular"):
            config.secret({"SHOAL_SECRET_FILE": path})
    (tmp_path / "long").write_bytes(bytes(2**20 + 1))
    with pytest.raises(ConfigurationError, match="File too large"):
        config.secret({"SHOAL_SECRET_FILE": str(tmp_path / "long")})


def test_the_page_on_the_environment_holds_the_table() -> None:
    assert config.markdown_table() in (ROOT / "docs" / "environment.md").read_text()


def test_every_variable_that_sources_and_pages_mention_is_in_the_table() -> None:
    known = {variable.name for variable in config.VARIABLES}
    mentioned = set()
    for path in (*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")):
        mentioned |= set(re.findall(r"\bSHOAL_[A-Z][A-Z_]+[A-Z]\b", path.read_text()))
    assert mentioned == known


def test_configuration_wire_and_stores_do_not_import_torch() -> None:
    code = "import sys, shoal.config, shoal.net, shoal.store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
