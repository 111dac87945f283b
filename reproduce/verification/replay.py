"""Replaying one segment of a record and comparing every bit of it that the record has."""

import time
from collections.abc import Callable

from artifacts import Store, load_bundle
from engine.errors import NonFinite
from engine.trainer import STATE_ARRAYS, StepResult
from reproduce.comparing import bundle_hash, differing_tensors, state_digest
from reproduce.outputs import shortest
from reproduce.verification.distances import Tolerance, away, loss_away, relative_distance, shown
from reproduce.verification.integrity import Claims
from reproduce.verification.segments import Segment
from reproduce.verification.verdict import Findings
from reproduce.workbench import Workbench

OnStep = Callable[[int, float], None]
"""Told the step and the loss after every step."""


class Replay:
    """One segment. tolerance: None if every bit has to be the same."""

    def __init__(
        self,
        store: Store,
        claims: Claims,
        workbench: Workbench,
        segment: Segment,
        tolerance: Tolerance | None,
        on_step: OnStep,
    ) -> None:
        self.store = store
        self.claims = claims
        self.workbench = workbench
        self.trainer = workbench.trainer
        self.segment = segment
        self.tolerance = tolerance
        self.on_step = on_step
        self.findings = Findings()

    def run(self) -> Findings:
        """Steps until the segment's last; after a difference on to the next bundle, which tells the tensors."""
        clock = time.monotonic()
        try:
            if self._start():
                self._steps()
        except NonFinite as error:
            self._differs({"step": self.trainer.step + 1, "what": str(error)})
        self.findings.seconds = time.monotonic() - clock
        return self.findings

    def _start(self) -> bool:
        """Takes up the state before the segment; False if it is not the one that the record's digests name."""
        start, claims = self.segment.start, self.claims
        bundle = claims.bundles[start]
        if start == 0:
            self.trainer.initialise()
            if self.trainer.train.precision and self.tolerance is None:
                # A run from scratch takes today's best algorithms, this one those of its time.
                self.trainer.backend.pin(load_bundle(self.store, claims.record.final_bundle).tensors)
            self._check_bundle()
            return True
        elsewhere = self.tolerance is not None
        self.workbench.load(load_bundle(self.store, bundle), f"bundle {bundle}", elsewhere=elsewhere)
        state = self.trainer.state()
        found, expected = state_digest(self.trainer, state), claims.digests[start - 1]
        history = [bytes(row) for row in state["history/digest"]]
        if found != expected or history != claims.digests[:start]:
            self._differs(
                {
                    "what": "bundle, which has not the state that the step digests name",
                    "step": start,
                    "bundle": bundle,
                    "expected": expected.hex(),
                    "found": found.hex(),
                }
            )
            return False
        return True

    def _steps(self) -> None:
        trainer, segment, bundles = self.trainer, self.segment, self.claims.bundles
        if segment.start == 0 and segment.first == 1:
            self._check_evaluation()
        while True:
            step, differs = trainer.step, bool(self.findings.differences)
            if differs and (step in bundles or step >= self.claims.record.steps):
                return
            if not differs and step >= segment.last:
                return
            result = trainer.train_step()
            self.on_step(result.step, float(result.loss))
            self._check_digest(result)
            if not self.findings.differences and result.step >= segment.first:
                self._check_evaluation()
            if result.step in bundles:
                self._check_bundle()

    def _differs(self, difference: dict[str, object]) -> None:
        self.findings.exact = False
        self.findings.differences.append(difference)

    def _apart(self, what: str, distance: float, bound: float | None, **more: object) -> None:
        """One distance of a record with a tolerance; beyond the bound, or without one, it is a difference."""
        step = self.trainer.step
        entry = {"what": what, "step": step, "distance": shown(distance), "bound": bound, **more}
        self.findings.distances.append(entry)
        # Written so that a distance that is not a number is a difference.
        if bound is None or not distance <= bound:
            self._differs({**entry, "what": f"{what}, which is further away than the tolerance"})

    def _check_digest(self, result: StepResult) -> None:
        self.findings.compared["digests"] += 1
        expected = self.claims.digests[result.step - 1]
        if result.digest == expected:
            return
        self.findings.exact = False
        there = self.claims.losses[result.step - 1]
        if self.tolerance is not None:
            bound = self.tolerance.loss_bound(result.step - self.segment.start)
            distance = loss_away(result.loss, there)
            if bound is None or not distance <= bound or result.step in self.claims.bundles:
                self._apart("loss", distance, bound)
            return
        if not self.findings.differences:
            self._differs(
                {
                    "what": "step digest",
                    "step": result.step,
                    "expected": expected.hex(),
                    "found": result.digest.hex(),
                    "expected_loss": str(there),
                    "found_loss": shortest(result.loss),
                }
            )

    def _check_bundle(self) -> None:
        self.findings.compared["bundles"] += 1
        step = self.trainer.step
        expected = self.claims.bundles[step]
        state = self.trainer.state()
        found = bundle_hash(state, self.claims.identity.state(step))
        if found == expected:
            return
        saved = load_bundle(self.store, expected).tensors
        if self.tolerance is not None:
            self.findings.exact = False
            for name in sorted(saved):
                if name.partition("/")[0] in STATE_ARRAYS:
                    distance = relative_distance(saved[name], state[name])
                    self._apart(f"tensor {name}", distance, self.tolerance.tensor_bound(name))
            return
        self._differs(
            {
                "what": "bundle",
                "step": step,
                "expected": expected,
                "found": found,
                "tensors": differing_tensors(saved, state),
            }
        )

    def _check_evaluation(self) -> None:
        step = self.trainer.step
        expected = self.claims.validation.get(step)
        if expected is None:
            return
        self.findings.compared["evaluations"] += 1
        found = self.workbench.evaluate()
        if found == expected:
            return
        if self.tolerance is not None:
            self.findings.exact = False
            self._apart("validation loss", away(found, expected), self.tolerance.evaluation_bound())
            return
        self._differs({"what": "validation loss", "step": step, "expected": str(expected), "found": str(found)})
