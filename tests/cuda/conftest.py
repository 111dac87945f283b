"""What tests of kernels for compute capability 9.0 share."""

from collections.abc import Iterator

import pytest

from engine.backends.cuda.card import Card
from engine.backends.cuda.launching import Launcher
from engine.backends.cuda.mixed.hopper_attention import serves


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    card = Card()
    if not serves(card.capability):
        pytest.skip("the kernels are for compute capability 9.0")
    yield Launcher(card)
