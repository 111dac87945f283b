"""A model under GPT-2's names computes what it computes here."""

import json
import math

import numpy as np
import pytest

from artifacts.interchange.names import to_ours, to_theirs
from engine.program import build_program
from engine.reference.model import Masks, reference_logits
from engine.spec import ModelSpec
from reproduce.errors import ReproduceError
from reproduce.gpt2 import gpt2_config, gpt2_names, their_names

MODEL = {
    "vocab": 19,
    "context": 9,
    "d_model": 12,
    "heads": 3,
    "layers": 2,
    "hidden": 20,
    "activation": "gelu",
    "dropout": 0.1,
    "linear_bias": True,
    "norm_parameters": True,
    "tied": True,
    "init_std": 0.02,
    "attention": "stored",
}
IDS = np.random.default_rng(5).integers(0, 19, (2, 7))


@pytest.fixture(params=["gelu", "relu"])
def model(request):
    return ModelSpec(**{**MODEL, "activation": request.param})


def parameters_of(model):
    random = np.random.default_rng(3)
    return {p.name: (random.standard_normal(p.shape) * 0.3).astype(np.float32) for p in build_program(model).parameters}


def our_logits(model, parameters):
    doubles = {name: array.astype(np.float64) for name, array in parameters.items()}
    return reference_logits(model, doubles, IDS, Masks(0, 0, False))


def test_logits_of_gpt2_as_published(model):
    """A GPT-2 written down from its paper's code: weights [in, out], q, k and v in one product."""
    parameters = parameters_of(model)
    tensors = {
        name.removeprefix("transformer."): array.astype(np.float64)
        for name, array in to_theirs(parameters, gpt2_names(model)).items()
    }
    assert np.allclose(gpt2_logits(gpt2_config(model), tensors, IDS), our_logits(model, parameters), rtol=0, atol=1e-11)


def gpt2_logits(config, tensors, ids):
    def linear(name, x):
        return x @ tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    def norm(name, x):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + np.float32(config["layer_norm_epsilon"]))
        return x * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    def activate(x):
        if config["activation_function"] == "relu":
            return np.maximum(x, 0)
        assert config["activation_function"] == "gelu_new"
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    batch, length = ids.shape
    width = config["n_embd"] // config["n_head"]
    x = tensors["wte.weight"][ids] + tensors["wpe.weight"][:length]
    for block in range(config["n_layer"]):
        packed = linear(f"h.{block}.attn.c_attn", norm(f"h.{block}.ln_1", x))
        q, k, v = (part.reshape(batch, length, -1, width).swapaxes(1, 2) for part in np.split(packed, 3, axis=-1))
        scores = q @ k.swapaxes(-1, -2) / math.sqrt(width)
        scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        y = (weights / weights.sum(-1, keepdims=True)) @ v
        x = x + linear(f"h.{block}.attn.c_proj", y.swapaxes(1, 2).reshape(batch, length, -1))
        y = activate(linear(f"h.{block}.mlp.c_fc", norm(f"h.{block}.ln_2", x)))
        x = x + linear(f"h.{block}.mlp.c_proj", y)
    return norm("ln_f", x) @ tensors["wte.weight"].T


def test_logits_of_transformers(model, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("safetensors")
    from artifacts.interchange.tensor_file import write_safetensors

    parameters = parameters_of(model)
    write_safetensors(tmp_path / "model.safetensors", to_theirs(parameters, gpt2_names(model)), {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(gpt2_config(model)), encoding="utf-8")
    loaded, report = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        theirs = loaded.double().eval()(torch.from_numpy(IDS)).logits.numpy()
    assert np.allclose(theirs, our_logits(model, parameters), rtol=0, atol=1e-9)
    loaded.float().save_pretrained(tmp_path / "again")
    from artifacts.interchange.tensor_file import read_safetensors

    tensors, _ = read_safetensors(tmp_path / "again" / "model.safetensors")
    renamed = their_names(set(tensors))
    again = to_ours({renamed[name]: array for name, array in tensors.items()}, gpt2_names(model), "again")
    assert {name: a.tobytes() for name, a in again.items()} == {name: a.tobytes() for name, a in parameters.items()}


def test_names_as_files_have_them():
    assert their_names({"wte.weight", "h.0.attn.bias", "h.0.attn.masked_bias", "h.0.attn.c_attn.bias"}) == {
        "wte.weight": "transformer.wte.weight",
        "h.0.attn.c_attn.bias": "transformer.h.0.attn.c_attn.bias",
    }
    assert their_names({"transformer.h.11.attn.bias"}) == {}
    # Not a mask: it is for the caller to refuse.
    assert their_names({"lm_head.weight"}) == {"lm_head.weight": "lm_head.weight"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tied": False}, "untied head"),
        ({"linear_bias": False}, "without a bias"),
        ({"norm_parameters": False}, "norms without parameters"),
    ],
)
def test_what_gpt2_cannot_express_is_refused(change, message):
    for function in (gpt2_names, gpt2_config):
        with pytest.raises(ReproduceError, match=message):
            function(ModelSpec(**{**MODEL, **change}))


def test_every_parameter_has_a_name_of_its_own(model):
    names = gpt2_names(model)
    assert len({name.theirs for name in names}) == len(names) == len(build_program(model).parameters)
