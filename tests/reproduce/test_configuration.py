"""The configuration: what is accepted, and how every kind of fault reads."""

from pathlib import Path

import pytest

from reproduce.configuration import (
    Configuration,
    RunOptions,
    differences,
    from_identity,
    load_configuration,
)
from reproduce.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "experiments" / "tiny.yaml"
EXPERIMENTS = sorted((ROOT / "experiments").glob("*.yaml"))


def fault(*overrides: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_configuration(TINY, overrides)
    return str(caught.value)


def changed(tmp_path: Path, old: str, new: str) -> str:
    text = TINY.read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "params.yaml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8", newline="")
    with pytest.raises(ConfigurationError) as caught:
        load_configuration(path)
    return str(caught.value)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_is_sound(path):
    load_configuration(path)


def test_params_is_the_default_experiment_byte_for_byte():
    assert (ROOT / "params.yaml").read_bytes() == TINY.read_bytes()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("seed=1", "seed: no such key: did you mean train.seed or sampling.seed?"),
        ("device=cuda", "device: no such key: did you mean run.device?"),
        ("train.learning_rat=1", "train.learning_rat: no such key: did you mean 'learning_rate'?"),
        ("modle.vocab=3", "there is no 'modle' here: did you mean 'model'?"),
        ("model.vocab=1_000", "model.vocab: expected a whole number, found the text '1_000': write it as plain digits"),
        ("model.tied=on", "model.tied: expected true or false, found the text 'on': write true or false"),
        ("model.linear_bias=no", "model.linear_bias: expected true or false, found the text 'no'"),
        ("train.steps=0", "train.steps: expected at least 1, found 0"),
        ("train.batch=0", "train.batch: expected at least 1, found 0"),
        ("train.steps=-3", "train.steps: expected at least 1, found -3"),
        ("train.steps=1e3", "train.steps: expected a whole number, found 1000.0: write 1000"),
        ("train.learning_rate=-1e-3", "train.learning_rate: expected at least 0"),
        ("train.learning_rate=.nan", "train.learning_rate: expected a finite number, found nan"),
        ("train.learning_rate=.inf", "train.learning_rate: expected a finite number, found inf"),
        ("train.learning_rate=fast", "train.learning_rate: expected a number, found the text 'fast'"),
        ("train.learning_rate=", "train.learning_rate: expected a number, found nothing"),
        ("train.decayed=matrix", "train.decayed: expected a list, found the text 'matrix'"),
        ("train.decayed=[matrices]", "train.decayed.0: expected 'matrix', 'embedding', 'bias' or 'norm'"),
        ("model.heads=7", "model: heads must divide d_model, found heads=7, d_model=128: set heads to"),
        ("train.shards=5", "train: shards must divide batch, found batch=16, shards=5"),
        ("train.warmup_steps=5000", "train: warmup_steps may be at most steps="),
        ("model.dropout=1.0", "model.dropout: expected less than 1.0, found 1.0"),
        ("model.activation=swish", "model.activation: expected 'gelu' or 'relu', found the text 'swish'"),
        ("tier=fast", "tier: expected 'portable', 'debug' or 'prod', found the text 'fast'"),
        ("data.tokenizer={kind: words}", "data.tokenizer.kind: expected one of 'characters', 'bpe', found 'words'"),
        ("data.tokenizer={}", "data.tokenizer: expected a section with the key kind"),
        ("data.tokenizer={kind: bpe}", "data.tokenizer.vocabulary: expected a value, found none: add it"),
        ("data.tokenizer={kind: bpe, vocabulary: 300, size: 3}", "data.tokenizer.size: no such key"),
        ("data.sources=[]", "data.sources: expected a list of at least 1"),
        (
            "data.sources.0.sha256=abc",
            "data.sources.0.sha256: expected 64 hexadecimal digits (0-9, a-f), found the text 'abc'",
        ),
        ("data.sources.0.versoin=1", "data.sources.0.versoin: no such key: did you mean 'version'?"),
        ("data.cleaning=[upper]", "data.cleaning.0: expected 'strip_bom', 'newlines' or 'nfc'"),
        ("data.cleaning=[nfc, nfc]", "expected each step once"),
        ("data.validation_permille=1000", "data.validation_permille: expected at most 999, found 1000"),
        ("sampling.prompt=''", "sampling.prompt: expected text of at least 1 characters"),
        ("run.device=tpu", "run.device: expected 'cpu' or 'cuda', found the text 'tpu'"),
        ("run.save_every_steps=0", "run.save_every_steps: expected at least 1, found 0"),
        ("model=3", "model: expected a section with keys, found 3"),
        ("train.steps=2097153", "train.steps may be at most 2097152"),
        ("train.seed=9007199254740993", "train.seed may be at most 9007199254740991"),
        ("train.seed=9223372036854775808", "train.seed: expected less than 9223372036854775808"),
        ("train", "-S train: expected section.key=value"),
        ("=3", "-S =3: expected section.key=value"),
        ("train..steps=3", "expected section.key=value"),
        ("tier.portable=3", "tier has no keys"),
        ("data.sources.5.kind=file", "there is no '5' here"),
        ("train.steps=[", "-S train.steps=[, line 1"),
    ],
)
def test_faults_say_path_expected_found_and_what_to_do(override, says):
    message = fault(override)
    assert says in message
    assert "pydantic" not in message
    assert "Traceback" not in message


