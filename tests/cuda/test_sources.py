"""What kernels' sources must not say, whatever a card makes of it."""

import re

import pytest

from engine.backends.cuda.sources import UNITS, headers, source

# Of compute capability 9.0, whose products run on while the warpgroup goes on.
TEXTS = {name: text for name, text in ({u: source(u) for u in UNITS} | dict(headers())).items() if "_commit()" in text}
FUNCTION = re.compile(r"^[^\s#].*?\b(?!__)(\w+)\([^;]*?\{$(.*?)^\}", re.M | re.S)
MEETING = r"__syncthreads\w*|warps_meet|warpgroup_meets|tiles_stored|cluster_sync|bar\.sync"


def meetings_with_products_under_way(text: str) -> list[str]:
    """Where a function has warpgroups meet between products and the wait for all of them: after it another one may
    write what these products still read. By the order of the text, function by function."""
    functions = [(name, re.sub(r"//.*", "", body)) for name, body in FUNCTION.findall(text)]
    leaving = [name for name, body in functions if "products_commit" in body and "products_wait" not in body]
    begins = "|".join(["products_commit", *leaving])
    found = []
    for name, body in functions:
        under_way = False
        for match in re.finditer(rf"\b({begins})\(|products_wait<(\d)>|({MEETING})", body):
            if match[1]:
                under_way = True
            elif match[2]:
                under_way = under_way and match[2] != "0"
            elif under_way:
                found.append(f"{name}: {match[3]}")
    return found


@pytest.mark.parametrize("name", TEXTS)
def test_warpgroups_do_not_meet_with_products_under_way(name: str) -> None:
    assert meetings_with_products_under_way(TEXTS[name]) == []


def test_the_kernels_with_products_of_warpgroups_are_looked_at() -> None:
    units = {f"{name}_mixed" for name in ("activation_hopper", "attention_hopper", "norm_hopper", "weight_gradient")}
    assert units | {"hopper.cuh"} <= set(TEXTS)


@pytest.mark.parametrize("between", ["products_wait<1>();", "", "multiply(); products_wait<1>();"])
def test_a_meeting_with_products_under_way_is_found(between: str) -> None:
    text = "void multiply() {\nproducts_commit();\n}\n\nvoid bad(int x) {\nmultiply();\n%s\n__syncthreads();\n}\n"
    assert meetings_with_products_under_way(text % between) == ["bad: __syncthreads"]
    assert meetings_with_products_under_way(text % f"{between} products_wait<0>();") == []
