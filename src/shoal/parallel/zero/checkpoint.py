"""Gathering the distributed state on one rank, and dividing it again.

The gathered state has the form that the inner optimiser gives without distribution, so it can be loaded on
any number of ranks, and by the inner optimiser alone.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch

from ...errors import UsageError
from ...group import ProcessGroup
from ...spec import DTYPE_CODES

#: The keys of a parameter group with one value for each parameter.
PER_PARAMETER = ("params", "param_names")

#: The tag of messages with state, which separates them from the program's messages.
STATE_TAG = 0x2E5A45B0


def gather_state(group: ProcessGroup, own: dict[Any, Any], to: int) -> dict[Any, Any] | None:
    """Return the state of all ranks on rank ``to``, in CPU memory; None on other ranks.  Collective.

    Args:
        own: this rank's part, by parameter number; for other keys the last rank's values are used.
    """
    header, tensors = pack_state(own)
    tensors = [tensor.cpu() for tensor in tensors]
    headers = group.gather_object(None if group.rank == to else header, root=to).wait()
    if headers is None:
        for message in [group.send(tensor, to, tag=STATE_TAG) for tensor in tensors]:
            message.wait()
        return None
    state: dict[Any, Any] = {}
    for rank, there in enumerate(headers):
        state.update(
            _unpack_state(header, tensors) if rank == to else receive_state(group, there, rank, "cpu")
        )
    return state


def packed(state: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a state dictionary in the form of the inner optimiser, by ascending parameter numbers."""
    keys = sorted(key for key in state if isinstance(key, int))
    others = [key for key in state if not isinstance(key, int)]
    numbers = count()
    return {
        "state": {key: state[key] for key in (*keys, *others)},
        "param_groups": [{**group, "params": [next(numbers) for _ in group["params"]]} for group in groups],
    }


def part_of_group(group: Mapping[str, Any], chosen: Callable[[torch.Tensor], bool]) -> dict[str, Any]:
    """Return a copy of a parameter group with only the ``chosen`` parameters."""
    keep = [chosen(parameter) for parameter in group["params"]]
    part = dict(group)
    for name in PER_PARAMETER:
        if name in group:
            part[name] = [value for value, kept in zip(group[name], keep, strict=True) if kept]
    return part


def part_of_state(
    saved: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], chosen: Callable[[torch.Tensor], bool]
) -> dict[str, Any]:
    """Return the part of a state to load into an optimiser of only the ``chosen`` parameters.

    Args:
        saved: a state dictionary of an optimiser of all parameters.
        groups: the parameter groups of all parameters.

    Raises UsageError if ``groups`` differ from the saved groups.
    """
    lengths = [len(group["params"]) for group in groups]
    lengths_saved = [len(group["params"]) for group in saved["param_groups"]]
    if lengths != lengths_saved:
        raise UsageError(
            f"the state to load is of parameter groups with {lengths_saved} parameters, but this optimiser "
            f"has groups with {lengths}; add the same groups in the same order before loading"
        )
    numbers = count()
    local: dict[Any, int] = {}
    parts = []
    for group, group_saved in zip(groups, saved["param_groups"], strict=True):
        own = [
            key
            for key, parameter in zip(group_saved["params"], group["params"], strict=True)
            if chosen(parameter)
        ]
        local.update((key, next(numbers)) for key in own)
        part = {name: value for name, value in group_saved.items() if name not in PER_PARAMETER}
        if "param_names" in group_saved:
            names = dict(zip(group_saved["params"], group_saved["param_names"], strict=True))
            part["param_names"] = [names[key] for key in own]
        parts.append({**part, "params": [local[key] for key in own]})
    others = {key for group in saved["param_groups"] for key in group["params"]} - local.keys()
    state = {local.get(key, key): value for key, value in saved["state"].items() if key not in others}
    return {"state": state, "param_groups": parts}


class StateHeader(NamedTuple):
    """Any state without its tensors."""

    structure: bytes  # the pickled state
    forms: list[tuple[Any, ...]]  # of each tensor: shape, dense strides, dtype, and whether it is on the CPU


class _TensorlessPickler(pickle.Pickler):
    """Leaves out tensors, which are sent separately."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        if isinstance(obj, torch.Tensor) and obj.layout == torch.strided and obj.dtype in DTYPE_CODES:
            self.tensors.append(obj.detach())
            return len(self.tensors) - 1
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]


def pack_state(state: object) -> tuple[StateHeader, list[torch.Tensor]]:
    """Return the header of any state, and the tensors in it, which are sent separately."""
    file = io.BytesIO()
    pickler = _TensorlessPickler(file)
    pickler.dump(state)
    forms = [
        (tuple(x.shape), torch.empty_like(x, device="meta").stride(), x.dtype, x.is_cpu)
        for x in pickler.tensors
    ]
    return StateHeader(file.getvalue(), forms), pickler.tensors


def receive_state(group: ProcessGroup, header: StateHeader, sender: int, device: torch.device | str) -> Any:
    """Receive the tensors of a state from rank ``sender``, and return the state.

    Tensors that are not in CPU memory there are received in memory of ``device``.
    """
    tensors = [
        torch.empty_strided(shape, strides, dtype=dtype, device="cpu" if on_cpu else device)
        for shape, strides, dtype, on_cpu in header.forms
    ]
    for arrival in [group.recv(x, src=sender, tag=STATE_TAG) for x in tensors]:
        arrival.wait()
    return _unpack_state(header, tensors)


def _unpack_state(header: StateHeader, tensors: Sequence[torch.Tensor]) -> Any:
    return _Unpickler(io.BytesIO(header.structure), tensors).load()
