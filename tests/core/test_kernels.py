"""The reduction kernels, against references made of single torch and numpy operations.

References are exact: sequential, element by element, in the accumulator's precision.  So results are
compared bit for bit (NaN aside: which payload survives is not the reference's to say).
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from shoal import _core, spec

kernels = _core.kernels
DTYPES = list(spec.DTYPE_CODES)
OPS = list(spec._ReductionCode)
LEGAL = [(dtype, op) for dtype in DTYPES for op in OPS if op in spec.LEGAL_REDUCTIONS.get(dtype, ())]
ILLEGAL = [(dtype, op) for dtype in DTYPES for op in OPS if (dtype, op) not in LEGAL]
LEVELS = range(kernels.highest_level() + 1)
HALVES = (torch.float16, torch.bfloat16)

every_legal_case = pytest.mark.parametrize(
    ("dtype", "op"), [pytest.param(d, o, id=f"{str(d)[6:]}-{o.name}") for d, o in LEGAL]
)


@pytest.fixture(autouse=True)
def _restore_level() -> Iterator[None]:
    yield
    kernels.set_level(kernels.highest_level())


def reduction(dtype: torch.dtype, op: int, divisor: int = 1) -> _core.kernels.Reduction:
    return kernels.Reduction(spec.DTYPE_CODES[dtype], int(op), divisor)


def address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


def addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def run(
    dtype: torch.dtype,
    op: int,
    sources: Sequence[torch.Tensor],
    destinations: Sequence[torch.Tensor],
    stream: bool = False,
) -> None:
    kernels.reduce(
        reduction(dtype, op, len(sources)),
        addresses(destinations),
        addresses(sources),
        sources[0].numel(),
        stream,
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def samples(dtype: torch.dtype, count: int, many: int, seed: int = 0) -> list[torch.Tensor]:
    """Arbitrary bit patterns: infinities, NaNs of all payloads, subnormals, both zeros, extreme ints."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for _ in range(many):
        raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        if dtype.is_floating_point or dtype.is_complex:
            half = torch.randn(count, dtype=torch.float64, generator=generator)
            other = torch.randn(count, dtype=torch.float64, generator=generator)
            tame = torch.complex(half, other) if dtype.is_complex else half
            wild = torch.rand(count, generator=generator) < 0.3
            tensors.append(torch.where(wild, raw.view(dtype), tame.to(dtype)))
        else:
            tensors.append(raw.view(dtype))  # bool: most bytes are neither 0 nor 1
    return tensors


def reference(dtype: torch.dtype, op: int, sources: Sequence[torch.Tensor]) -> torch.Tensor:
    if dtype == torch.bool:
        return _bool_reference(op, sources)
    if dtype.is_complex:
        return _complex_reference(dtype, op, sources)
    if dtype.is_floating_point:
        return _float_reference(dtype, op, sources)
    return _integer_reference(dtype, op, sources)


def _float_reference(dtype: torch.dtype, op: int, sources: Sequence[torch.Tensor]) -> torch.Tensor:
    wide = torch.float32 if dtype in HALVES else dtype
    values = [source.to(wide) for source in sources]
    step = {
        spec._ReductionCode.PRODUCT: torch.mul,
        spec._ReductionCode.MIN: torch.minimum,
        spec._ReductionCode.MAX: torch.maximum,
    }.get(spec._ReductionCode(op), torch.add)
    total = functools.reduce(step, values)
    if op == spec._ReductionCode.AVG:
        total = total / torch.tensor(len(sources), dtype=wide)
    return total.to(dtype)


def _complex_reference(dtype: torch.dtype, op: int, sources: Sequence[torch.Tensor]) -> torch.Tensor:
    if op == spec._ReductionCode.PRODUCT:
        re, im = sources[0].real, sources[0].imag
        for source in sources[1:]:
            c, d = source.real, source.imag
            re, im = re * c - im * d, re * d + im * c
        return torch.complex(re, im)
    parts = [torch.view_as_real(source) for source in sources]
    return torch.view_as_complex(_float_reference(parts[0].dtype, op, parts))


