"""Values that a State can save and load, and the refusal of all others."""

from __future__ import annotations

import collections
import concurrent.futures
import datetime
import decimal
import enum
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shoal import ProcessGroup, StateDiverged, UsageError
from shoal.elastic import State
from shoal.elastic.state.transfer import receive_state, send_state
from shoal.testing import run_threads

pytestmark = pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")  # torch 2.14


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


@dataclass
class Metric:
    loss: float = 0.0


class Fraction(float):
    pass


class Tagged(torch.Tensor):
    pass


Pair = collections.namedtuple("Pair", "a b")


def values_of_numpy() -> dict[str, Any]:
    return {
        "scalar": np.float64(0.25),
        "half": np.float16(0.5),
        "boolean": np.bool_(True),
        "unsigned": np.uint64(2**64 - 1),
        "matrix": np.arange(6).reshape(2, 3),
        "strided": np.arange(6)[::2],
        "empty": np.zeros(0),
        "of no dimension": np.array(3.0),
        "nested": {"losses": [np.float32(0.1), (np.complex64(1j), 2)]},
    }


def test_threads_that_save_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    states = [State(value=torch.full((20_000,), float(number))) for number in range(3)]
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(state.save, tmp_path / "state.pt") for state in states * 5]:
            done.result()
    other = State(value=None)
    other.load(tmp_path / "state.pt")
    assert any(torch.equal(other.value, state.value) for state in states)
    assert [each.name for each in tmp_path.iterdir()] == ["state.pt"]


def test_a_full_disk_is_reported_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BytesIO):
        def write(self, data: object) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("shoal.common.atomic_file.open", lambda descriptor, mode: Full(), raising=False)
    with pytest.raises(OSError, match=r"No space left on device: '.*state\.pt'"):
        State(value=torch.ones(5)).save(tmp_path / "state.pt")
    assert not list(tmp_path.iterdir())


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    elif isinstance(one, (np.ndarray, np.generic)):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(*(each.to_dense() if each.is_sparse else each for each in (one, other)))
        assert (one.layout, one.requires_grad) == (other.layout, other.requires_grad)
    else:
        assert one == other


def test_scalars_and_arrays_of_numpy_come_back_as_they_were(tmp_path: Path) -> None:
    frozen = np.arange(3)
    frozen.flags.writeable = False
    requested = {**values_of_numpy(), "frozen": frozen}
    State(value=requested).save(tmp_path / "state.pt")
    other = State(value=None)
    other.load(tmp_path / "state.pt")
    assert_same(other.value, requested)


def test_an_optimiser_whose_options_are_of_numpy_comes_back(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=np.float64(0.125))  # type: ignore[arg-type]
    State(optimizer=optimizer).save(tmp_path / "state.pt")
    other = torch.optim.SGD(net.parameters(), lr=0.5)
    State(optimizer=other).load(tmp_path / "state.pt")
    assert_same(other.param_groups[0]["lr"], np.float64(0.125))


def test_plain_containers_and_tensors_of_any_layout_come_back(tmp_path: Path) -> None:
    shared: list[Any] = []
    for _ in range(40):
        shared = [shared, shared]  # 2**40 paths lead to the innermost list
    requested = {
        "set": {1, (2, "a")},
        "counter": collections.Counter("aab"),
        "ordered": collections.OrderedDict(a=1),
        "bytes": [b"x", bytearray(b"y")],
        "numbers": (float("inf"), 1 + 2j, 2**100, -(2**63)),
        "torch": [torch.Size([2]), torch.float16, torch.device("cpu"), torch.strided],
        "sparse": torch.eye(2).to_sparse(),
        "parameter": nn.Parameter(torch.ones(2)),
    }
    State(value=requested, shared=shared).save(tmp_path / "state.pt")
    other = State(value=None, shared=None)
    other.load(tmp_path / "state.pt")
    assert_same(other.value, requested)


REFUSED: list[tuple[Any, str]] = [
    (
        collections.deque([1]),
        r"x is of type collections\.deque, which State\.load cannot read; use list\(x\)",
    ),
    (collections.defaultdict(list), r"use dict\(x\)"),
    (datetime.datetime(2026, 1, 1), r"datetime\.datetime, .*; use x\.isoformat\(\)"),
    (datetime.timedelta(1), r"use x\.total_seconds\(\)"),
    (Path("x"), r"use str\(x\)"),
    (decimal.Decimal(1), r"use str\(x\)"),
    (Colour.RED, r"use x\.name or x\.value"),
    (Level.LOW, r"use x\.name or x\.value"),
    (Metric(), r"use dataclasses\.asdict\(x\)"),
    (Pair(1, 2), r"use x\._asdict\(\) or tuple\(x\)"),
    (range(3), r"use \(x\.start, x\.stop, x\.step\)"),
    (slice(3), r"use \(x\.start, x\.stop, x\.step\)"),
    (frozenset([1]), r"use set\(x\)"),
    (Fraction(0.5), r"use float\(x\)"),
    (1 << 5000, r"an int of more than 64 bits, .*; use str\(x\)"),
    (torch.Generator(), r"use x\.get_state\(\)"),
    (torch.ones(2).as_subclass(Tagged), "use x.detach"),
    (np.datetime64("2026"), r"use x\.astype\('int64'\)"),
    (np.array(["a"]), r"dtype <U1, .*; use x\.tolist\(\)"),
    (print, "builtin_function_or_method, .*; use None, numbers"),
    (int, "'x' is the class int"),
    ({"a": [0, (1, Colour.RED)]}, r"x\['a'\]\[1\]\[1\] is of type .*Colour"),
    ({np.int64(1): 2}, r"x key np\.int64\(1\) is of type numpy\.int64 .*; use x\.tolist"),
    ({(1, Colour.RED)}, r"x element .*\[1\] is of type .*Colour"),
    (
        {"a": {"b": nn.Linear(1, 1)}},
        r"x\['a'\]\['b'\] is of type .*Linear, .*; use a part for it, State\(name=x\)",
    ),
    ({"shoal.numpy.ndarray": 1}, "which shoal itself uses"),
]


