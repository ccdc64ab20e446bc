"""Places of several nodes: an operation is one command, which each of them executes."""

from __future__ import annotations

import copy
import io
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.controller import Master, Place, RemoteTensor
from shoal.controller.commands import connection


def _parts(place: Place, tensor: torch.Tensor) -> list[Any]:
    """What each node has, as lists."""
    return [each.tolist() for each in place.gather(tensor)]


def _on(tensor: torch.Tensor, node: int) -> torch.Tensor:
    assert isinstance(tensor, RemoteTensor)
    return tensor.on(node)


def test_equal_sets_of_nodes_are_one_place(master: Master) -> None:
    place = master.place([2, 0])
    assert place.indices == (0, 2)
    assert list(place) == [place[0], place[1]] == [torch.device("node:0"), torch.device("node:2")]
    assert len(place) == 2
    for same in (
        [0, 2],
        ["node:2", 0],
        [torch.device("node", 0), place],
        range(0, 3, 2),
        place,
        place.device,
    ):
        assert master.place(same) is place
    assert master.nodes.indices == (0, 1, 2)
    assert master.nodes[::2] is place
    assert master.place(1).device == torch.device("node:1") == master.nodes[1:2].device
    assert place.device.index != master.nodes.device.index
    assert repr(place).startswith("<shoal.controller.Place of nodes 0, 2: node:1")


