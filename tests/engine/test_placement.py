"""Places in the arena: the same as by looking at everything placed before, one by one."""

from collections.abc import Callable, Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.placement import ALIGNMENT, Storage, place
from engine.program import build_program
from tests.engine.training import model_spec

Life = tuple[int, int, int]  # bytes, first and last time


def by_looking_at_all(lives: Sequence[Life], alignment: int = ALIGNMENT) -> tuple[list[int], int]:
    """Offsets and bytes in all of the better order: longest-lived first, then largest; or earliest first, then
    longest-lived, then largest."""
    orders = [lambda life: (life[1] - life[2], -life[0]), lambda life: (life[1], -life[2], -life[0])]
    return min((in_this_order(lives, order, alignment) for order in orders), key=lambda found: found[1])


def in_this_order(
    lives: Sequence[Life], key: Callable[[Life], tuple[int, ...]], alignment: int
) -> tuple[list[int], int]:
    """Those that live throughout side by side, then each at the lowest place free then."""
    end = max(last for _, _, last in lives)
    lasting = [n for n, (_, first, last) in enumerate(lives) if (first, last) == (0, end)]
    passing = [n for n in range(len(lives)) if n not in lasting]
    order = sorted(lasting, key=lambda n: -lives[n][0])
    order += sorted(passing, key=lambda n: key(lives[n]))
    offsets = [0] * len(lives)
    stops: list[int] = []
    floor = 0
    for number, n in enumerate(order):
        size, first, last = lives[n]
        size = (size + alignment - 1) // alignment * alignment
        offset = 0 if n in lasting else floor
        placed = [m for m in order[:number] if lives[m][1] <= last and first <= lives[m][2]]
        for m in sorted(placed, key=lambda m: offsets[m]):
            if n not in lasting and m in lasting:
                continue
            if offset + size <= offsets[m]:
                break
            offset = max(offset, offsets[m] + (lives[m][0] + alignment - 1) // alignment * alignment)
        offsets[n] = offset
        stops.append(offset + size)
        if n in lasting:
            floor = offset + size
    return offsets, max(stops)


def placed(lives: Sequence[Life], alignment: int) -> tuple[list[int], int]:
    storages = [Storage(*life) for life in lives]
    total = place(storages, alignment)
    return [s.offset for s in storages], total


@st.composite
def lives(draw: st.DrawFn) -> list[Life]:
    end = draw(st.integers(0, 40))
    time = st.integers(0, end)
    size = st.one_of(st.integers(1, 300), st.sampled_from([64, 128, 4096, 10**15]))
    pairs = draw(st.lists(st.tuples(size, time, time), min_size=1, max_size=60))
    return [(size, min(a, b), max(a, b)) for size, a, b in pairs]


@settings(max_examples=300)
@given(lives(), st.sampled_from([ALIGNMENT, 1024]))
@example([(1, 0, 0)], ALIGNMENT)
@example([(64, 0, 3), (128, 1, 2), (64, 2, 2), (64, 1, 1), (64, 3, 3), (192, 2, 3)], ALIGNMENT)
def test_places_are_those_of_the_plain_search(lives: list[Life], alignment: int) -> None:
    offsets, total = placed(lives, alignment)
    assert (offsets, total) == by_looking_at_all(lives, alignment)
    assert all(offset % alignment == 0 for offset in offsets)


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 6), st.sampled_from([16, 48]), st.integers(1, 40), st.sampled_from(["stored", "tiled"]), st.data()
)
def test_places_of_programs_are_those_of_the_plain_search(
    layers: int, width: int, context: int, attention: str, data: st.DataObject
) -> None:
    """The storages of whole programs, recomputed blocks included, as the planner hands them over."""
    from engine import plan
    from tests.engine.training import train_spec

    model = model_spec(layers=layers, d_model=width, heads=2, context=context, attention=attention)
    program = build_program(model, data.draw(st.integers(0, layers)))
    made = plan.make_plan(program, train_spec(), data.draw(st.sampled_from(["portable", "debug"])), 2)
    # Buffers that hand their place on share one storage: what has one offset and one life is one of them.
    storages = {(b.offset, b.first, b.last): b.type.bytes for b in made.buffers.values()}
    lives = [(size, first, last) for (_, first, last), size in storages.items()]
    offsets, total = by_looking_at_all(lives)
    assert total == made.arena_bytes
    assert offsets == [offset for offset, _, _ in storages]


def test_one_storage_named_twice_has_one_place() -> None:
    shared = Storage(100, 1, 2)
    total = place([shared, Storage(64, 0, 3), shared, Storage(64, 1, 1)])
    assert (shared.offset, total) == (64, 64 + 128 + 64)
