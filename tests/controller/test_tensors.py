"""Tensors on nodes: how they are made, moved, looked at, and what they say of themselves."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch

import shoal
from shoal.controller import Master, RemoteTensor
from shoal.controller.commands.batch import SegmentBatch

NODE = "node:0"


def test_factories_make_tensors_on_the_node_that_is_named(master: Master) -> None:
    for index in (0, 1):
        device = torch.device("node", index)
        for made in (
            torch.full((2, 3), 4.0, device=device),
            torch.zeros(3, device=f"node:{index}"),
            torch.arange(6, device=device),
            torch.randn(2, device=device),
            torch.empty(4, device=device),
            torch.eye(3, device=device),
            torch.linspace(0, 1, 5, device=device),
        ):
            assert type(made) is RemoteTensor
            assert made.device == device
            assert made.get_node() == index
            assert made.get_device() == -1


def test_a_device_context_chooses_the_node(master: Master) -> None:
    with torch.device("node:1"):
        assert torch.zeros(10).device == torch.device("node:1")
        assert torch.tensor([1, 2]).device == torch.device("node:1")
    assert torch.zeros(1).device.type == "cpu"


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_code_issues_its_operations_one_by_one(master: Master) -> None:
    torch._dynamo.reset()
    layer = torch.nn.Linear(2, 3).to(NODE)
    x = torch.ones(1, 2, device=NODE)
    step = torch.compile(lambda x, here: (layer(x.sin() + 1).sum(), here.cos() * 2))
    loss, here = step(x, torch.zeros(2))
    loss.backward()
    assert torch.equal(loss.detach().cpu(), layer(x.sin() + 1).sum().detach().cpu())
    assert torch.allclose(layer.weight.grad.cpu(), (x.sin() + 1).cpu().expand(3, 2))
    assert here.tolist() == [2.0, 2.0]
    torch._dynamo.reset()


@pytest.mark.parametrize("data", [3.5, [1, 2, 3], [[1.0, 2.0]], [], [True, False]])
def test_python_data_becomes_a_tensor_of_a_node(master: Master, data: object) -> None:
    there = torch.tensor(data, device=NODE)
    here = torch.tensor(data)
    assert there.dtype == here.dtype
    assert torch.equal(there.cpu(), here)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
def test_a_tensor_comes_back_as_it_went(master: Master, dtype: torch.dtype) -> None:
    here = torch.randint(0, 2, (3, 5)).to(dtype)
    for each in (here, here.t(), here[1:, ::2], here[0, 0]):
        there = each.to("node:1")
        assert (there.shape, there.dtype) == (each.shape, each.dtype)
        assert torch.equal(there.cpu(), each)


def test_the_source_of_an_upload_may_be_changed_at_once(master: Master) -> None:
    here = torch.ones(1000)
    there = here.to(NODE)
    here.zero_()
    assert there.sum().item() == 1000


def test_an_upload_that_does_not_block_returns_when_it_is_queued(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[SegmentBatch] = []
    monkeypatch.setattr(SegmentBatch, "wait_until_read", lambda batch: waited.append(batch))
    here = torch.ones(1 << 20)
    there = here.to(NODE, non_blocking=True)
    there.copy_(here * 2, non_blocking=True)
    assert not waited
    assert there.sum().item() == 2 << 20
    here.to(NODE)
    assert waited


@pytest.mark.parametrize(
    "here",
    [
        torch.tensor(0.1),
        torch.tensor([[1e-40]], dtype=torch.bfloat16),
        torch.tensor(-(2**63)),
        torch.tensor(2**63, dtype=torch.uint64),
        torch.tensor(True),
        torch.tensor(1 - 2j).conj(),
        torch.tensor(2j).conj().imag,
        torch.tensor(3.0, requires_grad=True),
    ],
)
def test_a_number_is_the_one_that_torch_gives_here(master: Master, here: torch.Tensor) -> None:
    there = here.to(NODE)
    assert (type(there.item()), there.item()) == (type(here.item()), here.item())


def test_several_elements_are_no_number(master: Master) -> None:
    for count in (0, 2):
        with pytest.raises(RuntimeError) as here:
            torch.ones(count).item()
        with pytest.raises(RuntimeError) as there:
            torch.ones(count, device=NODE).item()
        assert str(there.value) == str(here.value)


def test_elements_come_to_the_master_where_it_needs_them(master: Master) -> None:
    x = torch.arange(4.0, device=NODE)
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert x.cpu().tolist() == x.tolist()
    assert x.sum().item() == 6.0
    assert float(x[1]) == 1.0
    assert int(x[2]) == 2
    assert bool((x >= 0).all())
    assert np.array_equal(x.numpy(), np.arange(4, dtype=np.float32))
    assert np.asarray(x).sum() == 6
    assert f"{x[3]:.2f}" == "3.00"
    assert [float(each) for each in x] == [0.0, 1.0, 2.0, 3.0]
    assert torch.equal(x, x.clone())


def test_many_tensors_are_fetched_as_they_are_by_one_future(master: Master) -> None:
    x, y = torch.arange(4.0, device=NODE), torch.ones(2, device="node:1")
    here = torch.zeros(1)
    fetched = master.fetch([x.view(2, 2).t(), y, here])
    x.zero_()
    y += 1
    first, second, third = fetched.wait()
    assert first.tolist() == [[0.0, 2.0], [1.0, 3.0]]
    assert first.stride() == (1, 2)
    assert second.tolist() == [1.0, 1.0]
    assert third is here
    assert master.fetch(iter([])).wait() == []
    assert master.fetch([y]).then(lambda done: done.value()[0].sum().item()).wait() == 4.0
    with pytest.raises(shoal.UsageError, match="has elements on each of nodes 0-2"):
        master.fetch([y, torch.zeros(1, device=master.nodes.device)])


def test_a_future_of_what_cannot_be_fetched_has_the_error(master: Master) -> None:
    good = torch.ones(1, device=NODE)
    bad = good + torch.ones(3, device=NODE)[torch.tensor([7], device=NODE)]
    fetched = master.fetch([good, bad, good * 2])
    with pytest.raises(shoal.RemoteOpError, match=r"index.*failed") as failed:
        fetched.wait()
    assert __file__ in str(failed.value.line)
    assert master.fetch([good]).wait()[0].item() == 1


def test_print_shows_elements_and_device(master: Master) -> None:
    x = torch.arange(4.0, device=NODE)
    assert repr(x) == "tensor([0., 1., 2., 3.], device='node:0')"
    assert repr(x.requires_grad_()) == "tensor([0., 1., 2., 3.], device='node:0', requires_grad=True)"
    assert "grad_fn=<MulBackward0>" in repr(x * 2)
    large = torch.arange(10_000).reshape(100, 100)
    assert repr(large.to(NODE)) == repr(large)[:-1] + ", device='node:0')"


def test_indexing_reads_and_writes(master: Master) -> None:
    here, there = torch.zeros(4, 5), torch.zeros(4, 5, device=NODE)
    for x in (here, there):
        x[0] = 5
        x[1, 2:] = torch.arange(3.0, device=x.device)
        x[:, 1] += 2
        x[x > 4] *= 10
        x[torch.tensor([2, 3], device=x.device), 0] = -1.0
    assert torch.equal(there.cpu(), here)
    assert torch.equal(there[torch.tensor([0, 2])].cpu(), here[[0, 2]])
    assert torch.equal(there[there > 4].cpu(), here[here > 4])


def test_results_of_unknown_size_are_asked_for(master: Master) -> None:
    x = torch.tensor([3, 0, 3, 1], device=NODE)
    assert x.nonzero().flatten().tolist() == [0, 2, 3]
    values, counts = x.unique(return_counts=True)
    assert values.tolist() == [0, 1, 3]
    assert counts.tolist() == [1, 1, 2]


def test_a_strict_master_waits_for_no_shape(master: Master) -> None:
    x = torch.tensor([3, 0, 3, 1], device=NODE)
    master.strict = True
    try:
        with pytest.raises(shoal.UsageError, match=r"nonzero would wait for node 0.* strict"):
            x.nonzero()
        assert torch.where(x > 0, x, -1).tolist() == [3, -1, 3, 1]
    finally:
        master.strict = False
    assert x.nonzero().flatten().tolist() == [0, 2, 3]


def test_nodes_exchange_tensors(master: Master) -> None:
    x = torch.randn(3, 4, device=NODE)
    y = x.to("node:1")
    assert y.get_node() == 1
    assert torch.equal(y.cpu(), x.cpu())
    y[1:].copy_(x[:2])
    assert torch.equal(y[1:].cpu(), x[:2].cpu())
    assert x.to("node:1", torch.float64).dtype == torch.float64


def test_a_copy_to_the_cpu_writes_into_its_tensor(master: Master) -> None:
    here = torch.zeros(2, 3)
    assert here.copy_(torch.ones(2, 3, device=NODE)) is here
    assert here.sum() == 6


def test_views_see_what_is_written_through_one_another(master: Master) -> None:
    x = torch.zeros(6, device=NODE)
    rows = x.view(2, 3)
    rows[1] = 7
    x[0] = 1
    assert rows.tolist() == [[1, 0, 0], [7, 7, 7]]
    first, second = x.split(3)
    first.add_(second)
    assert x.tolist() == [8, 7, 7, 7, 7, 7]


def test_a_tensor_of_no_dimension_may_stay_with_the_master(master: Master) -> None:
    x = torch.arange(3.0, device=NODE)
    assert (x * torch.tensor(2.0)).tolist() == [0, 2, 4]
    assert (torch.tensor(2) + x).dtype == torch.float32
    assert torch.where(x > 1, x, torch.tensor(-1.0)).tolist() == [-1, -1, 2]


@pytest.mark.parametrize("value", [2, 2**40, 2**60 + 1, -3.25, True, float("inf"), 1 + 2j])
def test_numbers_of_all_kinds_reach_the_node(master: Master, value: complex) -> None:
    x = torch.ones(2, dtype=torch.int64)
    there = x.to(NODE) * value
    assert there.dtype == (x * value).dtype
    assert torch.equal(there.cpu(), x * value)


def test_tensors_of_two_places_are_refused_with_the_remedy(master: Master) -> None:
    x, y = torch.ones(3, device="node:0"), torch.ones(3, device="node:1")
    with pytest.raises(shoal.DeviceMismatch, match=r"aten::add.*node:0.*node:1.*\.to\('node:0'\)"):
        x + y
    with pytest.raises(shoal.DeviceMismatch, match=r"float32\[3\] on cpu.*\.to\('node:0'\)"):
        x + torch.ones(3)
    with pytest.raises(shoal.DeviceMismatch):
        torch.add(x, 1, out=torch.empty(3))
    with pytest.raises(shoal.DeviceMismatch, match=r"sparse_coo.*\.to_dense\(\)\.to\('node:0'\)"):
        x + torch.ones(3).to_sparse()


def test_a_node_that_is_not_there_is_refused(master: Master) -> None:
    with pytest.raises(shoal.UsageError, match="there is no node:7: the nodes are 0 to 2"):
        torch.zeros(1, device="node:7")


def test_a_generator_of_the_master_is_refused(master: Master) -> None:
    with pytest.raises(RuntimeError):
        torch.randn(2, device=NODE, generator=torch.Generator())


def test_random_numbers_are_those_of_the_same_seed_here(master: Master) -> None:
    draws = (
        lambda d: torch.rand(5, device=d),
        lambda d: torch.randn(3, 3, device=d),
        lambda d: torch.randperm(6, device=d),
        lambda d: torch.nn.functional.dropout(torch.ones(20, device=d), 0.4),
        lambda d: torch.multinomial(torch.ones(4, device=d), 2),
        lambda d: torch.empty(4, device=d).bernoulli_(0.3),
    )
    for draw in draws:
        torch.manual_seed(5)
        here = draw("cpu")
        torch.manual_seed(5)
        assert torch.equal(draw("node:1").cpu(), here)


def test_the_state_of_a_nodes_generator_can_be_kept(master: Master) -> None:
    state = torch.node.get_rng_state(1)  # type: ignore[attr-defined]
    first = torch.rand(3, device="node:1")
    torch.node.set_rng_state(state, 1)  # type: ignore[attr-defined]
    assert torch.equal(torch.rand(3, device="node:1").cpu(), first.cpu())


def test_pickled_tensors_are_of_the_cpu(master: Master) -> None:
    x = torch.nn.Parameter(torch.randn(3, device=NODE))
    for again in (pickle.loads(pickle.dumps(x)), _saved(x)):
        assert type(again) is torch.nn.Parameter
        assert again.device.type == "cpu"
        assert torch.equal(again, x.detach().cpu())


def _saved(x: torch.Tensor) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer)  # type: ignore[no-any-return]


def test_a_deep_copy_is_one_of_its_own(master: Master) -> None:
    x = torch.ones(3, device=NODE, requires_grad=True)
    x.sum().backward()
    again = copy.deepcopy([x, x])
    assert again[0] is again[1]
    assert again[0].requires_grad
    with torch.no_grad():
        again[0] += 1
    assert x.tolist() == [1, 1, 1]
    assert again[0].grad is not None
    assert again[0].grad.tolist() == [1, 1, 1]


def test_the_device_module_tells_of_the_nodes(master: Master) -> None:
    node = torch.node  # type: ignore[attr-defined]
    assert node.is_available()
    assert node.device_count() == 3
    assert list(master.nodes) == [torch.device(f"node:{i}") for i in range(3)]
    node.synchronize()
    node.synchronize("node:1")
    assert torch.zeros(1, device=NODE).is_node  # type: ignore[attr-defined]
    with pytest.raises(shoal.UnsupportedOperation, match=r"with torch\.device"):
        node.set_device(1)


def test_a_second_master_is_refused(master: Master) -> None:
    with pytest.raises(shoal.UsageError, match="this process already has an open master"):
        shoal.init_master_worker(workers=1)


def test_a_view_may_reach_all_of_its_storage_as_here(master: Master) -> None:
    for device in ("cpu", NODE):
        view = torch.arange(20.0, device=device)[:4]
        assert view.as_strided((2, 2), (1, 2), 10).tolist() == [[10, 12], [11, 13]]
        view.as_strided_((2, 3), (3, 1), 2)
        assert view.tolist() == [[2, 3, 4], [5, 6, 7]]
    beyond = torch.ones(4, device=NODE).as_strided((3,), (1,), 30)
    with pytest.raises(shoal.RemoteOpError, match="out of bounds"):
        beyond.tolist()
