"""Runs a script of torch.distributed so that it cannot hang: python dropped_reducer.py SCRIPT ARGUMENT...

A script that drops its DistributedDataParallel last may wait for ever (torch 2.13).  torch's reducer holds
the process group and is freed with the GIL held: it joins Gloo's threads, and one of them may be about to
free the tensors of the operation that ended last, for which it needs the GIL.  Here the reducer goes before
``destroy_process_group``, which frees the group without the GIL.
"""

from __future__ import annotations

import gc
import runpy
import sys
import warnings

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

_destroy = dist.destroy_process_group


def _destroy_without_reducers() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has objects whose class is not to be asked for
        models = [thing for thing in gc.get_objects() if isinstance(thing, DistributedDataParallel)]
    for model in models:
        model.__dict__.pop("logger")  # which holds the reducer too
        model.__dict__.pop("reducer")
    _destroy()


if __name__ == "__main__":
    dist.destroy_process_group = _destroy_without_reducers
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