def test_a_place_of_nodes_that_there_are_not_is_refused(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrong in ([], [0, 3], [-1], "cpu", [torch.device("meta")]):
        with pytest.raises(shoal.UsageError):
            master.place(wrong)
    monkeypatch.setattr("shoal.controller.api.spaces.MAX_PLACE_INDEX", 3)
    monkeypatch.setattr(master._spaces, "_places", {})
    monkeypatch.setattr(master._spaces, "by_index", {i: master.space(i) for i in range(3)})
    assert master.place([0, 1]).device == torch.device("node:3")
    with pytest.raises(shoal.UsageError, match="no index left"):
        master.place([1, 2])


def test_every_node_executes_an_operation_of_its_place(master: Master) -> None:
    place = master.place([0, 2])
    before = [each["issued"] for each in master.stats()]
    x = place.scatter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert x.shape == (1, 2)
    assert x.device == place.device
    y = (x * 10 + torch.ones(2, device=place.device)).sum(1)
    assert _parts(place, y) == [[32.0], [72.0]]
    assert place.gather(y, dim=0).tolist() == [32.0, 72.0]  # type: ignore[union-attr]
    assert [each["issued"] for each in master.stats()][1] == before[1]
    assert all(each["spaces"] >= 2 for each in master.stats())


def test_a_part_is_a_tensor_on_its_node_of_the_same_memory(master: Master) -> None:
    place = master.nodes
    x = place.scatter(torch.arange(6.0).view(3, 2))
    part = x.on("node:1")
    assert part.device == torch.device("node:1")
    assert part.get_node() == 1
    assert (part.shape, part.tolist()) == ((1, 2), [[2, 3]])
    part.mul_(10)
    x.add_(1)
    assert part.tolist() == [[21, 31]]
    assert _parts(place, x) == [[[1, 2]], [[21, 31]], [[5, 6]]]
    assert part.on(1).tolist() == part.tolist()
    turned = x.t()[1:]
    turned.on(2).fill_(7)
    assert _parts(place, x)[2] == [[5, 7]]
    parameter = nn.Parameter(x)
    assert not _on(parameter, 0).requires_grad
    for wrong in (0, "cpu", "cuda:1", "node:2"):
        with pytest.raises(shoal.UsageError, match=f"no part on {wrong}: it is node 1"):
            part.on(wrong)


def test_parts_on_their_nodes_become_one_tensor_without_a_copy(master: Master) -> None:
    place = master.place([0, 1])
    ours = [torch.full((2,), float(i), device=f"node:{i}") for i in range(2)]
    x = place.scatter(ours)
    x += 1
    assert [each.tolist() for each in ours] == [[1, 1], [2, 2]]
    del ours
    assert _parts(place, x) == [[1, 1], [2, 2]]
    mixed = place.scatter([torch.zeros(2), torch.ones(2, device="node:0")])  # the second one moves
    assert _parts(place, mixed) == [[0, 0], [1, 1]]
    columns = place.scatter(torch.arange(4).view(2, 2), dim=1)
    assert _parts(place, columns) == [[[0], [2]], [[1], [3]]]
    columns = place.scatter(torch.arange(4, device="node:2").view(2, 2), dim=1)
    assert _parts(place, columns) == [[[0], [2]], [[1], [3]]]
    alone = master.place([2]).scatter([torch.ones(1)])
    assert alone.device == torch.device("node:2")
    assert _parts(master.place(2), alone) == [[1]]


@pytest.mark.parametrize(
    ("values", "match"),
    [
        (torch.ones(3), r"shape \[3\] cannot be divided evenly among 2"),
        (torch.tensor(1.0), "cannot be divided"),
        ([torch.ones(1)], "one tensor for each of the 2 nodes, got 1"),
        ([torch.ones(1), torch.ones(2)], r"must be alike.*float32\[1\].*float32\[2\]"),
        ([torch.ones(1), torch.ones(1, dtype=torch.int32)], "must be alike"),
    ],
)
def test_parts_that_are_not_alike_are_refused(master: Master, values: Any, match: str) -> None:
    with pytest.raises(shoal.UsageError, match=match):
        master.place([0, 1]).scatter(values)


def test_what_waits_for_elements_names_what_gives_them(master: Master) -> None:
    place = master.place([0, 2])
    x = place.replicate(torch.ones(2, 2))
    waits: list[Callable[[], object]] = [
        x.tolist, x.cpu, x.numpy, x.sum().item, lambda: bool(x.sum() > 0), lambda: f"{x.sum():.1f}",
        lambda: x.to("node:0"), lambda: torch.zeros(2, 2).copy_(x), lambda: copy.copy(x).tolist(),
    ]  # fmt: skip
    for wait in waits:
        with pytest.raises(shoal.UsageError, match=r"nodes 0, 2: use x\.on\(0\).*mean"):
            wait()
    with pytest.raises(shoal.UsageError, match="is on nodes 0, 2"):
        x.get_node()
    assert repr(x) == f"tensor(..., size=(2, 2), device={str(place.device)!r}, nodes=[0, 2])"
    assert repr(place[1:]) == "<shoal.controller.Place of node 2: node:2>"
    assert repr(master) == "<shoal.controller.Master of 3 nodes>"
    assert "requires_grad" in repr(nn.Parameter(x))
    with pytest.raises(shoal.DeviceMismatch, match=r"\.on\(0\)"):
        torch.ones(2, 2, device="node:0") + x
    with pytest.raises(shoal.DeviceMismatch, match=f"to.'{place.device}'"):
        x + torch.ones(2, 2, device="node:0")
    with pytest.raises(shoal.UsageError, match="needs a tensor on"):
        master.nodes.gather(x)
    y = torch.ones(2, 2, device="node:1").to(place.device)
    assert _parts(place, x + y) == [[[2, 2], [2, 2]]] * 2


def test_random_numbers_are_the_same_on_all_nodes_or_distinct(master: Master) -> None:
    place = master.nodes
    torch.manual_seed(5)
    here = torch.randn(4)
    torch.manual_seed(5)
    for part in place.gather(torch.randn(4, device=place.device)):
        assert torch.equal(part, here)
    state = torch.node.get_rng_state(place.device)  # type: ignore[attr-defined]
    first = place.gather(torch.rand(3, device=place.device))
    torch.node.set_rng_state(state, place.device)  # type: ignore[attr-defined]
    again = place.gather(torch.rand(3, device=place.device))
    assert [each.tolist() for each in first] == [each.tolist() for each in again]
    master.seed(7, distinct=True)
    for i, part in enumerate(place.gather(torch.randn(4, device=place.device))):
        assert torch.equal(part, torch.randn(4, generator=torch.Generator().manual_seed(7 + i)))


def test_shapes_that_depend_on_elements_must_be_alike_on_all_nodes(master: Master) -> None:
    place = master.place([0, 1])
    x = place.scatter(torch.tensor([[1, 0, 2], [0, 3, 4]]))
    assert _parts(place, x[x > 0]) == [[1, 2], [3, 4]]
    with pytest.raises(shoal.UsageError, match=r"int64\[1\] on node 0 and int64\[0\] on node 1") as caught:
        x[x == 1]
    assert "aten::index.Tensor" in str(caught.value)
    assert _on(x, 0)[_on(x, 0) == 1].tolist() == [1]


def test_what_fails_on_one_node_is_poison_there_and_told_with_its_node(master: Master) -> None:
    place = master.nodes
    table = torch.arange(3.0, device=place.device)
    rows = table[place.scatter(torch.tensor([0, 9, 2]))]  # fails in the middle
    after = rows * 2
    assert _on(after, 0).tolist() == [0]
    assert _on(after, 2).tolist() == [4]
    looks: list[Callable[[], object]] = [
        lambda: place.gather(after), _on(after, 1).tolist, (_on(rows, 1) + 1).tolist,
    ]  # fmt: skip
    for look in looks:
        with pytest.raises(shoal.RemoteOpError, match=r"node 1: aten\.index") as caught:
            look()
        assert caught.value.worker == "node1"
        assert "fails in the middle" in caught.value.line
    part = _on(table, 1)
    table += rows  # poisons what shares its memory on that node
    with pytest.raises(shoal.RemoteOpError, match="node 1"):
        part.tolist()
    assert _on(table, 2).tolist() == [2, 3, 4]


def test_the_slowest_node_of_a_place_holds_the_program_back(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_PENDING_COMMANDS", 2000)
    place = master.place([0, 1])
    x = torch.zeros(300, 300, device="node:1")
    for _ in range(30):
        x = x @ x  # a millisecond each
    most = 0
    y = torch.zeros(3, device=place.device)
    for _ in range(6000):
        y = y + 1
        most = max(most, *(each["pending"] for each in master.stats()))
    assert most <= 2000 + 128
    assert _parts(place, y) == [[6000] * 3] * 2


def _net() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 4)), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Flatten(), nn.Linear(32, 16), nn.Dropout(0.2), nn.LayerNorm(16), nn.Linear(16, 4),
    )  # fmt: skip


