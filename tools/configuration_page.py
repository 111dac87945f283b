"""Writes docs/configuration.md from the models that check configurations; run it with .venv/bin/python."""

from pathlib import Path
from typing import Any

from data_pipeline.sources import FileSource, UrlSource, WheelSource
from data_pipeline.spec import BpeTokenizer, CharacterTokenizer, DataSpec
from engine.spec import ModelSpec, TrainSpec
from reproduce.configuration import EvaluationSpec, RunOptions, SamplingSpec

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
HEAD = """# Configuration

`params.yaml` holds the whole configuration of the current experiment; `experiments/` holds complete ones by name, and
`reproduce use NAME` copies one over. What is not written is an error (only `data.cleaning` may be left out), and so is
an unknown key. YAML is read as version 1.2 (`1e-5` is a number, `on` and `no` are text). `reproduce plan`, `reproduce
model code` and `resume --fork` take changes as `-S section.key=value`; the pipeline takes them as `dvc exp run -S
section.key=value`, with a `+` before a key that `params.yaml` does not have (`-S +train.precision=bf16`).

`tier` is `portable` (the same bits on every machine), `debug` (plain fp32: the same bits on the same kind of machine)
or `prod` (on a GPU, with `train.precision` bf16, fp16 or, as an experiment, fp8: the same bits on the same model of
card and libraries, elsewhere a declared tolerance).

This page is written by `tools/configuration_page.py` from the code that checks configurations.
"""


def table(title: str, intro: str, model: Any) -> str:
    lines = [f"\n## {title}\n", f"{intro}\n", "| key | meaning |", "|---|---|"]
    for name, field in model.model_fields.items():
        lines.append(f"| `{name}` | {' '.join((field.description or '').split()).replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    parts = [HEAD, table("data", "Where the text comes from and how it becomes tokens.", DataSpec)]
    for source in (WheelSource, FileSource, UrlSource):
        kind = source.model_fields["kind"].annotation.__args__[0]
        parts.append(table(f"data.sources, kind: {kind}", " ".join((source.__doc__ or "").split()), source))
    for tokenizer in (CharacterTokenizer, BpeTokenizer):
        kind = tokenizer.model_fields["kind"].annotation.__args__[0]
        parts.append(table(f"data.tokenizer, kind: {kind}", " ".join((tokenizer.__doc__ or "").split()), tokenizer))
    parts.append(table("model", (ModelSpec.__doc__ or "").strip(), ModelSpec))
    parts.append(table("train", (TrainSpec.__doc__ or "").strip(), TrainSpec))
    parts.append(table("evaluation", (EvaluationSpec.__doc__ or "").strip(), EvaluationSpec))
    parts.append(table("sampling", (SamplingSpec.__doc__ or "").strip(), SamplingSpec))
    intro = "Run options change no bit, enter no hash and start nothing anew; so it is with `model.attention`."
    parts.append(table("run", intro, RunOptions))
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8", newline="")