def _integer_reference(dtype: torch.dtype, op: int, sources: Sequence[torch.Tensor]) -> torch.Tensor:
    arrays = [source.numpy() for source in sources]
    kind = arrays[0].dtype
    if op == spec._ReductionCode.AVG:
        lowest, modulus = (0, 2**64) if kind.kind == "u" else (-(2**63), 2**64)
        columns = zip(*(array.tolist() for array in arrays), strict=True)
        sums = [(sum(column) - lowest) % modulus + lowest for column in columns]
        means = [abs(s) // len(arrays) * (1 if s >= 0 else -1) for s in sums]
        return torch.from_numpy(
            np.array([m % 2 ** (8 * kind.itemsize) for m in means], np.uint64).astype(kind)
        )
    step = {
        spec._ReductionCode.SUM: np.add,
        spec._ReductionCode.PRODUCT: np.multiply,
        spec._ReductionCode.MIN: np.minimum,
        spec._ReductionCode.MAX: np.maximum,
        spec._ReductionCode.BAND: np.bitwise_and,
        spec._ReductionCode.BOR: np.bitwise_or,
        spec._ReductionCode.BXOR: np.bitwise_xor,
    }[spec._ReductionCode(op)]
    return torch.from_numpy(functools.reduce(step, arrays))


def _bool_reference(op: int, sources: Sequence[torch.Tensor]) -> torch.Tensor:
    values = [source.view(torch.uint8) != 0 for source in sources]
    if op in (spec._ReductionCode.SUM, spec._ReductionCode.MAX, spec._ReductionCode.BOR):
        return functools.reduce(torch.logical_or, values)
    if op == spec._ReductionCode.BXOR:
        return functools.reduce(torch.logical_xor, values)
    return functools.reduce(torch.logical_and, values)


def assert_is_reference(result: torch.Tensor, expected: torch.Tensor, op: int) -> None:
    if result.is_complex():
        result, expected = torch.view_as_real(result), torch.view_as_real(expected)
    if not result.is_floating_point():
        assert torch.equal(bits(result), bits(expected))
        return
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.nan_to_num(nan=0), expected.nan_to_num(nan=0))
    numbers = ~expected.isnan()
    if op not in (
        spec._ReductionCode.MIN,
        spec._ReductionCode.MAX,
    ):  # torch does not say which of two zeros it returns
        assert torch.equal(result.signbit()[numbers], expected.signbit()[numbers])


# -- the vocabulary --------------------------------------------------------------------------------


def test_the_core_and_python_agree_on_codes_names_and_sizes() -> None:
    assert len(spec.DTYPE_CODES) == kernels.DTYPE_COUNT
    assert len(OPS) == kernels.REDOP_COUNT
    for dtype, code in spec.DTYPE_CODES.items():
        assert f"torch.{kernels.dtype_name(code)}" == str(dtype)
        assert kernels.itemsize(code) == dtype.itemsize
    for op in OPS:
        assert kernels.redop_name(op) == op.name


def test_the_core_and_python_agree_on_every_combination_of_dtype_and_reduction() -> None:
    assert (len(LEGAL), len(ILLEGAL)) == (103, 77)
    for dtype, op in LEGAL:
        assert kernels.legal(spec.DTYPE_CODES[dtype], op), (dtype, op)
    for dtype, op in ILLEGAL:
        assert not kernels.legal(spec.DTYPE_CODES[dtype], op), (dtype, op)


def test_codes_that_do_not_exist_are_answered_not_followed() -> None:
    assert not kernels.legal(200, 0)
    assert not kernels.legal(0, 200)
    assert kernels.itemsize(200) == 0
    assert (kernels.dtype_name(200), kernels.redop_name(200)) == ("dtype?", "op?")


def test_a_reduction_of_nothing_and_a_division_by_nobody_are_refused() -> None:
    x = torch.ones(4)
    with pytest.raises(ValueError, match="at least one source"):
        kernels.reduce(reduction(torch.float32, spec._ReductionCode.SUM), [address(x)], [], 4)
    with pytest.raises(ValueError, match="divisor"):
        kernels.reduce(reduction(torch.float32, spec._ReductionCode.AVG, 0), [address(x)], [address(x)], 4)


def test_a_level_that_the_cpu_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="levels 0 to"):
        kernels.set_level(kernels.highest_level() + 1)


# -- values ----------------------------------------------------------------------------------------


@every_legal_case
def test_every_reduction_is_exact_for_any_number_of_sources_and_destinations(
    dtype: torch.dtype, op: int
) -> None:
    for many in (1, 2, 3, 4, 5, 9):
        for count in (0, 1, 37, 1100 if many == 3 else 130):
            sources = samples(dtype, count, many, seed=many)
            expected = reference(dtype, op, sources)
            for outs in {1, 2, many}:
                results = [torch.empty(count, dtype=dtype) for _ in range(outs)]
                run(dtype, op, sources, results)
                for result in results:
                    assert torch.equal(bits(result), bits(results[0]))
                assert_is_reference(results[0], expected, op)