def _trained(device: Any) -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(3)
    with torch.device(device):
        net = _net()
        x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))
    opt = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses = []
    for _ in range(5):
        loss = nn.functional.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=False)
        opt.step()
        losses.append(loss.detach())
    return net, [*losses, *net.state_dict().values()]


def test_a_model_on_a_place_learns_on_each_node_what_it_learns_on_one(master: Master) -> None:
    place = master.nodes
    there, values = _trained(place.device)
    _, alone = _trained("node:1")
    for many, one in zip(values, alone, strict=True):
        for part in place.gather(many):
            assert torch.equal(part, one.cpu())
    with pytest.raises(shoal.UsageError, match=r"x\.on\(0\)"):
        torch.save(there.state_dict(), io.BytesIO())
    file = io.BytesIO()
    torch.save({name: _on(value, 0) for name, value in there.state_dict().items()}, file)
    file.seek(0)
    loaded = _net().to(place.device)
    loaded.load_state_dict(torch.load(file))
    for a, b in zip(loaded.state_dict().values(), there.state_dict().values(), strict=True):
        assert _parts(place, a) == _parts(place, b)
    for moved in (copy.deepcopy(there).to(place.device), _net().to(place.device)):
        moved.load_state_dict(there.state_dict())
        for a, b in zip(moved.parameters(), there.parameters(), strict=True):
            assert _parts(place, a - b) == [torch.zeros(a.shape).tolist()] * 3


