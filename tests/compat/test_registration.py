"""The backend makes itself known, and never stands in the way of ``import torch``."""

from __future__ import annotations

import sys

import pytest
import torch.distributed as dist
from torch.distributed.rendezvous import _rendezvous_handlers

from shoal.compat.registration import EnvHandler, register


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
    assert "does not accept the backend 'shoal': AttributeError" in caplog.text


def test_a_torch_that_refuses_the_backend_can_be_imported(monkeypatch, caplog):
    monkeypatch.setattr(dist.Backend, "_plugins", {})
    monkeypatch.setattr(dist.Backend, "register_backend", refuse)
    register()
    assert "AssertionError: SHOAL c10d backend already exist" in caplog.text


def test_torchs_handler_for_env_is_wrapped_once(monkeypatch):
    monkeypatch.setitem(_rendezvous_handlers, "env", refuse)
    register()
    handler = _rendezvous_handlers["env"]
    assert isinstance(handler, EnvHandler)
    register()
    assert _rendezvous_handlers["env"] is handler


@pytest.mark.parametrize("missing", ["table", "scheme"])
def test_the_backend_is_known_to_a_torch_that_keeps_its_handlers_elsewhere(monkeypatch, caplog, missing):
    backends = {}
    monkeypatch.setattr(dist.Backend, "_plugins", backends)
    monkeypatch.setattr(dist.Backend, "register_backend", lambda name, *_, **__: backends.update({name: 1}))
    if missing == "table":
        monkeypatch.delattr(sys.modules["torch.distributed.rendezvous"], "_rendezvous_handlers")
    else:
        monkeypatch.delitem(_rendezvous_handlers, "env")
    register()
    assert backends == {"shoal": 1}
    assert "init_process_group('shoal') does not read the variables of Slurm and MPI: " in caplog.text


def test_a_torch_whose_functions_have_other_names_uses_its_own_handler(monkeypatch):
    """The backend is read from the frame of init_process_group; without it torch's handler decides."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    asked = []
    handler = EnvHandler(lambda url, **options: asked.append((url, options)))
    backend = "shoal"  # noqa: F841  # as in the frame of torch's function
    handler("env://?rank=1", timeout=3)
    assert asked == [("env://?rank=1", {"timeout": 3})]