def test_all_faults_are_told_at_once():
    message = fault("train.steps=0", "model.vocab=x", "run.device=tpu")
    assert [path in message for path in ("train.steps", "model.vocab", "run.device")] == [True] * 3


def test_a_misspelt_key_that_is_needed_is_told_from_both_sides(tmp_path):
    message = changed(tmp_path, "  warmup_steps:", "  warmup_step:")
    assert "train.warmup_steps: expected a value, found none: add it (is 'warmup_step' a misspelling of it?)" in message
    assert "train.warmup_step: no such key: did you mean 'warmup_steps'?" in message


@pytest.mark.parametrize("key", ["beta1", "beta2", "d_model"])
def test_a_missing_key_is_no_misspelling_of_a_right_one(tmp_path, key):
    line = next(line for line in TINY.read_text(encoding="utf-8").splitlines(True) if line.strip().startswith(key))
    message = changed(tmp_path, line, "")
    assert message.endswith(f".{key}: expected a value, found none: add it")


def test_faults_of_an_override_name_it():
    assert fault("train.steps=3", "train.stepz=3").startswith(
        f"{TINY} with -S train.steps=3 -S train.stepz=3 is not a usable configuration:"
    )
    with_file = fault("train.stepz=3").partition(" is not")[0]
    assert with_file == f"{TINY} with -S train.stepz=3"


def test_a_key_twice_is_refused(tmp_path):
    assert "the key 'steps' stands here for the second time" in changed(tmp_path, "  batch:", "  steps: 5\n  batch:")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "expected sections"),
        (b"[1, 2]", "expected sections"),
        (b"tier: \xff\n", "expected UTF-8, found byte 0xff at offset 6"),
        (b"tier: portable\n", "model: expected a value, found none"),
    ],
)
def test_files_that_are_no_configuration(tmp_path, content, says):
    path = tmp_path / "params.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError) as caught:
        load_configuration(path)
    assert says in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="no such file"):
        load_configuration(tmp_path / "params.yaml")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_configuration(tmp_path)


def test_a_byte_order_mark_is_no_fault(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + TINY.read_bytes())
    assert load_configuration(path) == load_configuration(TINY)


def test_overrides_mean_what_the_file_means():
    found = load_configuration(
        TINY,
        ["train.learning_rate=1e-5", "train.final_learning_rate=0", "data.sources.0.version='9'", "model.dropout=0.25"],
    )
    assert (found.train.learning_rate, found.train.final_learning_rate) == (1e-5, 0.0)
    assert found.model.dropout == 0.25
    assert found.data.sources[0].version == "9"


def test_identity_leaves_out_what_changes_no_bit():
    plain = load_configuration(TINY).identity()
    harmless = ["model.attention=tiled", "run.threads=3", "run.recompute=2", "run.save_every_steps=7"]
    same = load_configuration(TINY, harmless).identity()
    assert same == plain
    assert "run" not in plain


def _leaves(value, path=()):
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    else:
        yield path


def test_everything_else_is_in_the_identity():
    configuration = load_configuration(TINY)
    written = {path for path in _leaves(configuration.model_dump(mode="json")) if path[0] != "run"}
    assert set(_leaves(configuration.identity())) == written - {("model", "attention")}


def test_a_recorded_identity_gives_the_configuration_back():
    for path in EXPERIMENTS:
        configuration = load_configuration(path)
        again = from_identity(configuration.identity(), configuration.run, "record")
        assert again.identity() == configuration.identity()


def test_a_doctored_identity_is_refused():
    configuration = load_configuration(TINY)
    identity = configuration.identity()
    identity["train"]["extra"] = 1
    with pytest.raises(ConfigurationError, match=r"train\.extra: no such key"):
        from_identity(identity, configuration.run, "record")


def test_differences_name_every_key():
    before = load_configuration(TINY).identity()
    after = load_configuration(TINY, ["train.steps=5", "train.warmup_steps=1", "data.cleaning=[nfc]"]).identity()
    lines = differences(before, after)
    assert [line.split(":")[0] for line in lines] == ["data.cleaning", "train.steps", "train.warmup_steps"]
    assert lines[1].endswith(f"was {before['train']['steps']}, is 5")


def test_threads_zero_takes_what_this_process_may_use(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {1, 4, 5}, raising=False)
    options = RunOptions(device="cpu", threads=0, recompute=0, save_every_steps=1, store="s", progress="none")
    assert options.thread_count() == 3
    assert options.model_copy(update={"threads": 2}).thread_count() == 2


def test_no_section_has_a_hidden_default():
    """What is not written is an error, so a configuration says everything; cleaning is none unless declared."""
    whole = load_configuration(TINY).model_dump(mode="json")
    for section, values in whole.items():
        for key in values if isinstance(values, dict) else ():
            if (section, key) == ("data", "cleaning"):
                continue
            part = {**whole, section: {k: v for k, v in values.items() if k != key}}
            with pytest.raises(ValueError, match=key):
                Configuration.model_validate(part)
