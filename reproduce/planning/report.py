"""What a configuration needs on a device, from the engine's own plan: memory, disk, work, parameters."""

from dataclasses import asdict, dataclass
from math import log
from typing import Any

from engine.plan import Plan, make_plan
from engine.program import Program, build_program
from reproduce.configuration import Configuration
from reproduce.errors import PlanRefused, ReproduceError
from reproduce.model.code import graph_of
from reproduce.planning.devices import Device
from reproduce.planning.items import TITLES, Memory, ParameterItem, memory_of, parameters_of
from reproduce.planning.sizes import size
from reproduce.planning.work import Work, work_of
from reproduce.state import hash_of

_LASTING = 4 * (1 + 2 + 1)  # bytes for each parameter, at the least: weights, moments, gradients
_DEEP = 32  # layers from which to plan once for each remedy takes seconds

_STATE_BYTES = 12  # of a bundle for each parameter: weight, m and v in fp32
_HISTORY_BYTES = 36  # of a bundle for each step done: loss and digest
_CONTENT_BYTES = 96  # and in the tier debug for each named parameter: the hashes of its weights, m and v


@dataclass(frozen=True)
class Disk:
    """What the bundles of a run take in the store, before compression; equal pieces are kept only once."""

    bundles: int
    largest: int
    total: int


@dataclass(frozen=True)
class Report:
    """A configuration, planned for a device."""

    configuration: Configuration
    device: Device
    program: Program
    plan: Plan
    memory: Memory
    parameters: tuple[ParameterItem, ...]
    disk: Disk
    work: Work

    @property
    def peak(self) -> int:
        """Bytes that are allocated: the arena."""
        return self.plan.arena_bytes

    @property
    def parameter_count(self) -> int:
        return sum(item.elements for item in self.parameters)

    @property
    def initial_loss(self) -> float:
        """Nats per token of a model that knows nothing: ln(vocab)."""
        return log(self.configuration.model.vocab)

    @property
    def specification(self) -> str:
        return hash_of(self.configuration.model.identity())

    def to_json(self) -> dict[str, Any]:
        """Everything, sizes in bytes."""
        return {
            "device": asdict(self.device),
            "disk": asdict(self.disk),
            "graph": graph_of(self.configuration.model).to_json(),
            "initial_loss": self.initial_loss,
            "memory": {
                "by_category": self.memory.by_category(),
                "fullest": self.memory.moment,
                "gaps": self.memory.gaps,
                "largest": describe_largest(self),
                "items": [{**asdict(item), "bytes": item.bytes} for item in self.memory.items],
                "total": self.peak,
                "without_sharing": self.memory.shared,
            },
            "parameters": {
                "items": [{**asdict(item), "elements": item.elements} for item in self.parameters],
                "total": self.parameter_count,
            },
            "rows_at_once": self.plan.sizes.batch,
            "specification": self.specification,
            "threads": self.plan.sizes.threads,
            "work": {
                "per_step": {
                    "bytes": self.work.bytes,
                    "operations": self.work.operations,
                    "operations_computed_again": self.work.again,
                    "tokens": self.work.tokens,
                },
                "steps": self.work.steps,
                "total": {
                    "bytes": self.work.bytes * self.work.steps,
                    "operations": self.work.operations * self.work.steps,
                    "tokens": self.work.tokens * self.work.steps,
                },
            },
        }


def report(configuration: Configuration, device: Device) -> Report:
    """The plan of a configuration for a device, itemised. Nothing is allocated."""
    program, plan = plan_for(configuration, device)
    parameters = parameters_of(program)
    return Report(
        configuration=configuration,
        device=device,
        program=program,
        plan=plan,
        memory=memory_of(plan, program),
        parameters=parameters,
        disk=disk_of(configuration, sum(item.elements for item in parameters), len(program.parameters)),
        work=work_of(program, configuration.train),
    )


def refuse_early(configuration: Configuration, limit: "Limit") -> None:
    """Raises PlanRefused, without planning, if the parameters of a deep model exceed the limit by themselves."""
    if configuration.model.layers < _DEEP:
        return
    parameters = parameters_of(build_program(configuration.model))
    count = sum(item.elements for item in parameters)
    needed = _LASTING * count
    if needed > limit.bytes:
        raise PlanRefused(
            f"the plan needs {size(needed)} of memory for {count:,} parameters, their gradients and optimizer state "
            f"alone, {limit.what} {size(limit.bytes)}: use a smaller model"
        )


def plan_for(configuration: Configuration, device: Device) -> tuple[Program, Plan]:
    """The engine's plan as the backend of that device executes it."""
    model, train, tier = configuration.model, configuration.train, configuration.tier
    program = build_program(model, configuration.recomputed_blocks)
    if device.backend == "cpu":
        return program, make_plan(program, train, tier, configuration.run.thread_count())
    from engine.backends.cuda.opening import cuda_plan

    # Which kernels serve is a matter of the card, and so is what they need.
    program, plan, _ = cuda_plan(program, train, tier, capability=device.capability or 0)
    return program, plan


