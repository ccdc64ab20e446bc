"""Uses of tensors beside operators: each gives on a node what it gives here, or says why not."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu
from torch.func import functional_call, grad, hessian, linearize, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations, prune, rnn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset, default_collate

import shoal
from shoal.controller import Master
from shoal.controller.api import device
from tests.controller.compare import differences, is_remote

NODE = "node:0"
#: a function of the device
_Use = Callable[[str], Any]


def _mlp(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).to(device)


def _x(device: str, *shape: int) -> Tensor:
    return torch.linspace(-1, 2, torch.Size(shape or (3, 4)).numel()).reshape(shape or (3, 4)).to(device)


def _gradients(module: nn.Module, loss: Tensor) -> list[Any]:
    loss.backward()
    return [each.grad for each in module.parameters()]


def _copies(device: str) -> Any:
    module = _mlp(device)
    gradients = _gradients(module, module(_x(device)).sum())
    x = _x(device)
    same, other = copy.copy(x), copy.deepcopy(x)
    same.add_(1)
    deep = copy.deepcopy(module)
    return gradients, [each.grad for each in deep.parameters()], list(deep.parameters()), x, same, other


def _files(device: str) -> Any:
    loss = (_x(device).requires_grad_() * 2).sum()
    read = pickle.loads(pickle.dumps(loss)).to(device)
    found = [read.detach(), read.requires_grad]
    for modern in (True, False):
        file = io.BytesIO()
        x = _x("cpu")
        torch.save({"whole": x, "part": x[1]}, file, _use_new_zipfile_serialization=modern)
        file.seek(0)
        loaded = torch.load(file, map_location=device)
        loaded["whole"][1].zero_()
        found.append(loaded)
    return found


def _packed(device: str) -> Any:
    found = []
    for first in (True, False):
        torch.manual_seed(0)
        layer = nn.LSTM(2, 3, batch_first=first).to(device)
        x = _x(device, 3, 4, 2).requires_grad_()
        lengths = torch.tensor([2, 4, 3] if first else [3, 1, 1, 2])
        packed = rnn.pack_padded_sequence(x, lengths, first, enforce_sorted=False)
        padded, count = rnn.pad_packed_sequence(layer(packed)[0], first, -1.0)
        found += [packed.data, padded, count.tolist(), *_gradients(layer, padded.sum()), x.grad]
    return found


def _constrained(device: str) -> Any:
    found = []
    for constrain in (parametrizations.weight_norm, parametrizations.spectral_norm):
        torch.manual_seed(0)
        layer = constrain(nn.Linear(4, 3)).to(device)
        y = layer(_x(device))
        found += [y, _gradients(layer, y.sum())]
    layer = nn.Linear(4, 3).to(device)
    with torch.no_grad():
        layer.weight.copy_(_x(device))
    prune.l1_unstructured(layer, "weight", amount=0.5)
    return [*found, layer.weight, layer.weight_mask]


def _saved_elsewhere(device: str) -> Any:
    x = _x(device).requires_grad_()
    with save_on_cpu(pin_memory=True):
        y = x.exp()
    y.sum().backward()
    checkpoint(lambda each: each.sin().exp(), x, use_reentrant=True).sum().backward()
    return x.grad


def _hooks(device: str) -> Any:
    module, seen = _mlp(device), []
    module[0].register_full_backward_hook(lambda _, inside, outside: (inside[0] * 2,))  # type: ignore[index]
    module[0].register_forward_hook(lambda _, given, result: result + 1)  # type: ignore[index]
    module[2].weight.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad.sum()))  # type: ignore[index, union-attr]
    x = _x(device).requires_grad_()
    return _gradients(module, module(x).sum()), x.grad, seen


def _transforms(device: str) -> Any:
    module, x = _mlp(device), _x(device)
    values = {name: each.detach() for name, each in module.named_parameters()}

    def loss(values: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(module, values, (row[None],)).square().sum()  # type: ignore[no-any-return]

    y, tangent = linearize(lambda each: each * each.exp(), x[0])
    return (
        vmap(grad(loss), (None, 0))(values, x),
        hessian(lambda each: each.pow(3).sum())(x[0]),
        y,
        tangent(x[1]),
    )


def _traced(device: str) -> Any:
    module, x = _mlp(device), _x(device)
    c = x * 3
    traced = make_fx(lambda each: each * c + torch.ones(4, device=device))(x)
    script = torch.jit.script(module)
    exported = torch.export.export(module, (x,)).module()
    return traced(x + 1), script(x), script(x), torch.jit.trace(module, x)(x), exported(x)


def _loaded(device: str) -> Any:
    data = TensorDataset(_x("cpu"), torch.arange(3))
    batches = [(x.to(device), y.to(device)) for x, y in DataLoader(data, batch_size=2, pin_memory=True)]
    return batches, default_collate([{"a": _x(device), "b": 1}, {"a": _x(device), "b": 2}])["a"]


def _forward(device: str) -> Any:
    x = torch.linspace(0, 1, 5).to(device)
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(forward_ad.make_dual(x, x + 1).quantile(0.3)))


def _of_torch_script(device: str) -> Any:
    return torch.jit.script(_mlp("cpu")).to(device)(_x(device))


def _shown(device: str) -> Any:
    x = _x(device)
    texts = [repr(each).replace(f", device='{NODE}'", "") for each in (nn.Parameter(x), x[0, 0], x[:0], x)]
    return texts, x.is_set_to(x.detach()), x.is_set_to(x[0]), torch.tensor([x[0, 0], x[1, 1]], device=device)


SAME: dict[str, _Use] = {
    "copies": _copies, "files": _files, "packed sequences": _packed, "constraints": _constrained,
    "saved tensors": _saved_elsewhere, "hooks": _hooks, "transforms": _transforms, "traces": _traced,
    "loaders": _loaded, "shown": _shown, "forward mode": _forward,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # torch deprecates some of these, and warns that nothing is pinned
@pytest.mark.parametrize("name", SAME)
def test_what_programs_do_gives_on_a_node_what_it_gives_here(master: Master, name: str) -> None:
    here, there = SAME[name]("cpu"), SAME[name](NODE)
    assert not differences(master, here, there)
    assert is_remote(there)


REFUSED: dict[str, tuple[_Use, type[Exception], str]] = {
    "lengths of a node": (
        lambda d: rnn.pack_padded_sequence(_x(d, 2, 3, 1), torch.tensor([3, 1], device=d), True),
        shoal.DeviceMismatch, r"lengths\.cpu\(\)",
    ),
    "TorchScript": (_of_torch_script, shoal.UsageError, "cannot move from cpu to node:0.*TorchScript"),
    "lazy modules": (lambda d: nn.LazyLinear(3).to(d), shoal.UsageError, "one input here first"),
    "pinning": (lambda d: _x(d).pin_memory(), shoal.UnsupportedOperation, "cannot be pinned"),
    "storages": (lambda d: _x(d).storage().tolist(), shoal.UnsupportedOperation, r"use views .*x\.cpu\(\)"),
    "autocast": (lambda d: torch.autocast(d.partition(":")[0]), shoal.UnsupportedOperation, "model.bfloat16"),
    "DLPack": (lambda d: torch.from_dlpack(_x(d)), shoal.UsageError, r"another process: use x\.cpu\(\)"),
    "compressed tensors": (
        lambda d: torch.sparse_csr_tensor([0, 1], [0], [1.0], device=d),
        shoal.UnsupportedOperation, "nodes hold dense tensors",
    ),
    "a dimension that is not there": (lambda d: _x(d).softmax(5), IndexError, "Dimension out of range"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_at_its_line(master: Master, name: str) -> None:
    use, error, match = REFUSED[name]
    with pytest.raises(error, match=match):
        use(NODE)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modules_move_here_as_ever_while_a_master_is_open(master: Master) -> None:
    module = torch.jit.script(_mlp("cpu")).to(torch.float64)
    assert {each.dtype for each in module.parameters()} == {torch.float64}
    assert nn.LazyLinear(2).to(torch.float64).weight.dtype == torch.float64
    with torch.autocast("node", enabled=False):
        assert _x(NODE).sum().item() == pytest.approx(6)


def test_a_process_that_cannot_have_nodes_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_libraries", [])  # as if no master had been made here
    with monkeypatch.context() as patch:
        patch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "npu")
        with pytest.raises(shoal.UnsupportedOperation, match="already registered the device 'npu'"):
            device.register()
