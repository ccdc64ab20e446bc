"""The backend makes itself known, and never stands in the way of ``import torch``."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from shoal.compat.registration import register


def test_the_backend_is_known_once_shoal_is_imported_beside_torch():
    register()
    assert dist.Backend("shoal") == "shoal"
    assert dist.is_backend_available("shoal")


def refuse(*args: object, **kwargs: object) -> None:
    raise AssertionError("SHOAL c10d backend already exist")


@pytest.mark.parametrize("missing", ["_plugins", "register_backend"])
def test_a_torch_that_keeps_its_backends_elsewhere_can_be_imported(monkeypatch, caplog, missing):
    monkeypatch.setattr(dist.Backend, "_plugins", {})
    monkeypatch.delattr(dist.Backend, missing)
    register()
    assert "does not take the backend 'shoal': AttributeError" in caplog.text


def test_a_torch_that_refuses_the_backend_can_be_imported(monkeypatch, caplog):
    monkeypatch.setattr(dist.Backend, "_plugins", {})
    monkeypatch.setattr(dist.Backend, "register_backend", refuse)
    register()
    assert "AssertionError: SHOAL c10d backend already exist" in caplog.text
