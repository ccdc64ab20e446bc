"""Finding backends by name."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import pytest

import shoal
from shoal import UsageError, register_backend
from shoal.backend import registry
from shoal.backend.registry import backend_factory, backend_names, unregister_backend
from tests.support.store_backend import StoreBackend


def test_a_registered_backend_is_found(store_backend: str) -> None:
    assert backend_factory(store_backend) is StoreBackend
    assert store_backend in backend_names()


def test_a_name_is_given_once(store_backend: str) -> None:
    for name in (store_backend, "native", "mpi"):
        with pytest.raises(UsageError, match=f"named '{name}' is registered already"):
            register_backend(name, StoreBackend)


def test_an_unknown_name_lists_the_known_ones(store_backend: str) -> None:
    with pytest.raises(UsageError, match=r"unknown backend 'gloo2'; known backends: .*mpi, native, .*store"):
        backend_factory("gloo2")


def test_an_unknown_name_of_the_variable_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_BACKEND", "pigeon")
    with pytest.raises(UsageError, match=r"unknown backend 'pigeon' \(SHOAL_BACKEND\); known backends: "):
        shoal.init()


def test_the_backend_over_mpi_is_imported_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ModuleType("shoal.backend.mpi.channel")
    engine.MpiBackend = StoreBackend  # type: ignore[attr-defined]
    monkeypatch.setattr(registry, "import_module", {engine.__name__: engine}.__getitem__)
    assert backend_factory("mpi") is StoreBackend


def test_taking_back_twice_is_harmless() -> None:
    unregister_backend("never-there")


def test_a_package_brings_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("brought", "tests.support.store_backend:StoreBackend", "shoal.backends")

    def entry_points(group: str, **how: Any) -> list[EntryPoint]:
        assert group == "shoal.backends"
        return [entry] if how.get("name", "brought") == "brought" else []

    monkeypatch.setattr(registry, "entry_points", entry_points)
    assert backend_factory("brought") is StoreBackend
    assert {"brought", "native"} <= {*backend_names()}


def test_a_name_may_list_a_backend_for_each_device() -> None:
    assert backend_factory("cpu:native") is backend_factory("native")
    assert backend_factory("cuda:nccl, cpu:native") is backend_factory("nccl")
    with pytest.raises(UsageError, match="unknown backend 'cpu:native,cuda:gloo'"):
        backend_factory("cpu:native,cuda:gloo")
