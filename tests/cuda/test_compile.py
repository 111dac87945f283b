"""Every kernel compiles for every architecture that the project supports; no GPU is needed."""

import pytest

from engine.backends.cuda import compiler
from engine.backends.cuda.mixed import hopper_activation, hopper_norm, weight_gradients
from engine.backends.cuda.mixed.hopper_attention import SHAPES, SHORT_WIDTH, kernels_unit
from engine.backends.cuda.mixed.weight_gradients import LARGE, MOST_CHAINS, SMALL, Form
from engine.backends.cuda.sources import UNITS, Unit, constants, headers, source

MACROS: dict[str, list[dict[str, int]]] = {
    "attention": [{"DP": 64, "STAGES": 1, "COLUMNS": 1, "WARPGROUP": 0}],
    "linear": [{"STAGES": 2}],
    "linear_quantise": [{}],
}
# Where kernels take another path than the oldest architecture does.
WIDEST: list[tuple[str, dict[str, int], int]] = [
    ("linear", {"STAGES": 4}, 90),
    ("attention", {"DP": 32, "STAGES": 2, "COLUMNS": 1, "WARPGROUP": 1}, 90),
    ("attention", {"DP": 64, "STAGES": 2, "COLUMNS": 1, "WARPGROUP": 1}, 90),
    ("attention", {"DP": 256, "STAGES": 2, "COLUMNS": 0, "WARPGROUP": 0}, 90),
    ("attention", {"DP": 64, "STAGES": 1, "COLUMNS": 0, "WARPGROUP": 0}, 75),
    ("layernorm", {"VECTORS": 8}, 90),
]

needs_compiler = pytest.mark.skipif(not compiler.compiler_available(), reason=f"{compiler.PACKAGE} is not installed")


# The tier prod needs bfloat16.
MIXED_CAPABILITIES = [c for c in compiler.COMPUTE_CAPABILITIES if c >= 80]
MIXED_UNITS = [unit for unit in sorted(UNITS) if unit.endswith("_mixed")]
MIXED = [(unit, bf16, capability) for unit in MIXED_UNITS for bf16 in (0, 1) for capability in MIXED_CAPABILITIES]


@needs_compiler
@pytest.mark.parametrize(("unit", "bf16", "capability"), MIXED)
def test_units_of_the_tier_prod_compile(unit: str, bf16: int, capability: int) -> None:
    dtype = "bfloat16" if bf16 else "float16"
    made = {
        "attention_hopper_mixed": kernels_unit(dtype, 64, dropout=False),
        "activation_hopper_mixed": hopper_activation.kernel_unit(dtype, False, True, hopper_activation.DEEP),
        "norm_hopper_mixed": hopper_norm.kernel_unit(dtype, 256),
        "weight_gradient_mixed": weight_gradients.kernel_unit(dtype, SMALL, 1),
        "layernorm_mixed": Unit("layernorm_mixed", {"HALF_BF16": bf16, "WIDTH": 768, "SUMS": 1, "NORMALISED": 0}),
    }
    assert compiler.compile_unit(made.get(unit, Unit(unit, {"HALF_BF16": bf16})), capability).startswith(b"\x7fELF")


