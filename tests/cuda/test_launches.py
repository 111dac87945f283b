"""What a step launches, recorded on a card that is not there: every kernel exists, and arguments fit its format."""

import re
import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.backends.cuda import launching, products
from engine.backends.cuda.backend import CudaBackend
from engine.backends.cuda.mixed import hopper_activation, hopper_attention, weight_gradients
from engine.backends.cuda.mixed.backend import MixedBackend
from engine.backends.cuda.mixed.layout import MixedLayout
from engine.backends.cuda.opening import cuda_plan
from engine.backends.cuda.sources import Unit, headers, source
from engine.program import build_program
from engine.spec import ModelSpec, TrainSpec
from tests.cuda.pairs import model, train

BASE = 1 << 40


class Kernel:
    """Looks like a kernel in PyCUDA, and notes what it is called with."""

    def __init__(self, unit: str, name: str, calls: list[tuple[str, str]]) -> None:
        assert re.search(rf"\b{name.removesuffix('_residual')}\b", source(unit) + "".join(headers().values())), name
        self.unit, self.name, self.calls, self.form = unit, name, calls, ""

    def prepare(self, arguments: list[str]) -> None:
        self.form = arguments[0]

    def set_attribute(self, *_: Any) -> None:
        pass

    def prepared_async_call(self, grid: Any, block: Any, stream: Any, *values: Any, shared_size: int) -> None:
        struct.pack(self.form, *values)
        assert min(grid) > 0
        assert 0 < np.prod(block) <= 1024
        assert 0 <= shared_size <= 232448
        self.calls.append((self.unit, self.name))


def fake_card(calls: list[tuple[str, str]], capability: int) -> Any:
    def module(unit: Unit) -> Any:
        return SimpleNamespace(get_function=lambda name: Kernel(unit.name, name, calls))

    def nothing(*_: Any) -> None:
        pass

    def stream() -> Any:
        return SimpleNamespace(handle=1, synchronize=nothing, wait_for_event=nothing)

    driver = SimpleNamespace(
        Stream=stream, Event=lambda: SimpleNamespace(record=nothing), mem_alloc=lambda _: BASE, Error=RuntimeError,
        MemoryError=MemoryError, memcpy_htod=nothing, memset_d8_async=nothing, memcpy_htod_async=nothing,
        memcpy_dtoh_async=nothing, pagelocked_empty=np.empty, module_from_buffer=module,
        function_attribute=SimpleNamespace(MAX_DYNAMIC_SHARED_SIZE_BYTES=0),
    )  # fmt: skip
    return SimpleNamespace(
        driver=driver, name="Fake", capability=capability, processors=4, shared_limit=232448,
        free_memory=lambda: 1 << 40,
    )  # fmt: skip


def launches(
    monkeypatch: pytest.MonkeyPatch,
    spec: ModelSpec,
    recipe: TrainSpec,
    tier: Any,
    fused: bool = True,
    capability: int = 90,
) -> list[str]:
    monkeypatch.setattr(launching, "compiled", lambda unit, _: unit)
    monkeypatch.setattr(products, "tensor_map", lambda *_: bytes(128))
    calls: list[tuple[str, str]] = []
    program, plan, layout = cuda_plan(build_program(spec), recipe, tier, fused)
    backend = CudaBackend(program, plan, recipe, layout, fake_card(calls, capability))
    backend._queue_step()
    names = [name for _, name in calls]
    calls.clear()
    rows = np.zeros((1, spec.context), np.int32)
    backend.losses(rows, rows)
    assert calls
    return names


MODELS = {
    "fused": model(d_model=16, heads=2, hidden=32, vocab=40),
    "ragged": model(),
    "plain": model(linear_bias=False, norm_parameters=False, tied=False, activation="relu", d_model=16, heads=2),
    "wide": model(d_model=1100, heads=10, hidden=5000, vocab=8200),
}


@pytest.mark.parametrize("capability", [75, 90])
@pytest.mark.parametrize("tier", ["portable", "debug"])
@pytest.mark.parametrize("name", MODELS)
def test_arguments_fit_every_kernel(name: str, tier: str, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = train(batch=12, shards=6)
    for fused in (True, False):
        assert launches(monkeypatch, MODELS[name], recipe, tier, fused, capability)


def test_shared_work_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = launches(monkeypatch, MODELS["fused"], train(), "portable")
    assert not {"k_layernorm_fwd", "k_gelu_fwd", "k_gelu_bwd", "k_residual_add_fwd", "k_loss_bwd"} & set(fused)
    plain = launches(monkeypatch, MODELS["fused"], train(), "portable", fused=False)
    assert {"k_layernorm_fwd", "k_gelu_fwd", "k_gelu_bwd", "k_residual_add_fwd", "k_loss_bwd"} <= set(plain)
    assert len(fused) < len(plain)
    assert fused.count("k_quantise_weight_rows") == plain.count("k_quantise_weight_rows") == 1


class NoProducts:
    """In the place of the library."""

    version, recorded = 130100, None

    def __init__(self, *_: Any) -> None: ...

    def multiply(self, *_: Any, **__: Any) -> None: ...


PROD = {
    "whole blocks": (model(d_model=16, heads=2, hidden=32, vocab=40, context=64), train(batch=8, shards=4)),
    "ragged": (model(d_model=24, heads=3, hidden=40, vocab=41, dropout=0.1), train(batch=6, shards=3)),
    "plain": (
        model(linear_bias=False, norm_parameters=False, tied=False, activation="relu", d_model=16, heads=2, hidden=32),
        train(batch=4, shards=1),
    ),
    "large": (model(d_model=768, heads=12, hidden=3072, vocab=8200, context=128), train(batch=8, shards=8)),
}


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("name", PROD)
def test_arguments_fit_the_kernels_of_the_tier_prod(name: str, precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On compute capability 9.0, which has most of our own."""
    spec, recipe = PROD[name]
    if precision == "fp8" and name == "ragged":
        spec = spec.model_copy(update={"d_model": 48, "hidden": 48})
    recipe = recipe.model_copy(update={"precision": precision})
    monkeypatch.setattr(launching, "compiled", lambda unit, _: unit)
    monkeypatch.setattr("engine.backends.cuda.mixed.backend.Products", NoProducts)
    monkeypatch.setattr(hopper_attention, "heads_map", lambda *_: bytes(128))
    for module in (hopper_activation, weight_gradients):
        monkeypatch.setattr(module, "matrix_map", lambda *_: bytes(128))
    program, plan, layout = cuda_plan(build_program(spec), recipe, "prod", capability=90)
    assert isinstance(layout, MixedLayout)
    calls: list[tuple[str, str]] = []
    MixedBackend(program, plan, recipe, layout, fake_card(calls, 90), precision)._queue_step()
    names = {name for _, name in calls}
    back = {"k_attention_queries", "k_attention_keys"} if name == "large" else {"k_attention_short"}
    assert {"k_attention_forward", "k_adamw"} | back <= names
    assert ("k_weight_gradient" in names) == (recipe.shards > 1)
    assert ("k_activation_product" in names) == (precision != "fp8" or name in ("whole blocks", "large"))
