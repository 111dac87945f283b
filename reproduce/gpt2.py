"""A model in the form in which GPT-2 is published: its tensor names, its transposes, its config.json."""

from typing import Any

from artifacts.interchange.names import Renamed
from engine.program import build_program
from engine.spec import ModelSpec
from reproduce.errors import ReproduceError

# By what a parameter is called within a block here; a linear weight there is [in, out].
_IN_BLOCK = {
    "norm1.gain": ("ln_1.weight", False),
    "norm1.bias": ("ln_1.bias", False),
    "attn_qkv.weight": ("attn.c_attn.weight", True),
    "attn_qkv.bias": ("attn.c_attn.bias", False),
    "attn_out.weight": ("attn.c_proj.weight", True),
    "attn_out.bias": ("attn.c_proj.bias", False),
    "norm2.gain": ("ln_2.weight", False),
    "norm2.bias": ("ln_2.bias", False),
    "mlp_up.weight": ("mlp.c_fc.weight", True),
    "mlp_up.bias": ("mlp.c_fc.bias", False),
    "mlp_down.weight": ("mlp.c_proj.weight", True),
    "mlp_down.bias": ("mlp.c_proj.bias", False),
}
_OUTSIDE = {
    "embed.token": "transformer.wte.weight",
    "embed.position": "transformer.wpe.weight",
    "norm.gain": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
}


def gpt2_names(model: ModelSpec) -> list[Renamed]:
    """Every parameter by both names. Raises ReproduceError for a model that GPT-2 cannot express."""
    _require_gpt2(model)
    return [_renamed(parameter.name, parameter.shape) for parameter in build_program(model).parameters]


def gpt2_config(model: ModelSpec) -> dict[str, Any]:
    """What `transformers` reads as config.json. The tokens that begin and end a text are left open."""
    _require_gpt2(model)
    return {
        "activation_function": "gelu_new" if model.activation == "gelu" else "relu",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": model.dropout,
        "bos_token_id": None,
        "embd_pdrop": model.dropout,
        "eos_token_id": None,
        "initializer_range": model.init_std,
        "layer_norm_epsilon": 1e-5,
        "model_type": "gpt2",
        "n_embd": model.d_model,
        "n_head": model.heads,
        "n_inner": model.hidden,
        "n_layer": model.layers,
        "n_positions": model.context,
        "resid_pdrop": model.dropout,
        "tie_word_embeddings": True,
        "vocab_size": model.vocab,
    }


def their_names(names: set[str]) -> dict[str, str]:
    """From names as found in a file to those of `gpt2_names`: the prefix may be missing, and masks that some files
    keep beside the parameters are left out."""
    found = {}
    for name in names:
        full = name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
        if not full.endswith((".attn.bias", ".attn.masked_bias")):
            found[name] = full
    return found


def _require_gpt2(model: ModelSpec) -> None:
    faults = [
        fault
        for holds, fault in (
            (model.tied, "an untied head (model.tied: false)"),
            (model.linear_bias, "linear layers without a bias (model.linear_bias: false)"),
            (model.norm_parameters, "norms without parameters (model.norm_parameters: false)"),
        )
        if not holds
    ]
    if faults:
        raise ReproduceError(f"GPT-2 cannot express {', '.join(faults)}: export the bundle as a folder or capsule")


def _renamed(name: str, shape: tuple[int, ...]) -> Renamed:
    if name in _OUTSIDE:
        return Renamed(name, _OUTSIDE[name], shape)
    block, _, role = name.partition(".")
    theirs, transposed = _IN_BLOCK[role]
    return Renamed(name, f"transformer.h.{block.removeprefix('block')}.{theirs}", shape, transposed)