@pytest.mark.parametrize(("value", "words"), REFUSED)
def test_a_value_that_cannot_be_loaded_is_refused_when_the_state_is_made(value: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        State(x=value)
    state = State(x=0)
    with pytest.raises(UsageError, match=words):
        state.x = value
    assert state.x == 0


def test_containers_without_an_end_are_refused() -> None:
    loop: list[Any] = [1]
    loop.append({"a": loop})
    with pytest.raises(UsageError, match=r"x\[1\]\['a'\] is a container inside itself"):
        State(x=loop)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(UsageError, match="a container more than 100 levels deep"):
        State(x=deep)


class Part:
    """A part with a state of its own."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        raise LookupError("no such state")


def test_a_part_whose_state_cannot_be_loaded_is_refused() -> None:
    with pytest.raises(UsageError, match=r"part\.state_dict\(\)\['since'\] is of type datetime\.date,"):
        State(part=Part({"since": datetime.date(2026, 1, 1)}))


def test_a_value_that_a_step_has_added_is_refused_by_the_next_step_and_by_save(tmp_path: Path) -> None:
    state = State(losses=[0.5])
    state.hold()
    state.losses.append(Metric())
    with pytest.raises(UsageError, match=r"losses\[1\] is of type .*Metric"):
        state.hold()
    with pytest.raises(UsageError, match=r"losses\[1\] is of type .*Metric"):
        state.save(tmp_path / "state.pt")
    assert not list(tmp_path.iterdir())


def test_the_errors_of_damaged_files_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    State(net=nn.Linear(3, 3), best=0.5).save(path)
    whole = path.read_bytes()
    damaged = [b"", b"x" * 100, *(whole[: len(whole) * part // 8] for part in range(1, 8))]
    for at in range(0, len(whole), 97):
        damaged.append(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
    refused = 0
    for content in damaged:
        path.write_bytes(content)
        error = None
        try:
            State(net=nn.Linear(3, 3), best=0.5).load(path)
        except UsageError as raised:
            error = raised
        refused += error is not None
        assert error is None or str(path) in str(error)
    assert refused > len(damaged) // 3
    with pytest.raises(FileNotFoundError, match=r"none\.pt"):
        State(best=0.5).load(tmp_path / "none.pt")


def test_a_changed_bit_of_a_parameter_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    state = State(net=nn.Linear(8, 8))
    state.save(path)
    whole = bytearray(path.read_bytes())
    whole[whole.index(state.net.weight.detach().numpy().tobytes()) + 100] ^= 1
    path.write_bytes(whole)
    with pytest.raises(UsageError, match=r"state\.pt is damaged .* record \S+ does not match its checksum"):
        State(net=nn.Linear(8, 8)).load(path)


def test_files_without_checksums_are_loaded(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        State(net=nn.Linear(8, 8), best=0.5).save(tmp_path / "state.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    loaded = State(net=nn.Linear(8, 8), best=0.0)
    loaded.load(tmp_path / "state.pt")
    assert loaded.best == 0.5


def test_the_errors_of_states_that_do_not_fit_name_file_and_part(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    State(net=nn.Linear(3, 3)).save(path)
    with pytest.raises(
        UsageError, match=r"(?s)state\.pt: .* part 'net' does not fit this State's Linear: .*size"
    ):
        State(net=nn.Linear(4, 4)).load(path)
    with pytest.raises(UsageError, match=r"state\.pt: .* part 'net' .* LookupError: no such state"):
        State(net=Part({})).load(path)
    torch.save({"format": 2, "parts": {}}, path)
    with pytest.raises(UsageError, match=r"state\.pt is damaged"):
        State(net=nn.Linear(3, 3)).load(path)


def _shared_out(group: ProcessGroup, requested: Any, mine: Any) -> Any:
    state = State(value=requested if group.rank < 2 else mine)
    if group.rank < 2:
        send_state(state, group, (0, 1), (2,))
    else:
        receive_state(state, group, (0, 1))
    return state.value


def test_a_newcomer_receives_what_a_file_would_hold() -> None:
    inner = torch.arange(4.0)
    requested = {
        **values_of_numpy(),
        "twice": [inner, inner, inner[1:]],
        "sparse": torch.eye(2).to_sparse(),
        "parameter": nn.Parameter(torch.ones(2)),
        "conjugated": torch.tensor([1 + 2j]).conj(),
    }
    same = torch.zeros(4)
    mine = {"twice": [same, same, torch.zeros(3)], "conjugated": torch.zeros(1, dtype=torch.complex64)}
    _, _, received = run_threads(_shared_out, 3, requested, mine)
    assert_same(received, requested)


def _as_another(group: ProcessGroup) -> None:
    if group.rank == 0:
        send_state(State(net=nn.Linear(3, 3)), group, (0,), (1,))
    else:
        with pytest.raises(
            StateDiverged, match=r"(?s)rank 1 joined with another State .* part 'net' does not fit"
        ):
            receive_state(State(net=nn.Linear(4, 4)), group, (0,))


def test_a_newcomer_with_another_model_is_refused() -> None:
    run_threads(_as_another, 2)
