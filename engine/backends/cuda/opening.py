"""Opening the card for a program: checks first, then the plan, then one allocation."""

from engine.backends.cuda.backend import CudaBackend
from engine.backends.cuda.card import Card
from engine.backends.cuda.errors import DeviceUnavailable
from engine.backends.cuda.layout import CudaLayout
from engine.backends.cuda.mixed.backend import MixedBackend
from engine.backends.cuda.mixed.hopper_attention import serves
from engine.backends.cuda.mixed.layout import MixedLayout
from engine.backends.cuda.mixed.program import mixed_program
from engine.errors import SpecError
from engine.numerics.self_test import check_float_environment
from engine.plan import Plan, make_plan
from engine.program import Program, build_program
from engine.spec import Tier, TrainSpec

OLDEST_MIXED_CAPABILITY = 80  # bfloat16
OLDEST_EIGHT_BIT_CAPABILITY = 89  # E4M3
LONGEST_CONTEXT = 65536  # int32 sums over the keys of a row hold up to here


def cuda_plan(
    program: Program, train: TrainSpec, tier: Tier, fused: bool = True, capability: int = 0
) -> tuple[Program, Plan, CudaLayout]:
    """The program and plan that a card executes; needs no card. `fused` is CudaLayout's.

    capability: the card's; where it is 0, not known, the plan of the tier prod is for a card that has none of our own
    kernels for compute capability 9.0.

    Attention weights are always computed again, never stored: on a card that is faster than reading them back.
    """
    spec = program.spec
    if spec.context > LONGEST_CONTEXT:
        raise SpecError(f"device cuda takes model.context up to {LONGEST_CONTEXT}, found {spec.context}")
    recompute = sum(1 for step in program.backward if step.again)
    if train.precision is not None:
        own = serves(capability)
        program = mixed_program(program, train.precision, recompute, own)
        layout: CudaLayout = MixedLayout(program, train, tier, own)
        return program, make_plan(program, train, tier, layout.threads, layout), layout
    if spec.attention == "stored":
        program = build_program(spec.model_copy(update={"attention": "tiled"}), recompute)
    layout = CudaLayout(program, train, tier, fused)
    return program, make_plan(program, train, tier, layout.threads, layout), layout


def too_old(train: TrainSpec, card: str, capability: int) -> str | None:
    """What a card of this compute capability (times ten) lacks for the precision; None if nothing."""
    has = f"{card} has compute capability {capability / 10}"
    if train.precision is not None and capability < OLDEST_MIXED_CAPABILITY:
        return f"{has}, the tier prod needs at least {OLDEST_MIXED_CAPABILITY / 10}: use the tier portable"
    if train.precision == "fp8" and capability < OLDEST_EIGHT_BIT_CAPABILITY:
        return f"{has}, train.precision: fp8 needs at least {OLDEST_EIGHT_BIT_CAPABILITY / 10}: use bf16"
    return None


def open_cuda_backend(program: Program, train: TrainSpec, tier: Tier) -> tuple[Plan, CudaBackend]:
    """Raises DeviceUnavailable, PlanRefused or SpecError before anything is allocated."""
    check_float_environment()
    cuda_plan(program, train, tier)  # what is wrong with the configuration is said first
    card = Card()
    if problem := too_old(train, card.name, card.capability):
        raise DeviceUnavailable(problem)
    program, plan, layout = cuda_plan(program, train, tier, capability=card.capability)
    plan.check_fits(card.free_memory(), card.name)
    if isinstance(layout, MixedLayout) and train.precision is not None:
        return plan, MixedBackend(program, plan, train, layout, card, train.precision)
    return plan, CudaBackend(program, plan, train, layout, card)