@every_legal_case
def test_no_instruction_set_slicing_or_streaming_shows_in_a_result(dtype: torch.dtype, op: int) -> None:
    shuffle = random.Random(1)
    count = 9000 // dtype.itemsize
    for many in (2, 4, 6):
        sources = samples(dtype, count, many, seed=many)
        whole = torch.empty(count, dtype=dtype)
        kernels.set_level(0)
        run(dtype, op, sources, [whole])
        for level in LEVELS:
            kernels.set_level(level)
            for stream in (False, True):
                results = [torch.empty(count, dtype=dtype) for _ in range(many)]
                cuts = [0, *sorted(shuffle.sample(range(count), 3)), count]
                for begin, end in itertools.pairwise(cuts):
                    run(
                        dtype,
                        op,
                        [s[begin:end] for s in sources],
                        [r[begin:end] for r in results],
                        stream=stream,
                    )
                for result in results:
                    assert torch.equal(bits(result), bits(whole)), (level, stream)


@every_legal_case
def test_in_place_gives_the_same_as_out_of_place(dtype: torch.dtype, op: int) -> None:
    count = 6000 // dtype.itemsize
    for many in (1, 2, 3, 5):
        sources = samples(dtype, count, many)
        expected = torch.empty(count, dtype=dtype)
        run(dtype, op, sources, [expected])
        for chosen in (list(range(many)), [many - 1], [many - 1, 0][:many]):
            buffers = [source.clone() for source in sources]
            run(dtype, op, buffers, [buffers[k] for k in chosen], stream=True)
            for k in chosen:
                assert torch.equal(bits(buffers[k]), bits(expected))


@every_legal_case
def test_partials_combined_in_order_and_finished_equal_one_pass(dtype: torch.dtype, op: int) -> None:
    count, many = 5000 // dtype.itemsize, 5
    sources = samples(dtype, count, many)
    expected = torch.empty(count, dtype=dtype)
    run(dtype, op, sources, [expected])
    plan = reduction(dtype, op, many)
    width = kernels.accumulator_size(plan)

    def accumulator() -> torch.Tensor:
        return torch.empty(count * width, dtype=torch.uint8)

    for level in LEVELS:
        kernels.set_level(level)
        first = accumulator()  # of three sources; the others have one each
        kernels.reduce_partial(plan, address(first), addresses(sources[:3]), count)
        single = [accumulator() for _ in sources[3:]]
        for acc, source in zip(single, sources[3:], strict=True):
            kernels.reduce_partial(plan, address(acc), [address(source)], count)
        result = torch.empty(count, dtype=dtype)
        kernels.finish_partials(plan, address(result), addresses([first, *single]), count)
        assert torch.equal(bits(result), bits(expected))
        kernels.combine_partials(plan, address(first), addresses([first, *single]), count)
        kernels.finish_partials(plan, address(result), [address(first)], count)
        assert torch.equal(bits(result), bits(expected))


def test_accumulators_are_as_wide_as_the_sum_needs() -> None:
    for dtype, op in LEGAL:
        expected = dtype.itemsize
        if dtype in HALVES:
            expected = 4
        elif op == spec._ReductionCode.AVG and not dtype.is_floating_point and not dtype.is_complex:
            expected = 8
        assert kernels.accumulator_size(reduction(dtype, op)) == expected, (dtype, op)


