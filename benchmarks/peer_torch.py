"""The peer: a training step of the same GPT in PyTorch, forward, backward, clipping and AdamW. Prints JSON lines.

    python benchmarks/peer_torch.py [--device cpu|cuda] [--precision fp32|bf16] [--how eager|graph|compiled-graph]
        SIZES...

Run in an interpreter that has PyTorch, by cpu_step.py and price_list.py; of this project it needs timing.py alone.
SIZES are the fields of a model as JSON, with `batch`, `steps`, perhaps `seconds` (how many are timed: timing.py), on a
CPU `threads` too. Each gives the median seconds of a step on random tokens that are on the device already. fp32 is
strict (no TF32), bf16 is autocast over fp32 weights. `graph` records the whole step as one CUDA graph, `compiled-graph`
has torch.compile make its kernels first.
"""

import argparse
import gc
import json
import statistics
from collections.abc import Iterable
from typing import Any

import torch
from timing import durations
from torch import nn
from torch.nn import functional as F

WARM_UP_STEPS = 3
HOW = ("eager", "graph", "compiled-graph")
NARROW = {"bf16": torch.bfloat16}


class Block(nn.Module):
    """Attention and MLP, each on a normalised input, each added to the residual stream."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        d, hidden, bias = sizes["d_model"], sizes["hidden"], sizes["linear_bias"]
        self.heads, self.dropout, self.activation = sizes["heads"], sizes["dropout"], sizes["activation"]
        self.norm1, self.norm2 = (nn.LayerNorm(d, elementwise_affine=sizes["norm_parameters"]) for _ in range(2))
        self.attn_qkv, self.attn_out = nn.Linear(d, 3 * d, bias), nn.Linear(d, d, bias)
        self.mlp_up, self.mlp_down = nn.Linear(d, hidden, bias), nn.Linear(hidden, d, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        qkv = self.attn_qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        x = x + F.dropout(self.attn_out(y.transpose(1, 2).reshape(b, t, d)), self.dropout)
        y = self.mlp_up(self.norm2(x))
        y = F.gelu(y, approximate="tanh") if self.activation == "gelu" else F.relu(y)
        return x + F.dropout(self.mlp_down(y), self.dropout)


class Gpt(nn.Module):
    """The model of a ModelSpec's fields."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        d = sizes["d_model"]
        self.dropout = sizes["dropout"]
        self.token, self.position = nn.Embedding(sizes["vocab"], d), nn.Embedding(sizes["context"], d)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes["layers"]))
        self.norm = nn.LayerNorm(d, elementwise_affine=sizes["norm_parameters"])
        self.head = None if sizes["tied"] else nn.Linear(d, sizes["vocab"], bias=False)
        for weight in (self.token.weight, self.position.weight):
            nn.init.normal_(weight, std=sizes["init_std"])

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        x = F.dropout(x, self.dropout)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.token.weight if self.head is None else self.head.weight)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean loss in nats per token."""
        return F.cross_entropy(self.logits(ids).flatten(0, 1), targets.flatten())


def be_strict() -> None:
    """Products of fp32 in fp32, without TF32."""
    torch.set_float32_matmul_precision("highest")


def autocast(device: str, precision: str) -> torch.autocast:
    narrow = NARROW.get(precision)
    # Within a recorded graph a kept copy of the weights would not follow them.
    return torch.autocast(device, narrow or torch.bfloat16, enabled=narrow is not None, cache_enabled=False)


class Step:
    """A training step on fixed places: write `ids`, `targets` and the rate, call it, read `loss`."""

    def __init__(
        self,
        model: Gpt,
        groups: Iterable[dict[str, Any]],
        shape: tuple[int, int],
        *,
        precision: str,
        how: str,
        betas: tuple[float, float],
        epsilon: float,
        clip_norm: float,
    ) -> None:
        """groups: of parameters, as AdamW takes them. shape: batch and context. clip_norm: 0 for no clipping.
        After this the weights and moments have changed: call restart."""
        device = next(model.parameters()).device
        self.model, self.precision, self.clip_norm = model, precision, clip_norm
        self.device = device.type
        self.ids, self.targets = (torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(2))
        self.loss = torch.zeros((), device=device)
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=torch.tensor(1e-3, device=device),
            betas=betas,
            eps=epsilon,
            fused=True,
            capturable=self.device == "cuda",
        )
        self._compute_loss = torch.compile(model, dynamic=False) if how == "compiled-graph" else model
        self._graph = self._record() if how != "eager" else None

    def _run(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with autocast(self.device, self.precision):
            loss = self._compute_loss(self.ids, self.targets)
        loss.backward()
        if self.clip_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        self.loss.copy_(loss.detach())

    def _record(self) -> Any:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                self._run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self._run()
        torch.cuda.synchronize()
        return graph

    def set_rate(self, rate: float | torch.Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"].copy_(rate) if isinstance(rate, torch.Tensor) else group["lr"].fill_(rate)

    def restart(self, weights: dict[str, torch.Tensor]) -> None:
        """Start from these weights, by the model's own names, and zero moments."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])
            for state in self.optimizer.state.values():
                for tensor in state.values():
                    tensor.zero_()

    def __call__(self) -> None:
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()

    def synchronise(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def measure(sizes: dict[str, Any], device: str, precision: str, how: str) -> dict[str, Any]:
    torch.manual_seed(0)
    if "threads" in sizes:
        torch.set_num_threads(sizes["threads"])
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    shape = (sizes["batch"], sizes["context"])
    model = Gpt(sizes).to(device)
    groups = [{"params": list(model.parameters()), "weight_decay": 0.1}]
    recipe: dict[str, Any] = {"betas": (0.9, 0.95), "epsilon": 1e-8, "clip_norm": 1.0}
    step = Step(model, groups, shape, precision=precision, how=how, **recipe)
    for place in (step.ids, step.targets):
        place.random_(0, sizes["vocab"])

    def whole() -> None:
        step()
        step.synchronise()

    whole()
    seconds = durations(whole, sizes["steps"], sizes.get("seconds", 0))
    return {
        "experiment": sizes.get("experiment"),
        "precision": precision,
        "how": how,
        "seconds": statistics.median(seconds),
        "timed_steps": len(seconds),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 4) if device == "cuda" else None,
        "loss": float(step.loss),
        "version": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="+", type=json.loads, metavar="SIZES")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--how", choices=HOW, default="eager")
    arguments = parser.parse_args()
    if arguments.device == "cpu" and arguments.how != "eager":
        parser.error(f"on a CPU there is no CUDA graph: --how must be eager, found {arguments.how}")
    be_strict()
    for sizes in arguments.sizes:
        print(json.dumps(measure(sizes, arguments.device, arguments.precision, arguments.how)), flush=True)
        # The next one's kernels are its own: nothing compiled is shared, and no memory is held.
        torch.compiler.reset()
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
