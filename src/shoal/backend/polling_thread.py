"""The thread of a supervised backend that advances transfers for which no other thread waits."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .supervised import SupervisedChannel

#: passes without a transfer after which it pauses for longer, and these seconds
_IDLE_PASSES, _IDLE_PAUSE_S = 50, 0.05


class PollingThread:
    """A thread that polls the channels in which no thread waits; started on first use.

    Args:
        pauses: the first and the longest pause between two polls, in seconds.
    """

    def __init__(self, name: str, pauses: tuple[float, float]) -> None:
        self._name = name
        self._min_pause, self._max_pause = pauses
        self._lock = threading.Lock()
        self._channels: list[SupervisedChannel] = []
        self._changed = threading.Event()
        self._ended = False
        self._thread: threading.Thread | None = None

    def add(self, channel: SupervisedChannel) -> None:
        """Poll ``channel`` until it has no transfers and is not watched; then set ``polled`` to False."""
        with self._lock:
            if channel not in self._channels:
                self._channels.append(channel)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
        self._changed.set()

    def discard(self, channel: SupervisedChannel) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._channels.remove(channel)

    def end(self, timeout: float) -> bool:
        """End the thread; return whether it has ended within ``timeout`` seconds."""
        self._ended = True
        self._changed.set()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout)
        return not thread.is_alive()

    def _run(self) -> None:
        idle_passes, pause = 0, self._min_pause
        prepared: set[torch.device] = set()
        while not self._ended:
            with self._lock:
                channels = list(self._channels)
            for channel in channels:
                channel.prepare_thread(prepared)
            advanced = [channel.poll() for channel in channels if not channel.waiting]
            pending = any(channel.pending for channel in channels)
            idle_passes = 0 if pending else idle_passes + 1
            pause = self._min_pause if any(advanced) else min(2 * pause, self._max_pause)
            del channels, advanced
            if idle_passes >= _IDLE_PASSES:
                self._drop_idle()
                if self._changed.wait(_IDLE_PAUSE_S):
                    idle_passes = 0
            else:
                time.sleep(pause)

    def _drop_idle(self) -> None:
        self._changed.clear()
        with self._lock:
            for channel in list(self._channels):
                channel.polled = False
                if channel.pending:  # it has just started an operation
                    channel.polled = True
                elif not channel.watched:
                    self._channels.remove(channel)
            if any(channel.pending for channel in self._channels) or self._ended:
                self._changed.set()
