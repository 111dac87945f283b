"""Elementary functions: error against high precision, edge cases, and the same bits everywhere.

Every fp32 input is examined by benchmarks/exhaustive_elementary.py; here a millionth part as many,
by the same code, plus every place where a function changes its course.
"""

import functools
import math
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import mpmath
import numba
import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.exhaustive_elementary import Case, cases, exact_error, examine, measure
from engine.numerics import elementary, random
from engine.numerics.elementary import cosine_decay, pow_int64
from engine.numerics.errors import NumericsDomainError

CASES = cases()
STRIDE = 4099

# Bounds in ulp and absolute per segment of the domain, from docs/elementary.md. Where the function
# passes through zero (the derivative of GELU at -0.7525) or below 2^-126, only the absolute counts.
FAR = math.inf
BOUNDS: dict[str, tuple[tuple[float, float], ...]] = {
    "exp32": ((1.0, FAR),),
    "log32": ((0.88, FAR),),
    "tanh32": ((2.5, 2.0**-23),),
    "gelu32": ((FAR, 2.0**-40), (36.0, 2.0**-24), (3.1, FAR)),
    "gelu_grad32": ((FAR, 2.0**-38), (38.0, 2.0**-23), (FAR, 2.0**-23), (4.6, 2.0**-21)),
    "log64": ((0.9, FAR),),
    "cos64": ((1.05, 2.0**-52),),
    "sin64": ((1.07, 2.0**-52),),
}

# BLAKE3 of the outputs for every 4099th fp32 bit pattern. A change here changes every trained bit.
GOLDEN = {
    "exp32": "730b2b67e2c475488514c3b8dfab47f321e2a5b92bb1fd2b0c75b40c043023df",
    "log32": "e66f06c7a0945addc652d2965a3b9d31293b6b02f28056d5dc2a38ae68aa9a40",
    "tanh32": "a699d538d64587cbc54b3357f53ac515799e56cfa347f279b3ae99b7079ea2b7",
    "gelu32": "f5300c017bf1eeb4d154d9a67a7fab379a9efc71b95c64f8cea68b2c90aceecf",
    "gelu_grad32": "0018b4c97f56cb402eb70522c97e516d84f78fb7b999d85c8e39780b52f78be5",
    "log64": "3294235279d683b5a74b1f8ff032cf5a7312f090f97b0db228cbb5370f754574",
    "cos64": "c44f8cbeb1c1bf669e168998c4672f54423d258f523e5f79cc74977ce0978c6e",
    "sin64": "8955c6acd9240ba30f6574dbba4c41613d67f910ee7b8353b4a4c5ac0c6376d5",
}
GOLDEN_HOST = "24e789ef3e9946d596ee924c72f8edd7a4caf8ff201e273c61c431a40db252ab"

EXTENDED = np.finfo(np.longdouble).nmant >= 63


def measurable(name: str) -> Any:
    """A function whose error the fast reference can resolve on this platform."""
    narrow = pytest.mark.skipif(name.endswith("64") and not EXTENDED, reason="long double is no wider than float64")
    return pytest.param(name, marks=narrow)


each_measurable_function = pytest.mark.parametrize("name", [measurable(name) for name in CASES])
each_function = pytest.mark.parametrize("name", list(CASES))


@each_function
def test_sampled_inputs_stay_within_the_documented_error_and_keep_their_bits(name: str) -> None:
    found = measure(CASES[name], STRIDE)
    for segment, (ulp, absolute) in zip(found["segments"], BOUNDS[name], strict=True):
        assert segment["inputs"] > 1000
        assert segment["worst_ulp"] <= ulp, segment
        assert segment["worst_absolute"] <= absolute, segment
    assert found["blake3"] == GOLDEN[name]