@needs_compiler
@pytest.mark.parametrize("form", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("chains", [2**n for n in range(MOST_CHAINS.bit_length())])
def test_gradients_of_weights_compile(form: Form, chains: int) -> None:
    code = compiler.compile_unit(weight_gradients.kernel_unit("bfloat16", form, chains), compiler.HOPPER)
    assert b"k_weight_gradient" in code


@needs_compiler
@pytest.mark.parametrize("capability", [80, compiler.HOPPER])
@pytest.mark.parametrize("width", [128, 384, 512, 520, 8192])
@pytest.mark.parametrize("sums", [0, 1])
@pytest.mark.parametrize("normalised", [0, 1])
def test_norms_of_other_widths_compile(width: int, sums: int, normalised: int, capability: int) -> None:
    """Rows lie otherwise in registers there, and at 512 columns all shared memory is taken."""
    unit = Unit("layernorm_mixed", {"HALF_BF16": 1, "WIDTH": width, "SUMS": sums, "NORMALISED": normalised})
    assert b"k_norm_bwd" in compiler.compile_unit(unit, capability)


@needs_compiler
@pytest.mark.parametrize("width", hopper_norm.STAGES)
def test_ends_of_branches_compile(width: int) -> None:
    code = compiler.compile_unit(hopper_norm.kernel_unit("bfloat16", width), compiler.HOPPER)
    assert b"k_product_norm" in code


@needs_compiler
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("wide", sorted(SHAPES))
def test_attention_of_the_tier_prod_compiles(wide: int, dropout: bool) -> None:
    unit = kernels_unit("bfloat16", wide, dropout)
    code = compiler.compile_unit(unit, compiler.HOPPER)
    assert all(name in code for name in (b"k_attention_forward", b"k_attention_queries", b"k_attention_keys"))
    assert (b"k_attention_short" in code) == (wide == SHORT_WIDTH)


@needs_compiler
@pytest.mark.parametrize("form", [hopper_activation.FORWARD, hopper_activation.DEEP, hopper_activation.SHALLOW])
@pytest.mark.parametrize(("relu", "bias"), [(False, False), (True, True)])
def test_products_beside_the_activation_compile(relu: bool, bias: bool, form: hopper_activation.Form) -> None:
    code = compiler.compile_unit(hopper_activation.kernel_unit("bfloat16", relu, bias, form), compiler.HOPPER)
    assert b"k_activation_product" in code


@needs_compiler
@pytest.mark.parametrize("capability", compiler.COMPUTE_CAPABILITIES)
@pytest.mark.parametrize("unit", [u for u in sorted(UNITS) if u not in MACROS and not u.endswith("_mixed")])
def test_small_units_compile(unit: str, capability: int) -> None:
    assert compiler.compile_unit(Unit(unit), capability).startswith(b"\x7fELF")


@needs_compiler
@pytest.mark.parametrize("capability", compiler.COMPUTE_CAPABILITIES)
@pytest.mark.parametrize(("unit", "macros"), [(u, m) for u, each in MACROS.items() for m in each], ids=str)
def test_large_units_compile(unit: str, macros: dict[str, int], capability: int) -> None:
    assert compiler.compile_unit(Unit(unit, macros), capability).startswith(b"\x7fELF")


@needs_compiler
@pytest.mark.parametrize(("unit", "macros", "capability"), WIDEST, ids=str)
def test_other_shapes_compile(unit: str, macros: dict[str, int], capability: int) -> None:
    assert compiler.compile_unit(Unit(unit, macros), capability).startswith(b"\x7fELF")


@needs_compiler
def test_every_input_changes_the_content_hash() -> None:
    hashes = {
        compiler.content_hash(unit, capability)
        for unit in (Unit("linear", {"STAGES": 2}), Unit("linear", {"STAGES": 3}), Unit("loss"))
        for capability in (75, 90)
    }
    assert len(hashes) == 6


@needs_compiler
def test_the_cache_gives_back_what_was_compiled(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SAMEBITS_CACHE", str(tmp_path))
    unit = Unit("dropout")
    first = compiler.compiled(unit, 90)
    (file,) = (tmp_path / "cuda").iterdir()
    monkeypatch.setattr(compiler, "compile_unit", lambda *_: pytest.fail("compiled again"))
    assert compiler.compiled(unit, 90) == first
    # A damaged file is compiled anew, never loaded.
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    monkeypatch.setattr(compiler, "compile_unit", lambda *_: b"fresh")
    assert compiler.compiled(unit, 90) == b"fresh"


def test_no_option_lets_the_compiler_change_arithmetic() -> None:
    assert {"--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false"} <= set(compiler.OPTIONS)
    assert not any("fast" in option for option in compiler.OPTIONS)


def test_kernels_call_no_platform_mathematics() -> None:
    banned = ("expf(", "__expf", "logf(", "__logf", "tanhf(", "powf(", "cosf(", "sinf(", "fmaf(", "__fmaf")
    for name in UNITS.keys() - set(MIXED_UNITS):  # those promise no bits beyond one model of card
        assert not [b for b in banned if b in source(name)], name
    # A product's two sums are joined by a fused multiplication of exact numbers, which rounds once.
    joining = "return __fmaf_rn((float)"
    for name, text in headers().items():
        assert text.count(joining) == (2 if name == "hopper.cuh" else 0), name
        assert not [b for b in banned if b in text.replace(joining, "")], name


def test_constants_are_those_of_the_definition() -> None:
    from engine.numerics import elementary

    text = constants()
    assert f"EXP_SMALLEST = {float(elementary.EXP_SMALLEST).hex()}f;" in text
    assert f"BITS_OF_SQRT_HALF = {int(elementary.BITS_OF_SQRT_HALF)};" in text