# -- what is promised in particular ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_precision_number_survives_and_every_nan_becomes_the_canonical_one(
    dtype: torch.dtype,
) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    canonical = torch.where(every.isnan(), torch.tensor(float("nan"), dtype=dtype), every)
    for level in LEVELS:
        kernels.set_level(level)
        result = torch.empty_like(every)
        run(dtype, spec._ReductionCode.SUM, [every], [result])
        assert torch.equal(bits(result), bits(canonical)), level


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_is_rounded_once_and_to_nearest_even(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    wild = torch.randint(-(2**31), 2**31, (50_000,), generator=generator).to(torch.int32).view(torch.float32)
    normal = torch.randn(50_000, generator=generator) * 10.0 ** torch.randint(
        -9, 6, (50_000,), generator=generator
    )
    ties = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    ties = (ties[1:] + ties[:-1]) / 2  # halfway between neighbours
    sums = torch.cat([wild, normal, ties])
    plan = reduction(dtype, spec._ReductionCode.SUM)
    for level in LEVELS:
        kernels.set_level(level)
        result = torch.empty(sums.numel(), dtype=dtype)
        kernels.finish_partials(plan, address(result), [address(sums)], sums.numel())
        assert_is_reference(result, sums.to(dtype), spec._ReductionCode.SUM)


def test_half_precision_sums_do_not_stall() -> None:
    sources = [torch.full((1,), 2048.0, dtype=torch.float16)] + [torch.ones(1, dtype=torch.float16)] * 4
    result = torch.empty(1, dtype=torch.float16)
    run(torch.float16, spec._ReductionCode.SUM, sources, [result])
    assert result.item() == 2052.0  # rounding after each addition would stay at 2048


def test_minimum_and_maximum_propagate_nan_from_any_source() -> None:
    nan = float("nan")
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        for op in (spec._ReductionCode.MIN, spec._ReductionCode.MAX):
            for place in range(3):
                sources = [torch.full((40,), float(k), dtype=dtype) for k in range(3)]
                sources[place][::2] = nan
                result = torch.empty(40, dtype=dtype)
                run(dtype, op, sources, [result])
                assert result[::2].isnan().all()
                assert (result[1::2] == (0 if op == spec._ReductionCode.MIN else 2)).all()


def test_of_two_equal_zeros_the_earlier_source_wins() -> None:
    plus, minus = torch.zeros(40), -torch.zeros(40)
    for level in LEVELS:
        kernels.set_level(level)
        for op in (spec._ReductionCode.MIN, spec._ReductionCode.MAX):
            for first, second in ((plus, minus), (minus, plus)):
                result = torch.empty(40)
                run(torch.float32, op, [first, second], [result])
                assert torch.equal(bits(result), bits(first))


def test_bools_are_stored_as_zero_or_one() -> None:
    sources = samples(torch.bool, 500, 3)
    for op in spec.LEGAL_REDUCTIONS[torch.bool]:
        result = torch.empty(500, dtype=torch.bool)
        run(torch.bool, op, sources, [result])
        assert result.view(torch.uint8).max() <= 1


def test_a_thread_that_flushes_subnormals_gets_the_same_result() -> None:
    tiny = torch.full((100,), 1e-40)
    results = [torch.empty(100) for _ in range(2)]
    acc = torch.empty(100)
    plan = reduction(torch.float32, spec._ReductionCode.SUM)
    supported = torch.set_flush_denormal(True)
    try:
        run(torch.float32, spec._ReductionCode.SUM, [tiny, tiny], results)
        kernels.reduce_partial(plan, address(acc), addresses([tiny, tiny]), 100)
        still_flushing = (tiny * 1.0 == 0).all().item()
    finally:
        torch.set_flush_denormal(False)
    assert still_flushing == supported
    assert torch.equal(results[0], tiny * 2)
    assert torch.equal(acc, tiny * 2)
    assert (results[0] > 0).all()


# -- memory ----------------------------------------------------------------------------------------


def test_copies_of_any_length_at_any_offset_touch_nothing_else() -> None:
    source = torch.randint(0, 256, (5000,), dtype=torch.uint8)
    for level in LEVELS:
        kernels.set_level(level)
        for stream in (False, True):
            for start, length in ((0, 4096), (1, 63), (63, 2), (7, 1), (5, 0), (33, 4500), (64, 64)):
                target = torch.full((5000,), 255, dtype=torch.uint8)
                kernels.copy(address(target) + start, address(source) + 3, length, stream)
                expected = torch.full((5000,), 255, dtype=torch.uint8)
                expected[start : start + length] = source[3 : 3 + length]
                assert torch.equal(target, expected), (level, stream, start, length)


def test_nothing_beyond_the_range_is_written() -> None:
    for level in LEVELS:
        kernels.set_level(level)
        for dtype in (torch.float16, torch.float32, torch.int8):
            for stream in (False, True):
                sources = samples(dtype, 3000, 2)
                results = [torch.zeros(3000, dtype=dtype) for _ in range(2)]
                inner = slice(11, 2345)
                run(
                    dtype,
                    spec._ReductionCode.SUM,
                    [s[inner] for s in sources],
                    [r[inner] for r in results],
                    stream,
                )
                for result in results:
                    assert not bits(result[:11]).any()
                    assert not bits(result[2345:]).any()
