"""Attention by cuDNN's fused kernels through its Python frontend, in the deterministic form of the backward pass.

Dao et al. 2022 (FlashAttention). Rows of the batch do not touch each other, so they may be handed over in parts: as
many rows at once as the workspace allows, or a fixed number of them where dropout draws its own numbers by place.
"""

from dataclasses import dataclass
from importlib import import_module
from math import sqrt
from typing import Any

from engine.backends.cuda.errors import DeviceLost, DeviceUnavailable
from engine.backends.cuda.run import NO_MASK, MaskArguments
from engine.spec import Precision

PACKAGE = "nvidia-cudnn-frontend"
TILE = 128  # tokens
SPARE = 16 << 20


@dataclass(frozen=True)
class Heads:
    """Sizes of one attention: heads, elements of a head, tokens in a row, probability of dropout."""

    heads: int
    width: int
    context: int
    dropout: float

    @property
    def d_model(self) -> int:
        return self.heads * self.width

    def backward_workspace(self, rows: int) -> int:
        """Bytes that the deterministic backward pass of `rows` rows may take: gradients of all scores in 16 bits, from
        which it computes dq, and statistics."""
        context = -(-self.context // TILE) * TILE
        tokens = rows * self.heads * context
        return 2 * tokens * context + 16 * tokens + SPARE

    def rows_at_once(self, rows: int, room: int) -> int:
        """The largest divisor of `rows` whose workspace keeps to `room` bytes, at least 1."""
        fitting = [n for n in range(1, rows + 1) if rows % n == 0 and self.backward_workspace(n) <= room]
        return max(fitting, default=1)


@dataclass(frozen=True)
class Places:
    """Addresses of one call: packed qkv, result, statistics, workspace, gradients, dropout's seed and a zero.

    Of our own kernels' dropout: the step's values, the row of the batch that comes first, and the mask.
    """

    qkv: int
    y: int
    stats: int
    workspace: int
    dy: int = 0
    dqkv: int = 0
    seed: int = 0
    zero: int = 0
    values: int = 0
    first_row: int = 0
    mask: MaskArguments = NO_MASK


# By this bundles name our own kernels of the tier prod, whichever of them serve on a card. The number rises where one
# of them comes to other bits: a bundle with another number is refused for going on.
OWN_KERNELS = "own kernels, version 6"


class Flash:
    """Attention on one stream. Compiled kernels are kept by their sizes."""

    def __init__(self, stream: int, precision: Precision) -> None:
        try:
            cudnn: Any = import_module("cudnn")
        except ImportError as error:
            raise DeviceUnavailable(
                f"tier prod needs cuDNN's Python frontend, which cannot be imported ({error}). "
                f"Install it with: pip install {PACKAGE} 'nvidia-cudnn-cu13>=9'"
            ) from error
        self._cudnn = cudnn
        self._type = cudnn.data_type.HALF if precision == "fp16" else cudnn.data_type.BFLOAT16
        self.version = int(cudnn.backend_version())
        self.name = f"cuDNN {self.version}, {OWN_KERNELS}"
        self._handle = cudnn.create_handle()
        cudnn.set_stream(handle=self._handle, stream=stream)
        self._graphs: dict[tuple[Heads, int, bool], tuple[Any, dict[str, Any]]] = {}

    def forward(self, heads: Heads, rows: int, places: Places) -> None:
        """Write y [rows, T, d] and stats [rows, heads, T] fp32."""
        graph, tensors = self._graph(heads, rows, backward=False)
        self._execute(graph, self._bound(tensors, heads, places) | {tensors["y"]: places.y}, places)

    def backward(self, heads: Heads, rows: int, places: Places) -> None:
        """Write dqkv [rows, T, 3 d]."""
        graph, tensors = self._graph(heads, rows, backward=True)
        narrow = 2 * heads.d_model
        bound = self._bound(tensors, heads, places) | {tensors["y"]: places.y, tensors["dy"]: places.dy}
        for number, name in enumerate(("dq", "dk", "dv")):
            bound[tensors[name]] = places.dqkv + number * narrow
        self._execute(graph, bound, places)

    def _bound(self, tensors: dict[str, Any], heads: Heads, places: Places) -> dict[Any, int]:
        narrow = 2 * heads.d_model
        bound = {tensors[name]: places.qkv + number * narrow for number, name in enumerate("qkv")}
        bound[tensors["stats"]] = places.stats
        if heads.dropout:
            bound[tensors["seed"]], bound[tensors["offset"]] = places.seed, places.zero
        return bound

    def _execute(self, graph: Any, bound: dict[Any, int], places: Places) -> None:
        try:
            graph.execute(bound, places.workspace, handle=self._handle)
        except Exception as error:
            raise DeviceLost(f"cuDNN failed: {error}. What was saved before is whole") from error

    def _graph(self, heads: Heads, rows: int, *, backward: bool) -> tuple[Any, dict[str, Any]]:
        key = (heads, rows, backward)
        if key not in self._graphs:
            self._graphs[key] = self._build(heads, rows, backward)
        return self._graphs[key]

    def _build(self, heads: Heads, rows: int, backward: bool) -> tuple[Any, dict[str, Any]]:
        cudnn, fp32 = self._cudnn, self._cudnn.data_type.FLOAT
        h, t, d, line = heads.heads, heads.context, heads.width, heads.d_model
        graph = cudnn.pygraph(
            io_data_type=self._type, intermediate_data_type=fp32, compute_data_type=fp32, handle=self._handle
        )
        dim = [rows, h, t, d]
        packed, plain = [3 * t * line, d, 3 * line, 1], [t * line, d, line, 1]
        narrow = [1, 1, 1, 1]
        tensors = {n: graph.tensor(name=n, dim=dim, stride=packed, data_type=self._type) for n in "qkv"}
        common: dict[str, Any] = {"attn_scale": 1.0 / sqrt(d), "use_causal_mask": True}
        if heads.dropout:
            for name in ("seed", "offset"):
                kind = cudnn.data_type.INT64
                tensors[name] = graph.tensor(name=name, dim=narrow, stride=narrow, data_type=kind)
            common["dropout"] = (heads.dropout, tensors["seed"], tensors["offset"])
        operands = {n: tensors[n] for n in "qkv"}
        if backward:
            for name in ("y", "dy"):
                tensors[name] = graph.tensor(name=name, dim=dim, stride=plain, data_type=self._type)
            tensors["stats"] = graph.tensor(name="stats", dim=[rows, h, t, 1], stride=[h * t, t, 1, 1], data_type=fp32)
            outputs = graph.sdpa_backward(
                name="backward",
                **operands,
                o=tensors["y"],
                dO=tensors["dy"],
                stats=tensors["stats"],
                use_deterministic_algorithm=True,
                **common,
            )
            for name, output in zip(("dq", "dk", "dv"), outputs, strict=True):
                output.set_output(True).set_dim(dim).set_stride(packed).set_data_type(self._type)
                tensors[name] = output
        else:
            tensors["y"], tensors["stats"] = graph.sdpa(name="forward", **operands, generate_stats=True, **common)
            tensors["y"].set_output(True).set_dim(dim).set_stride(plain).set_data_type(self._type)
            tensors["stats"].set_output(True).set_dim([rows, h, t, 1]).set_stride([h * t, t, 1, 1])
            tensors["stats"].set_data_type(fp32)
        try:
            graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        except Exception as error:
            raise DeviceUnavailable(f"cuDNN {self.version} has no attention for {heads}: {error}") from error
        needed, planned = graph.get_workspace_size(), heads.backward_workspace(rows) if backward else SPARE
        if needed > planned:
            raise DeviceUnavailable(
                f"cuDNN {self.version} needs {needed / 2**20:,.0f} MiB of workspace for {rows} rows of {heads}, "
                f"planned are {planned / 2**20:,.0f} MiB"
            )
        return graph, tensors
