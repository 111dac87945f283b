"""What a verdict prints for people: no JSON, no bare hash, and the tensors before the history."""

from reproduce.selftest.lab import Deviation, bits, quietly
from reproduce.verification import Request, verify
from reproduce.verification.lines import difference_lines, distance_lines


def said_of(lab, record):
    return quietly(lambda: verify(lab.project, lab.configuration.run, record, Request()))


def test_a_difference_is_told_in_words(spoilt):
    def around(trainer, at):
        if at == 7:
            bits(trainer.state()["weights/embed.token"])[5] ^= 1 << 20
            trainer.backend.weights_changed()
        trainer.train_step()

    code, said = said_of(spoilt, spoilt.forge_run(Deviation(around_step=around)))
    assert code == 1
    lines = [line for line in said.splitlines() if line.startswith("difference: ")]
    assert lines[0].startswith("difference: step 7: the state after it is another one: loss 3.")
    assert lines[1].startswith("difference: step 10: the bundle would be ")
    assert lines[2].startswith("difference: step 10: m/")
    assert "tensors more (--json lists all)" in lines[-1]
    assert "{" not in said
    assert said.splitlines()[-1].startswith("what to do: verify on another machine")


def test_what_is_whole_gets_no_advice(lab):
    code, said = said_of(lab, lab.record)
    assert code == 0
    assert "what to do" not in said
    assert "difference" not in said


def test_every_kind_of_difference_has_its_line():
    hashes = {"expected": "a" * 64, "found": "b" * 64}
    assert difference_lines([{"what": "validation loss", "step": 4, "expected": "2.5", "found": "2.75"}]) == [
        "difference: step 4: validation loss: 2.75 here, 2.5 in the record"
    ]
    assert difference_lines([{"what": "the gradient of x is not finite", "step": 3}]) == [
        "difference: step 3: the gradient of x is not finite"
    ]
    (line,) = difference_lines([{"what": "bundle, which has not the state", "step": 5, "bundle": "c" * 64, **hashes}])
    assert line.startswith("difference: step 5: bundle, which has not the state")
    bundle = {"what": "bundle", "step": 5, "tensors": [{"tensor": "m/x", "difference": "shape"}], **hashes}
    assert difference_lines([bundle])[1] == "difference: step 5: m/x: shape is not the same"


def test_the_worst_distance_of_each_kind_is_shown():
    def entry(what, distance, bound):
        return {"what": what, "step": 8, "distance": distance, "bound": bound}

    lines = distance_lines(
        [
            entry("loss", 1e-6, 1e-5),
            entry("tensor m/x", 0.5, 4.0),
            entry("tensor v/x", 1e-4, 2e-4),
            entry("validation loss", "not finite", 1e-4),
            entry("tensor m/y", 0.0, 0.0),
        ]
    )
    assert lines == [
        "distance: loss at step 8: 1e-06, allowed 1e-05",
        "distance: tensor v/x at step 8: 0.0001, allowed 0.0002",
        "distance: validation loss at step 8: not finite, allowed 0.0001",
    ]
