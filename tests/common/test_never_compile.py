"""Functions that torch.compile leaves alone."""

from __future__ import annotations

import pytest
import torch

from shoal.common.never_compile import never_compile


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_code_neither_traces_nor_compiles_such_functions() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph

    def helper(x: torch.Tensor) -> torch.Tensor:
        return x * 3 * 3

    @never_compile
    def ours(x: torch.Tensor) -> torch.Tensor:
        return helper(x) * 3

    def program(x: torch.Tensor) -> torch.Tensor:
        x.register_hook(ours)
        y = ours(x + 1) + 1
        y.sum().backward()
        return y

    x = torch.ones(2, requires_grad=True)
    y = torch.compile(program, backend=backend)(x)
    assert y.tolist() == [55.0] * 2
    assert x.grad is not None
    assert x.grad.tolist() == [27.0 * 27.0] * 2
    assert graphs
    assert max(graphs) <= 2  # the program's own additions and its sum
    torch._dynamo.reset()


class Members:
    __module__ = "shoal.example"

    def method(self) -> None: ...

    @classmethod
    def of_class(cls) -> None: ...

    @staticmethod
    def static() -> None: ...

    @property
    def value(self) -> None: ...


def test_all_kinds_of_members_of_a_class_are_marked() -> None:
    never_compile(Members)
    functions = [Members.method, Members.of_class.__func__, Members.static, vars(Members)["value"].fget]
    assert all(function._torchdynamo_disable for function in functions)
