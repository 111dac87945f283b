"""A drawing of the graph as SVG: the same bytes for the same graph.

Computation runs from top to bottom in one column. What starts beside it (the positions) stands to the right; an edge
that passes nodes by (a residual stream) runs to the left of them, the way back of a repeat to the right.
"""

from dataclasses import dataclass
from xml.sax.saxutils import escape

from reproduce.model.graph import Graph, Group, Node, Port, show

_WIDTH = 900
_CENTRE = 420
_BOX = 300
_SIDE = 700  # centre of what starts beside the column
_SIDE_BOX = 220
_TOP = 92
_GAP = 40  # between nodes, room for the shape of an edge
_HEIGHTS = {"sum": 28, "carry": 22}
_HEIGHT = 46
_LEFT_LANE = _CENTRE - _BOX // 2 - 40
_RIGHT_LANE = _CENTRE + _BOX // 2 + 40
_MARGIN = 22  # between a group's frame and what is in it
_COLOURS = {  # fill, line
    "tokens": ("#f1f3f5", "#868e96"),
    "token_embed": ("#fff3d6", "#e0a100"),
    "learned_pos": ("#fff3d6", "#e0a100"),
    "dropout": ("#f1f3f5", "#868e96"),
    "norm": ("#e6f4ea", "#2f9e44"),
    "linear": ("#e3eefc", "#1c6dd0"),
    "attention": ("#fde7e4", "#d9480f"),
    "activation": ("#f3e8fd", "#8b3fd1"),
    "head": ("#e3eefc", "#1c6dd0"),
    "sum": ("#ffffff", "#343a40"),
    "carry": ("#ffffff", "#343a40"),
    "logits": ("#f1f3f5", "#868e96"),
}
_STYLE = (
    "text{font-family:'DejaVu Sans','Segoe UI',Helvetica,Arial,sans-serif;fill:#212529}"
    ".t{font-size:14px;font-weight:600}.d{font-size:11.5px;fill:#495057}"
    ".s{font-family:'DejaVu Sans Mono',Menlo,Consolas,monospace;font-size:11px;fill:#495057}"
    ".h{font-size:19px;font-weight:600}.e{stroke:#495057;stroke-width:1.4;fill:none}"
    ".r{stroke:#868e96;stroke-width:1.4;fill:none;stroke-dasharray:5 4}"
)


@dataclass(frozen=True)
class _Box:
    centre: int
    top: int
    width: int
    height: int

    @property
    def bottom(self) -> int:
        return self.top + self.height

    @property
    def middle(self) -> int:
        return self.top + self.height // 2

    @property
    def left(self) -> int:
        return self.centre - self.width // 2

    @property
    def right(self) -> int:
        return self.centre + self.width // 2


def draw(graph: Graph) -> str:
    """The SVG text."""
    column = [node for node in graph.nodes.values() if not _is_beside(node)]
    boxes = _place(graph, column)
    end = boxes[graph.logits.node]
    last = _Box(_CENTRE, end.bottom + _GAP, 120, 30)
    parts = [_frame(graph, group, boxes) for group in graph.groups.values()]
    parts += [_edge(graph, node, role, boxes, column) for node in graph.nodes.values() for role in node.inputs]
    parts += [_way_back(graph, group, boxes) for group in graph.groups.values()]
    parts.append(_line(end, last, show(graph.shape(graph.logits))))
    parts += [_node(node, boxes[node.name]) for node in graph.nodes.values()]
    parts.append(_rectangle(last, "logits") + _text(last.centre, last.middle + 5, "t", "logits"))
    return _page(graph, last.bottom + 30, parts)


def _page(graph: Graph, height: int, parts: list[str]) -> str:
    context = graph.nodes["learned_pos"].parameters["table"][0]
    legend = f"{graph.parameter_count:,} parameters · shapes: B rows of a batch, T = {context} tokens of context"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{escape(graph.name)}</title>",
        f"<style>{_STYLE}</style>",
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#495057"/></marker></defs>',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="36" y="40" class="h">{escape(_cut(graph.name, 60))}</text>',
        f'<text x="36" y="62" class="d">{escape(legend)}</text>',
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _is_beside(node: Node) -> bool:
    """Whether a node starts from nothing beside the column."""
    return not node.inputs and node.operation != "tokens"


def _place(graph: Graph, column: list[Node]) -> dict[str, _Box]:
    boxes: dict[str, _Box] = {}
    top = _TOP
    group = ""
    for node in column:
        if node.group != group:
            # Room for the frame, and above its first node for its title.
            top += 2 * _MARGIN if node.group else _MARGIN
            group = node.group
        height = _HEIGHTS.get(node.operation, _HEIGHT)
        width = 28 if node.operation == "sum" else 64 if node.operation == "carry" else _BOX
        boxes[node.name] = _Box(_CENTRE, top, width, height)
        top += height + _GAP
    for node in graph.nodes.values():
        if _is_beside(node):
            boxes[node.name] = _Box(_SIDE, _above(graph, node, boxes), _SIDE_BOX, _HEIGHT)
    return boxes


def _above(graph: Graph, node: Node, boxes: dict[str, _Box]) -> int:
    """The top of a node beside the column: level with what feeds the same node."""
    taker = next(n for n in graph.nodes.values() if Port(node.name, "y") in n.inputs.values())
    return boxes[taker.name].top - _GAP - _HEIGHT


