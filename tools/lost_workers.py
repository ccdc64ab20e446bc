"""A pytest plugin: a worker of pytest-xdist that dies while it runs a test fails that test, and no other.

In pytest-xdist 3.8, ``--dist loadfile`` also returns the finished files of a dead worker to the queue. A
worker that is given nothing else then waits forever for tests, and so does the run.
"""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler.loadfile import LoadFileScheduling
from xdist.workermanage import WorkerController


class _Scheduling(LoadFileScheduling):
    """Gives workers only files with tests left; a test that ended its worker is not run again."""

    def remove_node(self, node: WorkerController) -> str | None:
        files = self.assigned_work.pop(node)
        pending = [(tests, test) for tests in files.values() for test, done in tests.items() if not done]
        if not pending:
            return None
        tests, running = pending[0]
        tests[running] = True
        self.workqueue.update({file: tests for file, tests in files.items() if not all(tests.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return running

    def _reschedule(self, node: WorkerController) -> None:
        # A worker starts a test once it knows the next one, or that there is none.
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) <= 2:
            super()._reschedule(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _Scheduling | None:
    return _Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None
