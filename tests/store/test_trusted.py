"""A file store takes no file that another user made, can read, or can put in the place of another."""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.common import trusted_file as trusted
from shoal.errors import ConfigurationError, StoreError
from shoal.store import FileStore
from tests.support.other_user import NOBODY, as_nobody, needs_root


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory in which everybody may make files, like /tmp."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o1777)
    yield directory
    shutil.rmtree(directory)


def _refused(path: Path, reason: str, remedy: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{re.escape(str(path))}: .*{reason}.*; .*{remedy}"):
        FileStore(path)


@pytest.mark.parametrize("umask", [0, 0o022, 0o177])
def test_the_file_is_its_users_alone_whatever_the_umask(path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with FileStore(path) as store:
            store.set("key", b"value")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_of_ones_own_is_taken_though_it_was_made_elsewhere(path: Path) -> None:
    path.touch(0o600)
    with FileStore(path) as store:
        store.set("key", b"value")
        assert store.get("key") == b"value"


@needs_root
def test_a_file_of_another_user_is_refused_and_stays_empty(public: Path) -> None:
    path = public / "store"

    def prepare() -> None:
        os.close(os.open(path, os.O_CREAT, 0o666))
        path.chmod(0o666)

    assert as_nobody(prepare) is None
    _refused(path, rf"belongs to user .*{NOBODY}.* runs as user .*{os.geteuid()}", "directory of your own")
    assert path.stat().st_size == 0


@needs_root
def test_a_file_that_another_user_keeps_to_itself_is_refused_with_the_same_reason(public: Path) -> None:
    path = public / "store"
    FileStore(path).close()
    error = as_nobody(lambda: FileStore(path))
    assert isinstance(error, ConfigurationError)
    assert re.search(rf"belongs to user .*{os.geteuid()}.* runs as user .*{NOBODY}", str(error))


@needs_root
def test_a_file_that_another_user_puts_in_the_place_of_ours_is_refused(public: Path) -> None:
    public.chmod(0o777)  # without the sticky bit everybody may remove it
    path = public / "store"

    def exchange() -> None:
        path.unlink()
        path.touch(0o600)

    with FileStore(path) as store:
        assert as_nobody(exchange) is None
        _refused(path, rf"belongs to user .*{NOBODY}", "directory of your own")
        store.set("secret", b"of the ranks that came before")
    assert path.stat().st_size == 0


@pytest.mark.parametrize("mode", [0o666, 0o644, 0o640, 0o602, 0o610])
def test_a_file_that_others_may_use_is_refused(path: Path, mode: int) -> None:
    path.touch()
    path.chmod(mode)
    _refused(path, f"mode is {mode:o}", "created with mode 600")
    assert path.stat().st_size == 0


@pytest.mark.parametrize("there", [True, False])
def test_a_symbolic_link_is_refused_and_what_it_leads_to_is_left_alone(
    path: Path, tmp_path: Path, there: bool
) -> None:
    target = tmp_path / "target"
    if there:
        FileStore(target).close()
    path.symlink_to(target)
    _refused(path, "symbolic link", "path of its target")
    assert target.exists() == there
    assert not there or target.stat().st_size == 0


def test_a_second_name_of_a_file_is_refused(path: Path, tmp_path: Path) -> None:
    FileStore(tmp_path / "first").close()
    path.hardlink_to(tmp_path / "first")
    _refused(path, "2 hard links", "file, or of one with a single name")


def test_what_is_no_file_is_refused_without_waiting_for_it(path: Path) -> None:
    os.mkfifo(path, 0o600)
    _refused(path, "a FIFO", "path of a file")  # opening it would wait for a writer
    path.unlink()
    path.mkdir(0o700)
    _refused(path, "a directory", "path of a file")
    path.rmdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        _refused(path, "a socket", "path of a file")
    path.unlink()
    _refused(Path("/dev/null"), "a device", "path of a file")


def test_the_file_that_was_looked_at_is_the_one_that_is_opened(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.touch(0o600)
    check = trusted.refuse_untrusted

    def exchange(descriptor: int, name: Path) -> None:
        check(descriptor, name)
        path.unlink()
        path.write_text("somebody else's")

    monkeypatch.setattr(trusted, "refuse_untrusted", exchange)
    with FileStore(path) as store:
        store.set("key", b"value")
    assert path.read_text() == "somebody else's"


def test_a_clone_is_of_the_same_file_though_its_path_leads_elsewhere(path: Path) -> None:
    with FileStore(path) as store:
        path.unlink()
        path.symlink_to("/dev/null")
        with store.clone() as clone, clone.clone() as another:
            store.set("key", b"value")
            assert another.get("key") == b"value"


@pytest.mark.concurrency
def test_many_that_make_and_remove_the_file_at_once_all_get_one(path: Path) -> None:
    failures: list[BaseException] = []
    done = threading.Event()

    def remove() -> None:
        while not done.is_set():
            path.unlink(missing_ok=True)

    def make() -> None:
        try:
            for _ in range(300):
                trusted.open_trusted(path).close()
        except StoreError as error:
            failures.append(error)

    makers = [threading.Thread(target=make) for _ in range(4)]
    remover = threading.Thread(target=remove)
    for thread in (*makers, remover):
        thread.start()
    for thread in makers:
        thread.join()
    done.set()
    remover.join()
    assert not failures
