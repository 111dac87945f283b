"""The same training step in PyTorch: a GPT of one experiment's sizes, forward, backward, clip, AdamW.

Run by cpu_step.py in an interpreter that has PyTorch; takes the sizes as JSON on the command line and prints one JSON
line: the median seconds of a step. Random tokens, fp32, eager (torch.compile needs a compiler).
"""

import json
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, d: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, hidden), nn.Linear(hidden, d)

    def forward(self, x: torch.Tensor, dropout: float) -> torch.Tensor:
        b, t, d = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(b, t, d)), dropout)
        y = self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + F.dropout(y, dropout)


class Gpt(nn.Module):
    def __init__(self, vocab: int, context: int, d: int, heads: int, layers: int, hidden: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, d), nn.Embedding(context, d)
        self.blocks = nn.ModuleList(Block(d, heads, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(d)
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor, dropout: float) -> torch.Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        x = F.dropout(x, dropout)
        for block in self.blocks:
            x = block(x, dropout)
        logits = self.norm(x) @ self.token.weight.T
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    sizes = json.loads(sys.argv[1])
    torch.manual_seed(0)
    torch.set_num_threads(sizes["threads"])
    model = Gpt(*(sizes[k] for k in ("vocab", "context", "d_model", "heads", "layers", "hidden")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)
    shape = (sizes["batch"], sizes["context"])
    ids, targets = (torch.randint(0, sizes["vocab"], shape) for _ in range(2))
    seconds = []
    for _ in range(sizes["steps"] + 1):
        start = time.perf_counter()
        model(ids, targets, sizes["dropout"]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - start)
    json.dump({"seconds": statistics.median(seconds[1:]), "version": torch.__version__}, sys.stdout)


if __name__ == "__main__":
    main()
