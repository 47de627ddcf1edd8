"""A few random networks, fused against unfused; `python tests/fuzz.py` tries as many as there is time for."""

import pytest

import fuzz
import jaxfuse
from fuzz_programs import Program, Step, random_program

pytestmark = pytest.mark.usefixtures("some_kernel")
CONV = {"features": 8, "size": 3, "stride": 1, "padding": "SAME", "dilation": 1, "groups": "one", "bias": "right", "spec": "own"}
NORM = {"kind": "batch", "spelling": "plain", "running": False}
SMALL = Program((2, 5, 5, 4), False, 0, (Step("conv", 1, CONV), Step("residual", 2, {"choice": 2}, (
    Step("conv", 3, CONV), Step("activation", 4, {"function": "tanh"})))))
# Programs that were once fused wrongly, or not at all, by an error.
FOUND = {
    "the square of what reads nothing": Program((2, 8, 8, 16), False, 0, (
        Step("reshape", 370717, {"to": "tokens"}), Step("layers", 32364, {"choice": 1}, (Step("reshape", 791186, {"to": "flat"}),)))),
    "the gradient of a filter that reads every second pixel of three features": Program((2, 28, 28, 3), False, 0, (
        Step("conv", 1, CONV | {"features": 64, "size": 1, "stride": 2}),)),
    "the same in groups, over an image of odd size": Program((4, 5, 5, 16), False, 0, (
        Step("conv", 1, CONV | {"features": 16, "size": 1, "stride": 2, "groups": "two"}),)),
    "a norm and its activation that a sequence reads turned": Program((2, 7, 3), False, 0, (
        Step("norm", 888077, NORM | {"kind": "instance", "statistics": "two passes", "parameters": "beta"}),
        Step("activation", 752273, {"function": "swish"}), Step("recurrent", 391119, {"cell": "gru"}))),
    "a loop whose gradient gives what the loop itself needs": Program((4, 5, 5, 8), False, 0, (Step("layers", 421615, {"choice": 2}, (
        Step("norm", 459615, NORM | {"statistics": "var", "parameters": "none", "spelling": "gamma first", "running": True}),
        Step("norm", 654391, NORM | {"statistics": "var", "parameters": "gamma", "spelling": "folded"}))),)),
}


@pytest.mark.parametrize("seed", range(8))
def test_as_unfused(seed):
    assert fuzz.check(random_program(seed), fuzz.ways_of(seed)) is None


@pytest.mark.parametrize("name", FOUND)
def test_found_before(name):
    assert fuzz.check(FOUND[name], ["fuse(step)"]) is None


def test_a_difference_is_found_and_made_smaller(monkeypatch):
    """In a network with a tanh, when what is fused gives a thousandth more."""
    def wrong(function):
        fused = jaxfuse.fuse(function, policy="always")

        def call(*args):
            number, aux, *gradients = fused(*args)
            return number, aux, *[{k: v * 1.001 for k, v in g.items()} if isinstance(g, dict) else g for g in gradients]

        return call

    monkeypatch.setattr(fuzz, "fused", wrong)
    kind, message = fuzz.check(SMALL, ["fuse(step)"])
    assert kind == "fuse(step) differs" and "unfused" in message
    assert sum(1 for _ in fuzz.smaller(SMALL.steps)) == 5
    assert [step.name for step in fuzz.shrunk(SMALL, kind, ["fuse(step)"], limit=60).steps] == ["conv"]


def test_an_error_is_found(monkeypatch):
    monkeypatch.setattr(fuzz, "fused", lambda function: lambda *args: 1 / 0)
    assert fuzz.check(SMALL, ["fuse(step)"])[0] == "fuse(step) raises"
