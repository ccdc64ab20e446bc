"""Modules that move to nodes: their parameters stay the same objects, as optimisers and tied weights need it.

Torch can swap what a parameter is (``torch.__future__.set_swap_module_params_on_conversion``), and would then
also swap when a module loads its state, which fails for parameters that something has a weak reference to,
as recurrent layers have, and leaves views of a parameter with the old elements.  State is copied instead, as
torch does by default.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

_thread = threading.local()


class Swapping:
    """Lets modules swap their parameters where they move, until it is closed."""

    def __init__(self) -> None:
        self._swaps = torch.__future__.get_swap_module_params_on_conversion
        self._load = load = torch.nn.Module._load_from_state_dict

        def load_by_copying(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            before = getattr(_thread, "loads", False)
            _thread.loads = True
            try:
                load(module, *args, **kwargs)
            finally:
                _thread.loads = before

        def swaps() -> bool:
            return self._swaps() if getattr(_thread, "loads", False) else True

        torch.__future__.get_swap_module_params_on_conversion = swaps
        torch.nn.Module._load_from_state_dict = load_by_copying  # type: ignore[method-assign, assignment]

    def close(self) -> None:
        """Let modules move and load as they did."""
        torch.__future__.get_swap_module_params_on_conversion = self._swaps
        torch.nn.Module._load_from_state_dict = self._load  # type: ignore[method-assign]