def edge_inputs(case: Case) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Bits around every power of two, the ends of all segments, zero, infinity, and NaNs."""
    constants = [value for value in vars(elementary).values() if isinstance(value, np.float32)]
    ends = [np.float32(end) for segment in case.segments for end in segment]
    halves = [np.float32((k + 0.5) * math.log(2)) for k in range(-128, 129)]
    centres = [int(value.view(np.uint32)) for value in (*constants, *ends, *halves)]
    centres += [exponent << 23 for exponent in range(256)]
    spread = {(centre + d) % 2**32 for centre in centres for d in range(-3, 4)}
    both = spread | {bits ^ 0x80000000 for bits in spread}
    nans = {0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x7FC12345}
    return np.array(sorted(both | nans), dtype=np.uint32)


@each_measurable_function
def test_edges_stay_within_the_documented_error(name: str) -> None:
    _, worst = examine(CASES[name], edge_inputs(CASES[name]))
    for segment, (ulp, absolute) in zip(worst, BOUNDS[name], strict=True):
        assert segment.inputs > 0
        assert segment.ulp <= ulp, segment
        assert segment.absolute <= absolute, segment


@each_measurable_function
def test_the_fast_reference_agrees_with_high_precision(name: str) -> None:
    """The float64 (long double) reference is itself an oracle only because of this."""
    case = CASES[name]
    generator = np.random.Generator(np.random.PCG64(7))
    for low, high in case.segments:
        ends = np.clip(np.array([low, high]), -100.0, 100.0)
        for x in generator.uniform(*ends, 60).astype(np.float32):
            _, (*_, found) = examine(
                Case(**{**vars(case), "segments": ((float(x), float(x)),)}),
                np.array([x]).view(np.uint32),
            )
            ulp, _ = exact_error(case, float(x))
            assert found.ulp == pytest.approx(ulp, abs=2e-3)


def evaluate(name: str, *values: float) -> list[float]:
    case = CASES[name]
    return [float(y) for y in case(np.array(values, dtype=case.dtype))]


def test_exact_values() -> None:
    inf = math.inf
    assert evaluate("exp32", 0.0, -0.0, -inf, -87.33655, 88.72284) == [1.0, 1.0, 0.0, 0.0, inf]
    assert evaluate("log32", 1.0, 0.0, -0.0, inf) == [0.0, -inf, -inf, inf]
    assert evaluate("tanh32", 0.0, 10.0, -10.0, inf, 2.0**-149) == [0.0, 1.0, -1.0, 1.0, 2.0**-149]
    assert evaluate("gelu32", 0.0, 3e38, -3e38, 20.0) == [0.0, float(np.float32(3e38)), 0.0, 20.0]
    assert evaluate("gelu_grad32", 0.0, 3e38, -3e38) == [0.5, 1.0, 0.0]
    assert evaluate("log64", 1.0) == [0.0]
    assert evaluate("cos64", 0.0) == [1.0]


@pytest.mark.parametrize("name", ["tanh32", "sin64"])
def test_odd_functions_are_odd_in_every_bit(name: str) -> None:
    case = CASES[name]
    x = np.arange(1, 1 << 31, 20011).astype(np.uint32).view(np.float32)
    x = x[x <= 4.0].astype(case.dtype)
    assert x.size > 50_000
    np.testing.assert_array_equal(case(-x), -case(x), strict=True)
    assert np.all(np.signbit(case(-x)) != np.signbit(case(x)))


def test_tanh_keeps_the_sign_of_zero() -> None:
    assert [math.copysign(1, y) for y in evaluate("tanh32", 0.0, -0.0)] == [1.0, -1.0]


def test_float64_inputs_between_fp32_numbers() -> None:
    """The normal variates give log, sin and cos full float64 arguments, the worst near pi/2."""
    generator = np.random.Generator(np.random.PCG64(11))
    angles = generator.uniform(-math.pi, math.pi, 2000)
    quarter = math.pi / 2
    near = [quarter * n + d for n in (-2, -1, 1, 2) for d in (0.0, 1e-15, -1e-12, 1e-6)]
    uniform = np.concatenate([generator.uniform(0, 1, 2000), [2.0**-53, 1 - 2.0**-53]])
    for name, inputs in (
        ("cos64", np.concatenate([angles, near])),
        ("sin64", np.concatenate([angles, near])),
        ("log64", uniform),
    ):
        case = CASES[name]
        outputs = case(inputs)
        with mpmath.workdps(60):
            for x, y in zip(inputs, outputs, strict=True):
                exact = case.exact(mpmath.mpf(float(x)))
                error = abs(mpmath.mpf(float(y)) - exact) / math.ulp(float(exact))
                assert error <= 1.1, (name, x)


@pytest.mark.parametrize("total", [1, 2, 3, 7, 1000, 4097, 10**6, 2**53 - 1])
def test_cosine_decay(total: int) -> None:
    steps = sorted({min(total, k * total // 200 + k % 3) for k in range(201)})
    values = [cosine_decay(t, total) for t in steps]
    assert cosine_decay(0, total) == 1.0
    assert cosine_decay(total, total) == 0.0
    assert all(a >= b for a, b in pairwise(values))
    for t, value in zip(steps, values, strict=True):
        assert value + cosine_decay(total - t, total) == 1.0
        with mpmath.workdps(60):
            exact = mpmath.sin(mpmath.pi * (total - t) / (2 * mpmath.mpf(total))) ** 2
            assert abs(value - exact) <= 4 * math.ulp(float(exact))
    if total % 2 == 0:
        assert cosine_decay(total // 2, total) == 0.5


@pytest.mark.parametrize(("t", "total"), [(-1, 4), (5, 4), (0, 0), (0, 2**53), (0, -1)])
def test_cosine_decay_refuses_what_it_is_not_defined_for(t: int, total: int) -> None:
    with pytest.raises(NumericsDomainError, match=re.escape(f"found t={t}, total={total}")):
        cosine_decay(t, total)


@given(st.floats(0.0, 1.0, allow_subnormal=False), st.integers(0, 10**7))
def test_power_is_correctly_rounded(base: float, exponent: int) -> None:
    with mpmath.workprec(400):
        exact = mpmath.mpf(base) ** exponent
        expected = 0.0 if exact < mpmath.mpf(2) ** -1022 else float(exact)
    assert pow_int64(base, exponent) == expected


@pytest.mark.parametrize("base", [0.9, 0.95, 0.99, 0.999, 0.9999])
def test_power_for_the_bases_of_adam(base: float) -> None:
    for exponent in (*range(1, 200), 1000, 12_000, 600_000):
        with mpmath.workprec(400):
            exact = mpmath.mpf(base) ** exponent
            expected = 0.0 if exact < mpmath.mpf(2) ** -1022 else float(exact)
        assert pow_int64(base, exponent) == expected


@pytest.mark.parametrize(("base", "exponent"), [(-0.1, 2), (1.1, 2), (0.5, -1), (math.nan, 1), (math.inf, 1)])
def test_power_refuses_what_it_is_not_defined_for(base: float, exponent: int) -> None:
    with pytest.raises(NumericsDomainError, match="0 <= base <= 1 and exponent >= 0"):
        pow_int64(base, exponent)


def host_digest() -> str:
    values = [cosine_decay(t, 12_000) for t in range(0, 12_001)]
    values += [pow_int64(base, n) for base in (0.9, 0.95, 0.999) for n in range(1, 2000)]
    return blake3(np.array(values, dtype="<f8").tobytes()).hexdigest()


def test_host_functions_keep_their_bits() -> None:
    assert host_digest() == GOLDEN_HOST


def test_a_generic_processor_gives_the_same_bits() -> None:
    """Compiled for the oldest processor of this architecture, without wide vectors."""
    program = (
        "from benchmarks.exhaustive_elementary import cases, measure\n"
        f"for case in cases().values(): print(case.name, measure(case, {STRIDE})['blake3'])\n"
    )
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    root = Path(__file__).resolve().parents[2]
    output = subprocess.run(
        [sys.executable, "-c", program],
        cwd=root,
        env=environment,
        capture_output=True,
        check=True,
        encoding="utf-8",
    ).stdout
    assert dict(line.split() for line in output.splitlines()) == GOLDEN


# Mnemonics of contracted multiply-adds on x86-64 and aarch64.
CONTRACTED = {
    "host": re.compile(r"\bvfn?m(?:add|sub)\w*|\bvfm\w+|\bfn?m(?:add|sub)\b|\bfml[as]\b"),
    "aarch64-unknown-linux-gnu": re.compile(r"\bfn?m(?:add|sub)\b|\bfml[as]\b"),
}
LIBRARY = re.compile(r"@(?:llvm\.)?(?:exp|log|tanh|sin|cos|pow|fma|fmuladd)\w*[.(]")


@functools.cache
def compiled_kernels() -> dict[str, Any]:
    """Every loop, compiled in this process so that its code can be looked at."""
    loops = {name: case.loop for name, case in CASES.items()}
    for name, case in CASES.items():
        case(np.zeros(1, dtype=case.dtype))
        assert loops[name].signatures  # type: ignore[attr-defined]
    normal = numba.njit(nogil=True, error_model="numpy")(random._normal_kernel.py_func)  # type: ignore[attr-defined]
    normal(np.zeros(3, np.float32), np.uint32(1), np.uint32(2), np.uint32(3), 1.0, np.int64(1))
    return {**loops, "normal": normal}


def ir_of(compiled: Any) -> str:
    return next(iter(compiled.inspect_llvm().values()))


def assembly(compiled: Any, triple: str) -> str:
    if triple == "host":
        return next(iter(compiled.inspect_asm().values()))
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    source = ir_of(compiled)
    # Not for this target: its description, and the atomics of Numba's reference counts.
    source = re.sub(r"^target .*$|\"target-(?:cpu|features)\"=\"[^\"]*\"", "", source, flags=re.M)
    source = re.sub(r"= (?:tail )?call i8 @llvm\.x86\.atomic.*$", "= add i8 0, 0", source, flags=re.M)
    module = llvm.parse_assembly(source)
    module.triple = triple
    machine = llvm.Target.from_triple(triple).create_target_machine(opt=3, features="+fp-armv8,+neon")
    module.data_layout = str(machine.target_data)
    return machine.emit_assembly(module)


@pytest.mark.parametrize("triple", list(CONTRACTED))
def test_no_multiply_add_is_contracted(triple: str) -> None:
    for name, compiled in compiled_kernels().items():
        found = CONTRACTED[triple].search(assembly(compiled, triple))
        assert found is None, (name, found)


@pytest.mark.parametrize("triple", list(CONTRACTED))
def test_the_search_for_contraction_finds_it_where_it_is_allowed(triple: str) -> None:
    if triple == "host" and not llvm.get_host_cpu_features().get("fma", "aarch64" in llvm.get_process_triple()):
        pytest.skip("this processor has no fused multiply-add")

    @numba.njit(fastmath={"contract"})
    def contracted(x: Any, y: Any) -> None:
        for i in range(x.size):
            y[i] = x[i] * x[i] + y[i]

    contracted(np.ones(8, np.float32), np.ones(8, np.float32))
    assert CONTRACTED[triple].search(assembly(contracted, triple))


def test_no_platform_function_is_called() -> None:
    for name, compiled in compiled_kernels().items():
        found = LIBRARY.search(ir_of(compiled))
        assert found is None, (name, found)
        assert not re.search(r"\bf(?:add|sub|mul|div) (?:fast|contract|reassoc)", ir_of(compiled))


def test_the_search_for_platform_functions_finds_them() -> None:
    @numba.njit
    def platform(x: Any, y: Any) -> None:
        for i in range(x.size):
            y[i] = math.exp(x[i])

    platform(np.ones(8), np.ones(8))
    assert LIBRARY.search(ir_of(platform))


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith("32")])
def test_loops_over_fp32_functions_vectorise(name: str) -> None:
    compiled = compiled_kernels()[name]
    assert re.search(r"fmul <\d+ x float>", ir_of(compiled))