def _frame(graph: Graph, group: Group, boxes: dict[str, _Box]) -> str:
    inside = [boxes[node.name] for node in graph.nodes.values() if node.group == group.name]
    top = min(box.top for box in inside) - 2 * _MARGIN + 6
    bottom = max(box.bottom for box in inside) + _MARGIN
    left, right = _LEFT_LANE - 114, _RIGHT_LANE + 112
    return (
        f'<rect x="{left}" y="{top}" width="{right - left}" height="{bottom - top}" rx="14" fill="#f8f9fa" '
        'stroke="#ced4da"/>'
        f'<text x="{left + 16}" y="{top + 25}" class="t">repeat × {group.count:,}</text>'
    )


def _edge(graph: Graph, node: Node, role: str, boxes: dict[str, _Box], column: list[Node]) -> str:
    port = node.inputs[role]
    source, target = boxes[port.node], boxes[node.name]
    label = show(graph.shape(port))
    if source.centre != target.centre:
        # From beside: down, then into the side of the node.
        path = f"M{source.centre} {source.bottom} V{target.middle} H{target.right + 2}"
        return _path(path, "e") + _text((source.centre + target.right) // 2, target.middle - 7, "s", label)
    names = [n.name for n in column]
    if names.index(node.name) == names.index(port.node) + 1:
        return _line(source, target, label)
    lane = _LEFT_LANE
    path = (
        f"M{source.left} {source.middle} H{lane + 10} Q{lane} {source.middle} {lane} {source.middle + 10} "
        f"V{target.middle - 10} Q{lane} {target.middle} {lane + 10} {target.middle} H{target.left - 2}"
    )
    return _path(path, "e") + _text(lane - 8, (source.middle + target.middle) // 2, "s", label, "end")


def _line(source: _Box, target: _Box, label: str) -> str:
    path = f"M{source.centre} {source.bottom} V{target.top - 2}"
    middle = (source.bottom + target.top) // 2 + 3
    return _path(path, "e") + _text(source.centre + 10, middle, "s", label, "start")


def _way_back(graph: Graph, group: Group, boxes: dict[str, _Box]) -> str:
    if group.count == 1:
        return ""
    source, target = boxes[group.leaving.node], boxes[group.entering.node]
    lane = _RIGHT_LANE
    path = (
        f"M{source.right} {source.middle} H{lane - 10} Q{lane} {source.middle} {lane} {source.middle - 10} "
        f"V{target.middle + 10} Q{lane} {target.middle} {lane - 10} {target.middle} H{target.right + 2}"
    )
    middle = (source.middle + target.middle) // 2
    label = _text(lane + 10, middle - 7, "d", "next round,", "start")
    label += _text(lane + 10, middle + 9, "d", f"{group.count - 1:,} times", "start")
    return _path(path, "r") + label


def _path(path: str, style: str) -> str:
    return f'<path d="{path}" class="{style}" marker-end="url(#a)"/>'


def _rectangle(box: _Box, operation: str) -> str:
    fill, line = _COLOURS[operation]
    radius = box.height // 2 if operation in ("sum", "carry", "logits") else 8
    return (
        f'<rect x="{box.left}" y="{box.top}" width="{box.width}" height="{box.height}" rx="{radius}" '
        f'fill="{fill}" stroke="{line}" stroke-width="1.4"/>'
    )


def _text(x: int, y: int, style: str, text: str, anchor: str = "middle", fit: int = 0) -> str:
    """`fit`: pixels that the text is squeezed into if it may be longer."""
    squeezed = f' textLength="{fit}" lengthAdjust="spacingAndGlyphs"' if fit and len(text) * 6.5 > fit else ""
    return f'<text x="{x}" y="{y}" class="{style}" text-anchor="{anchor}"{squeezed}>{escape(text)}</text>'


def _node(node: Node, box: _Box) -> str:
    shape = _rectangle(box, node.operation)
    if node.operation == "sum":
        return shape + _text(box.centre, box.middle + 5, "t", "+")
    if node.operation == "carry":
        return shape + _text(box.centre, box.middle + 5, "t", _cut(node.name.rsplit(".", 1)[-1], 6))
    title, detail = _title(node), _detail(node)
    if not detail:
        return shape + _text(box.centre, box.middle + 5, "t", title)
    return (
        shape
        + _text(box.centre, box.middle - 4, "t", title)
        + _text(box.centre, box.middle + 14, "d", detail, fit=box.width - 20)
    )


def _title(node: Node) -> str:
    name = node.name.rsplit(".", 2)
    if node.operation == "linear":
        words = {"qkv": "query, key, value", "hidden": "up", "out": "out"}
        return f"{name[-2].rstrip('0123456789')}: {words[name[-1]]}"
    titles = {
        "tokens": "tokens",
        "token_embed": "token embedding",
        "learned_pos": "positions",
        "head": "head",
        "activation": str(node.values.get("activation", "")).upper(),
    }
    return titles.get(node.operation, node.operation)


def _detail(node: Node) -> str:
    """What a node is beside its title: its arguments and its parameters."""
    match node.operation:
        case "tokens":
            return f"{node.values['vocab']:,} kinds"
        case "dropout":
            return f"rate {node.values['dropout']:g}"
        case "attention":
            words = [f"{node.values['heads']:,} heads", "causal", str(node.values["memory"])]
            return " · ".join([*words, *_dropout(node)])
        case "head" if node.values["tied"]:
            return "weights of the token embedding"
        case "activation":
            return ""
    shapes = [f"{name} {' × '.join(f'{d:,}' for d in shape)}" for name, shape in node.parameters.items()]
    return " · ".join([*shapes, *_dropout(node)]) or "no parameters"


def _dropout(node: Node) -> list[str]:
    rate = node.values.get("dropout", 0.0)
    return [f"dropout {rate:g}"] if rate else []


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
