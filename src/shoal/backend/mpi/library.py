"""The functions, handles and reductions of the MPI library, for the core."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType
from typing import Any

import torch

from ... import _core
from ...spec import AVG, BAND, BOR, BXOR, DTYPE_CODES, MAX, MIN, PREMUL_SUM, PRODUCT, SUM


def core_library(mpi: ModuleType) -> _core.MpiLibrary:
    """Return the library of ``mpi``, the module ``mpi4py.MPI``, for the core.

    The core calls MPI's functions by their addresses: shoal is compiled without an MPI library, and mpi4py is
    linked to the one that it has found.
    """
    symbols = ctypes.CDLL(mpi.__file__)  # with those of the libraries to which the module is linked
    counting, others = _core.MpiLibrary.names()
    functions = {}
    for name in (*counting, *(f"{name}_c" for name in counting), *others):
        if hasattr(symbols, name):
            functions[name] = ctypes.cast(getattr(symbols, name), ctypes.c_void_p).value or 0
    return _core.MpiLibrary.make(
        functions, mpi._sizeof(mpi.COMM_SELF), int(mpi.IN_PLACE), mpi.ANY_SOURCE, mpi.ANY_TAG,
        handle(mpi, mpi.COMM_SELF),
    )  # fmt: skip


def handle(mpi: ModuleType, value: Any) -> int:
    """Return the handle of a communicator, datatype or operation: an int of C or the bits of a pointer."""
    return int.from_bytes(ctypes.string_at(mpi._addressof(value), mpi._sizeof(value)), sys.byteorder)


def datatypes(mpi: ModuleType) -> dict[int, int]:
    """Return the datatypes in which data is moved, by the bytes of an element."""
    types = {
        1: mpi.BYTE,
        2: mpi.INT16_T,
        4: mpi.INT32_T,
        8: mpi.INT64_T,
        16: mpi.C_DOUBLE_COMPLEX,
    }
    return {size: handle(mpi, type_) for size, type_ in types.items()}


def reductions(mpi: ModuleType) -> dict[tuple[int, int], tuple[int, int, bool]]:
    """Return the reductions of MPI that mean the same as those of shoal.

    By the codes of dtype and reduction: datatype, operation, and whether shoal divides by the number of
    ranks.
    """
    floats = {torch.float32: mpi.FLOAT, torch.float64: mpi.DOUBLE}
    numbers = floats | {torch.complex64: mpi.C_FLOAT_COMPLEX, torch.complex128: mpi.C_DOUBLE_COMPLEX}
    wide = {
        torch.int32: mpi.INT32_T, torch.int64: mpi.INT64_T,
        torch.uint32: mpi.UINT32_T, torch.uint64: mpi.UINT64_T,
    }  # fmt: skip
    integers = wide | {
        torch.int8: mpi.INT8_T, torch.int16: mpi.INT16_T,
        torch.uint8: mpi.UINT8_T, torch.uint16: mpi.UINT16_T,
    }  # fmt: skip
    table = {}
    for ops, types in (
        ({SUM: mpi.SUM, PRODUCT: mpi.PROD}, numbers | wide),  # Open MPI saturates narrower sums
        ({AVG: mpi.SUM, PREMUL_SUM: mpi.SUM}, numbers),  # averages of integers do not overflow
        # MPI does not say what MIN and MAX of NaN are.
        ({MIN: mpi.MIN, MAX: mpi.MAX, BAND: mpi.BAND, BOR: mpi.BOR, BXOR: mpi.BXOR}, integers),
    ):
        for op, of_mpi in ops.items():
            for dtype, type_ in types.items():
                key = DTYPE_CODES[dtype], op.code
                table[key] = handle(mpi, type_), handle(mpi, of_mpi), op is AVG
    return table
