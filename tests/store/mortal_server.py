"""A durable server that is killed again and again, at a step that it chose, and started again at once.

    python -m tests.store.mortal_server LOG PORT SEED FAULT

It goes on until its standard input ends.  The step of each death is a line of its standard output.  Once a
server has failed, the others are on another, empty log, which ends the clients; its error is the end of this
program's.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.store import DurableStoreServer
from shoal.store.tcp import durable_server as durable
from shoal.store.tcp import journal
from shoal.store.tcp.replies import StoredReplies

SECRET = b"secret"
#: a server lives up to 0.2 s, and twice as long as the one before if that has served nobody; up to 13 s
MAX_PATIENCE = 64
#: the steps of a round and of a snapshot, as the calls of the system that they are made of
STEPS = (
    "before pwrite",
    "within pwrite",
    "before fdatasync",
    "after fdatasync",
    "before rename",
    "after rename",
    "after fsync",
    "any time",
)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying(step: str, chance: random.Random, patience: int) -> None:
    """Let this process die at a step, some calls from now, or some moments later."""
    when, _, name = step.partition(" ")
    threading.Timer(chance.uniform(0.0, 0.2) * patience, die).start()
    if name == "time":
        return
    call: Callable[..., Any] = getattr(os, name)
    left = chance.randint(1, 3 if name in ("rename", "fsync") else 25)

    def called(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            if when == "within":
                descriptor, data, at = arguments
                call(descriptor, data[: chance.randrange(len(data))], at)
            elif when == "after":
                call(*arguments)
            die()
        return call(*arguments)

    setattr(os, name, called)


def forget_replies() -> None:
    """Keep no reply beyond this process."""
    durable.StoredReplies = lambda *_: StoredReplies()  # type: ignore[assignment,misc]


def write_late() -> None:
    """Acknowledge each round before it is written, together with the one after."""
    append, rewrite = journal.Journal.append, journal.Journal.rewrite
    late: list[bytes] = []

    def appended(self: journal.Journal, messages: list[bytes]) -> None:
        if late:
            append(self, [*late])
        late[:] = messages

    def rewritten(self: journal.Journal, snapshot: journal.Snapshot) -> None:
        late.clear()  # the snapshot has them
        rewrite(self, snapshot)

    journal.Journal.append = appended  # type: ignore[method-assign]
    journal.Journal.rewrite = rewritten  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {"forget": forget_replies, "late": write_late, "none": lambda: None}


def note_service(served: int) -> None:
    """Write a byte to ``served`` before each round of the journal."""
    append = journal.Journal.append

    def appended(self: journal.Journal, messages: list[bytes]) -> None:
        with suppress(BlockingIOError):
            os.write(served, b".")
        append(self, messages)

    journal.Journal.append = appended  # type: ignore[method-assign]


def live(
    log: Path, port: int, step: str, fault: str, chance: random.Random, patience: int, served: int
) -> None:
    journal.SNAPSHOT_BYTES, journal._SNAPSHOT_TIMES = 1_000, 0
    FAULTS[fault]()
    note_service(served)
    with DurableStoreServer(log, "127.0.0.1", port, SECRET):
        dying(step, chance, patience)
        threading.Event().wait()


def main() -> None:
    log, port, seed, fault = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    chance = random.Random(seed)
    failed = False
    service, served = os.pipe()
    os.set_blocking(service, False)
    os.set_blocking(served, False)
    patience = 1
    while True:
        step = chance.choice(STEPS)
        own = random.Random(chance.random())
        pid = os.fork()
        if not pid:
            try:
                live(log, port, step, fault, own, patience, served)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if select.select([0], [], [], 0.002)[0]:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                sys.exit(failed)
        if os.waitstatus_to_exitcode(ended[1]) != -signal.SIGKILL:
            print("the server did not die, it failed", file=sys.stderr, flush=True)
            failed, log = True, log.with_name("empty")
        # On a loaded machine clients need longer to connect than a server lives.
        try:
            patience = 1 if os.read(service, 1 << 16) else patience
        except BlockingIOError:
            patience = min(2 * patience, MAX_PATIENCE)
        print(step, flush=True)
        time.sleep(own.choice([0.0, 0.02]))


if __name__ == "__main__":
    main()
