"""What these tests share: random specifications, and the experiments."""

from pathlib import Path

from hypothesis import strategies as st

from engine.spec import ModelSpec

EXPERIMENTS = sorted((Path(__file__).parents[2] / "experiments").glob("*.yaml"))

EXAMPLE = """\
model CharTransformer(context=256, vocab=96):
  d = 256; heads = 8; layers = 6
  x = token_embed(vocab, d)(tokens) + learned_pos(context, d)
  repeat layers:
    x = x + attention(norm(x), heads=heads, causal=true, dropout=0.1)
    x = x + mlp(norm(x), hidden=4 * d, activation="gelu", dropout=0.1)
  logits = head(norm(x), tied=token_embed)
"""


@st.composite
def specs(draw: st.DrawFn, largest: int = 4096) -> ModelSpec:
    """Any specification the engine has, small enough to build a program of."""
    heads = draw(st.integers(1, 16))
    width = draw(st.integers(1, 256))
    rates = st.floats(0.0, 1.0, exclude_max=True) | st.sampled_from([0.0, 0.1, 0.5])
    return ModelSpec(
        vocab=draw(st.integers(1, largest)),
        context=draw(st.integers(1, largest)),
        d_model=heads * width,
        heads=heads,
        layers=draw(st.integers(1, 4)),
        hidden=draw(st.integers(1, largest) | st.integers(1, 8).map(lambda n: n * heads * width)),
        activation=draw(st.sampled_from(["gelu", "relu"])),
        dropout=draw(rates),
        linear_bias=draw(st.booleans()),
        norm_parameters=draw(st.booleans()),
        tied=draw(st.booleans()),
        init_std=draw(st.floats(2.0**-126, 2.0**100) | st.just(0.02)),
        attention=draw(st.sampled_from(["stored", "tiled"])),
    )


def explicit(spec: ModelSpec, **changed: str) -> str:
    """A specification in the code view with every width written where it can be; `changed` replaces some of them."""
    written = {
        "token_rows": "vocab",
        "token_width": "d",
        "position_rows": "context",
        "position_width": "d",
        "heads": str(spec.heads),
        "attention_out": "d",
        "mlp_out": "d",
        "head_rows": "vocab",
        **changed,
    }
    norm = f"norm(x, parameters={str(spec.norm_parameters).lower()})"
    both = f"dropout={spec.dropout!r}, bias={str(spec.linear_bias).lower()}"
    return f"""\
model M(context={spec.context}, vocab={spec.vocab}, init_std={spec.init_std!r}):
  d = {spec.d_model}
  x = token_embed({written["token_rows"]}, {written["token_width"]})(tokens)
  x = x + learned_pos({written["position_rows"]}, {written["position_width"]})
  repeat {spec.layers}:
    x = x + attention({norm}, heads={written["heads"]}, causal=true, {both}, out={written["attention_out"]},
                      memory="{spec.attention}")
    x = x + mlp({norm}, hidden={spec.hidden}, activation="{spec.activation}", {both}, out={written["mlp_out"]})
  logits = head({norm}, {written["head_rows"]}, tied={"token_embed" if spec.tied else "false"})
"""