def test_threads_issue_to_different_places_side_by_side(master: Master) -> None:
    places = [master.place(each) for each in ([0, 1], [1, 2], [0, 1, 2], [1])]
    results: list[Any] = [None] * len(places)

    def work(index: int) -> None:
        place = places[index]
        x = torch.zeros(2, device=place.device)
        node = place.indices[-1]
        for step in range(200):
            x += index
            if step % 40 == 20:
                assert _on(x, node)[0].item() == (step + 1) * index
                _on(x, node).add_(1).sub_(1)
        results[index] = _parts(place, x)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(places))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[[200.0 * i] * 2] * len(place) for i, place in enumerate(places)]


class _Programs:
    """Random operations on tensors of two places and their nodes that share memory; and the same, here.

    A tensor of the program is one on a place, with what each of its nodes should have.
    """

    def __init__(self, master: Master, seed: int) -> None:
        self.drawn = random.Random(seed)
        self.places = [master.place(each) for each in ([0, 1], [1, 2], 0, 1, 2)]
        self.held: list[tuple[Place, torch.Tensor, list[torch.Tensor]]] = []
        for place in self.places:
            self._make(place)

    def _make(self, place: Place) -> None:
        here = [torch.randint(0, 100, (4, 4)) for _ in place]
        self.held.append((place, place.scatter(here), [each.clone() for each in here]))

    def step(self) -> None:
        """One operation."""
        place, there, here = self.drawn.choice(self.held)
        other = self.drawn.choice([each for each in self.held if each[0] is place])
        if other[1].shape != there.shape:
            other = (place, there, here)
        n = self.drawn.randrange(10)
        do = self.drawn.randrange(9)
        if do == 0:
            self._make(self.drawn.choice(self.places))
        elif do == 1:
            new = there * n + other[1], [a * n + b for a, b in zip(here, other[2], strict=True)]
            self.held.append((place, *new))
        elif do == 2:
            there.sub_(other[1], alpha=n)
            for a, b in zip(here, other[2], strict=True):
                a.sub_(b.clone() if a is b else b, alpha=n)
        elif do == 3 and len(there) > 1:
            at = n % len(there)
            self.held.append((place, there[at:], [each[at:] for each in here]))
        elif do == 4:
            there[n % len(there)] = n
            for each in here:
                each[n % len(each)] = n
        elif do in (5, 6):
            i = self.drawn.randrange(len(place))
            self.held.append((self._node(place[i]), _on(there, place.indices[i]), [here[i]]))
        elif do == 7:
            self._join(there.shape)
        elif len(self.held) > 30:
            del self.held[self.drawn.randrange(5, len(self.held))]

    def _node(self, device: torch.device) -> Place:
        return next(each for each in self.places if each.device == device)

    def _join(self, shape: torch.Size) -> None:
        place = self.places[self.drawn.randrange(2)]
        chosen = []
        for device in place:
            likes = [each for each in self.held if each[0].device == device and each[1].shape == shape]
            if not likes:
                return
            chosen.append(self.drawn.choice(likes))
        if len({each[1].storage_offset() for each in chosen}) == 1:
            there = place.scatter([each[1] for each in chosen])
            self.held.append((place, there, [each[2][0] for each in chosen]))

    def check(self) -> None:
        for place, there, here in self.held:
            for a, b in zip(place.gather(there), here, strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("seed", range(4))
def test_commands_of_nodes_and_their_places_are_executed_in_the_order_of_the_program(
    master: Master, seed: int
) -> None:
    torch.manual_seed(seed)
    program = _Programs(master, seed)
    for _ in range(300):
        program.step()
        if program.drawn.random() < 0.01:
            program.check()
    program.check()


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(100, 120))
def test_long_programs_of_nodes_and_their_places(master: Master, seed: int) -> None:
    torch.manual_seed(seed)
    program = _Programs(master, seed)
    for _ in range(1000):
        program.step()
    program.check()


def test_what_is_freed_is_freed_after_its_last_use_by_another_space(master: Master) -> None:
    place = master.nodes
    for _ in range(20):
        x = torch.ones(2, device=place.device)
        with master._lock:
            part = _on(x, 0)
            del x
            master._nodes[1].streams[
                0
            ].flush()  # as the thread that sends what stays behind may do at any moment
        assert part.tolist() == [1, 1]
