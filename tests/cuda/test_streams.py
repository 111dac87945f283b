"""Work beside the main stream, on a card that is not there: storage is used again only after it."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.backends.cuda import launching, products
from engine.backends.cuda.backend import CudaBackend
from engine.backends.cuda.launching import Launcher
from engine.backends.cuda.opening import cuda_plan
from engine.program import build_program
from tests.cuda.pairs import model, train


class Stream:
    """Knows what it was given, and how much of another stream's work it has waited for."""

    def __init__(self) -> None:
        self.handle = 1
        self.queued: list[tuple[str, int]] = []  # kernel, and the step it was launched in
        self.waited: dict[int, int] = {}

    def wait_for_event(self, event: Any) -> None:
        stream, count = event.place
        self.waited[id(stream)] = max(self.waited.get(id(stream), 0), count)

    def synchronize(self) -> None: ...


class Event:
    place: tuple[Stream, int]

    def record(self, stream: Stream) -> None:
        self.place = (stream, len(stream.queued))


class Card:
    """Kernels launched on it go to `seen`, with the stream."""

    name, capability, processors, shared_limit = "Fake", 90, 4, 232448

    def __init__(self) -> None:
        self.launcher: Launcher | None = None
        self.checks: list[Any] = []

        def nothing(*_: Any) -> None: ...

        self.driver = SimpleNamespace(
            Stream=Stream, Event=Event, mem_alloc=lambda _: 1 << 40, Error=RuntimeError, MemoryError=MemoryError,
            memcpy_htod=nothing, memset_d8_async=nothing, memcpy_htod_async=nothing, memcpy_dtoh_async=nothing,
            pagelocked_empty=np.empty, module_from_buffer=lambda _: SimpleNamespace(get_function=self.function),
            function_attribute=SimpleNamespace(MAX_DYNAMIC_SHARED_SIZE_BYTES=0),
        )  # fmt: skip

    def function(self, name: str) -> Any:
        def call(grid: Any, block: Any, stream: Stream, *_: Any, shared_size: int) -> None:
            if self.launcher:
                stream.queued.append((name, self.launcher.step))
                for check in self.checks:
                    check(name, stream)

        return SimpleNamespace(prepare=lambda _: None, set_attribute=lambda *_: None, prepared_async_call=call)


@pytest.mark.parametrize("fused", [True, False], ids=["sharing", "alone"])
def test_storage_is_used_again_only_after_work_beside(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "compiled", lambda unit, _: unit)
    monkeypatch.setattr(products, "tensor_map", lambda *_: bytes(128))
    recipe = train(batch=4, shards=2)
    spec = model(layers=4, d_model=16, heads=2, hidden=32, vocab=40)
    program, plan, layout = cuda_plan(build_program(spec), recipe, "portable", fused)
    card = Card()
    backend = CudaBackend(program, plan, recipe, layout, card)  # type: ignore[arg-type]
    run = backend.run(plan.sizes.batch, spec.context)
    launcher = card.launcher = backend.launcher
    main, side = launcher.stream, launcher._side
    late = 0  # launches of the main stream that ran beside work of an earlier step

    def check(name: str, stream: Stream) -> None:
        nonlocal late
        if stream is not main:
            return
        under_way = side.queued[main.waited.get(id(side), 0) :]
        late += bool(under_way)
        assert all(s + layout.lingers(program.backward[s]) >= launcher.step for _, s in under_way), name
        if name.startswith("k_layernorm_bwd"):  # adds to what linear layers before a residual sum read
            assert sum(kernel == "k_quantise_columns" for kernel, _ in under_way) <= 1

    card.checks.append(check)
    run.training = True
    run.backward()
    assert late > 50
    assert main.waited[id(side)] == len(side.queued)
