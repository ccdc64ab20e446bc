"""Which device stands for which: what a map may be, its inverse, and what is not in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shoal
from shoal.errors import UsageError
from shoal.rpc.connection.device_maps import DeviceMap, checked, checked_pairs, inverse
from shoal.testing import Agents

CUDA = [torch.device("cuda", index) for index in range(3)]
CPU = torch.device("cpu")


@pytest.fixture
def two_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


class On:
    """Something that lies on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.shape = (2, 3)


def target(devices: DeviceMap, device: torch.device) -> torch.device:
    x: Any = On(device)
    return devices.target(x)


@pytest.mark.usefixtures("two_cuda_devices")
def test_a_map_says_where_tensors_go_and_its_inverse_where_results_go() -> None:
    there = checked({"ps": {"cuda:0": "cuda:1", CUDA[1]: "cuda:0"}}, "a")["ps"]
    assert [target(there, CUDA[i]) for i in (0, 1)] == [CUDA[1], CUDA[0]]
    assert target(there, CPU) == CPU
    assert there.here == (CUDA[0], CUDA[1])
    back = inverse(there.as_text(), "a", "ps")
    assert back is not None
    assert [target(back, CUDA[i]) for i in (0, 1)] == [CUDA[1], CUDA[0]]


@pytest.mark.usefixtures("two_cuda_devices")
def test_a_map_may_move_tensors_between_the_cpu_and_a_device() -> None:
    there = checked({"ps": {"cpu": "cuda:1"}}, "a")["ps"]
    assert there.maps_cpu
    assert there.here == ()
    assert target(there, CPU) == CUDA[1]
    back = inverse(there.as_text(), "a", "ps")
    assert back is not None
    assert (target(back, CUDA[1]), back.here, back.maps_cpu) == (CPU, (CUDA[1],), False)


@pytest.mark.usefixtures("two_cuda_devices")
def test_a_device_that_is_not_in_the_map_is_refused_with_the_map_to_add() -> None:
    there = checked({"ps": {"cuda:0": "cuda:1"}}, "a")["ps"]
    with pytest.raises(UsageError, match=r"shape \(2, 3\) is on cuda:1, which has no device of 'ps'") as told:
        target(there, CUDA[1])
    assert "join 'a' with device_maps={'ps': {'cuda:1': 'cuda:1'}}" in str(told.value)
    back = inverse(there.as_text(), "a", "ps")
    assert back is not None
    with pytest.raises(UsageError, match=r"to which 'a' maps none of its devices: send x\.cpu") as told:
        target(back, CUDA[0])
    assert "join 'a' with device_maps={'ps': {'cuda:0': 'cuda:0'}}" in str(told.value)


@pytest.mark.usefixtures("two_cuda_devices")
@pytest.mark.parametrize(
    ("maps", "words"),
    [
        (7, "expected {worker: {device here: device there}}"),
        ({"ps": "cuda:0"}, r"device_maps['ps']='cuda:0': expected {device here: device there}"),
        ({"": {}}, "bytes of printable text as a worker's name"),
        ({"ps": {"gpu": "cuda:0"}}, "'gpu' is not a device"),
        ({"ps": {"cuda:0": "one"}}, "'one' is not a device"),
        ({"ps": {None: "cuda:0"}}, "None is not a device"),
        ({"ps": {"cuda": "cuda:0"}}, "cuda has no index; expected a name such as 'cuda:0'"),
        ({"ps": {"cuda:2": "cuda:0"}}, "this worker has no cuda:2; it has 2 of cuda"),
        ({"ps": {"meta:0": "cuda:0"}}, "no stream runtime for device meta:0"),
        ({"ps": {"cuda:0": "cuda:5", "cuda:1": "cuda:5"}}, "maps cuda:0 and cuda:1 to cuda:5: only a 1-to-1"),
        ({"ps": {"cuda:0": "cuda:1", CUDA[0]: "cuda:0"}}, "names cuda:0 twice"),
    ],
)
def test_what_is_no_map_is_refused_in_words(maps: Any, words: str) -> None:
    with pytest.raises(UsageError) as told:
        checked(maps, "a")
    assert words in str(told.value)


def test_a_map_that_says_nothing_is_none() -> None:
    assert checked(None, "a") == {}
    assert inverse({}, "a", "ps") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are such devices here")
def test_a_worker_says_which_devices_of_a_callers_map_it_lacks() -> None:
    with pytest.raises(UsageError, match=r"device_maps\['ps'\] of 'a': this worker has no cuda:1"):
        inverse({"cuda:0": "cuda:1"}, "a", "ps")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are such devices here")
def test_joining_with_a_map_of_devices_that_are_not_here_leaves_nothing(tmp_path: Any) -> None:
    with Agents() as stage:
        with pytest.raises(UsageError, match="this worker has no cuda:0"):
            shoal.rpc.join("a", store=stage.store, secret="x", device_maps={"b": {"cuda:0": "cuda:0"}})
        assert stage.store.num_keys() == 0


def test_pairs_need_not_be_here_until_they_are_used() -> None:
    assert checked_pairs({"cuda:7": "cuda:9"}, "a test") == {torch.device("cuda:7"): torch.device("cuda:9")}
