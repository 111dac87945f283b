"""A card that is lost in the middle of a run ends in one clear error; what was saved before goes on.

Each case is a process of its own: a context that met an illegal address answers every later call with an error, as a
card that fell off the bus does.
"""

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.gpu

SCRIPT = """
import sys
from engine.backends.cuda.run import OPTIMIZER
from engine.errors import EngineError
from engine.trainer import Trainer
from tests.cuda.pairs import model, train
from tests.cuda.test_trainer import RandomBatches

tier, precision = sys.argv[1:]
spec = model(d_model=16, heads=2, hidden=32, context=16)
recipe = train().model_copy(update={"precision": precision or None})
run = Trainer(spec, recipe, tier, RandomBatches(spec.vocab), threads=2, device="cuda")
run.initialise()
run.train_step()
run.train_step()
nowhere = 1 << 12
run.backend.launcher(OPTIMIZER, "k_join_gradients", "PiqPi", (1,), (256,), nowhere, 1, 1024, nowhere, 0)
for ask in (run.train_step, run.saved_state, run.train_step):
    try:
        ask()
        print("went on")
    except EngineError as error:
        print(type(error).__name__, error)
print("step", run.step)
run.close()
print("closed")
"""


@pytest.mark.parametrize(("tier", "precision"), [("portable", ""), ("debug", ""), ("prod", "bf16")])
def test_every_call_says_that_the_card_is_lost(tier: str, precision: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), tier, precision], capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["DeviceLost"] * 3 + ["step", "closed"], (done.stdout, done.stderr)
    assert all("What was saved before is whole" in line for line in lines[:3])
    assert lines[3] == "step 2"