def disk_of(configuration: Configuration, parameters: int, names: int) -> Disk:
    """The bundles that a run saves by itself: at the start, every so many steps, at the end. parameters: elements of
    all `names` named ones."""
    steps, every = configuration.train.steps, configuration.run.save_every_steps
    regular = (steps - 1) // every
    state = _STATE_BYTES * parameters
    per_step = _HISTORY_BYTES + (_CONTENT_BYTES * names if configuration.tier == "debug" else 0)
    history = per_step * (every * regular * (regular + 1) // 2 + steps)
    return Disk(regular + 2, state + per_step * steps, (regular + 2) * state + history)


@dataclass(frozen=True)
class Limit:
    """The memory there is, in bytes, and how a message says so: `{what} {size}`."""

    bytes: int
    what: str


def limit_of(device: Device, budget: int | None) -> Limit:
    """The budget if there is one and it is less than the device has."""
    if budget is not None and (device.backend == "cpu" or budget < device.memory):
        return Limit(budget, "the budget is")
    return Limit(device.memory, device.what)


def refusal(found: Report, limit: Limit) -> PlanRefused | None:
    """Why the plan does not fit; None if it does."""
    if found.peak <= limit.bytes:
        return None
    return PlanRefused(
        f"the plan needs {size(found.peak)} of memory, {limit.what} {size(limit.bytes)}. "
        f"Largest item: {describe_largest(found)}"
    )


def require_tier(configuration: Configuration, device: Device) -> None:
    """Raises ReproduceError for a device that cannot run the configuration's tier, as the engine would."""
    if configuration.tier != "prod":
        return
    if device.capability is None:
        raise ReproduceError("the tier prod runs on a card: name one, such as --device h200, or set run.device: cuda")
    from engine.backends.cuda.opening import too_old

    if problem := too_old(configuration.train, device.title, device.capability):
        raise ReproduceError(problem)


def require_memory(configuration: Configuration, device: Device) -> Report:
    """The report of a configuration that fits the device. Raises PlanRefused for one that does not, and as
    `require_tier`."""
    require_tier(configuration, device)
    limit = limit_of(device, None)
    refuse_early(configuration, limit)
    found = report(configuration, device)
    if problem := refusal(found, limit):
        raise PlanRefused(f"{problem}. `reproduce plan` lists what would make it fit")
    return found


def portable_summary(configuration: Configuration) -> dict[str, Any]:
    """What a plan comes to, the same on every machine: for the CPU, with one thread and nothing recomputed."""
    one_thread = configuration.run.model_copy(update={"threads": 1, "recompute": 0})
    cpu = Device("cpu", "cpu", 0, "")
    found = report(configuration.model_copy(update={"run": one_thread}), cpu)
    return {
        "bundle_bytes": found.disk.largest,
        "initial_loss": found.initial_loss,
        "memory_bytes": found.peak,
        "memory_bytes_by_category": found.memory.by_category(),
        "operations": found.work.operations * found.work.steps,
        "parameters": found.parameter_count,
        "threads": 1,
        "tokens": found.work.tokens * found.work.steps,
    }


def describe_largest(found: Report) -> str:
    """The item that takes most, with its shape, and what it takes in one layer."""
    item = found.memory.largest()
    shape = "·".join(str(length) for length in item.shape)
    numbers = {"float32": "floats", "float64": "doubles"}.get(item.dtype, item.dtype)
    one = "a layer" if item.layered else "each"
    each = f"{size(item.each)} {one}, {size(item.bytes)} in all" if item.count > 1 else size(item.bytes)
    return f"{TITLES[item.category]} ({item.kind}: {shape} {numbers}, {each}){_whole_batch(found, numbers)}"


def _whole_batch(found: Report, numbers: str) -> str:
    """What the largest item would take if the whole batch were computed at once; empty if it is, or if the item does
    not grow with the rows."""
    item = found.memory.largest()
    rows, batch = found.plan.sizes.batch, found.configuration.train.batch
    if rows == batch or item.category not in ("activations", "attention") or item.shape[0] != rows:
        return ""
    shape = "·".join(str(length) for length in (batch, *item.shape[1:]))
    each, total = item.each * batch // rows, item.bytes * batch // rows
    one = f"{size(each)} {'a layer' if item.layered else 'each'}, " if item.count > 1 else ""
    return (
        f", as {rows} of the {batch} rows of a batch are computed at once. The whole batch at once would take "
        f"{shape} {numbers}, {one}{size(total)} in all"
    )
