"""The drawing: sound SVG, the same bytes every time, with every node and shape in it."""

import subprocess
import sys
from xml.etree import ElementTree

from hypothesis import given, settings

from engine.spec import ModelSpec
from reproduce.model.code import graph_of, read_code
from reproduce.model.drawing import draw
from reproduce.model.graph import show
from reproduce.model.source import Source
from tests.plan.models import EXAMPLE, specs

SVG = "{http://www.w3.org/2000/svg}"


@settings(max_examples=20)
@given(specs())
def test_everything_is_in_it(spec: ModelSpec) -> None:
    graph = graph_of(spec)
    root = ElementTree.fromstring(draw(graph))
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    for edge in graph.to_json()["edges"]:
        assert show(tuple(edge["shape"])) in texts
    assert f"repeat × {spec.layers}" in texts
    assert f"{graph.parameter_count:,} parameters" in " ".join(texts)
    assert sum(text == "norm" for text in texts) == 3


@settings(max_examples=20)
@given(specs())
def test_nothing_overlaps_and_nothing_is_outside(spec: ModelSpec) -> None:
    root = ElementTree.fromstring(draw(graph_of(spec)))
    width, height = int(root.get("width", 0)), int(root.get("height", 0))
    page, frame, *boxes = [
        tuple(int(r.get(name, 0)) for name in ("x", "y", "width", "height")) for r in root.iter(f"{SVG}rect")
    ]
    assert page == (0, 0, width, height)
    for x, y, w, h in (frame, *boxes):
        assert min(x, y) >= 0 and x + w <= width and y + h <= height
    for number, (x, y, w, h) in enumerate(boxes):
        for other_x, other_y, other_w, other_h in boxes[:number]:
            assert x + w <= other_x or other_x + other_w <= x or y + h <= other_y or other_y + other_h <= y


def test_names_are_escaped() -> None:
    """A name cannot hold markup, so only what the grammar lets through is drawn."""
    graph = read_code(Source("m", EXAMPLE.replace("CharTransformer", "M" * 300))).graph
    root = ElementTree.fromstring(draw(graph))
    assert all(len(element.text or "") <= 120 for element in root.iter(f"{SVG}text"))


def test_the_same_bytes_in_another_process() -> None:
    program = (
        "import sys; from tests.plan.models import EXAMPLE; from reproduce.model.code import read_code;"
        "from reproduce.model.source import Source; from reproduce.model.drawing import draw;"
        "sys.stdout.buffer.write(draw(read_code(Source('m', EXAMPLE)).graph).encode('utf-8'))"
    )
    drawn = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "LC_ALL": "C", "PYTHONPATH": ":".join(filter(None, sys.path))},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    ours = draw(read_code(Source("m", EXAMPLE)).graph).encode("utf-8")
    assert drawn == [ours, ours]
