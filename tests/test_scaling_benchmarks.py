"""What the benchmarks of several processes count and measure, on sizes that take seconds. Nothing here is about speed."""

import json

import jax
import numpy as np
import pytest

from benchmarks import scaling
from processes import printed_by

# The gradient of a dense layer's weight and the loss are summed over the devices; forward a layer norm sends nothing, and its gradient
# sends those of scale and bias.
COUNTED = """
import json, os
from functools import partial
import jax, jax.numpy as jnp
import jaxfuse
from benchmarks import communication

def step(w, x):
    loss, gradient = jax.value_and_grad(lambda w: jnp.tanh(x @ w).mean())(w)
    return w - gradient, loss

w, x = jax.ShapeDtypeStruct((6, 5), jnp.float32), jax.ShapeDtypeStruct((16, 6), jnp.float32)
layers = [communication.layer("layer_norm_c768", fuse) for fuse in (partial(jaxfuse.fuse, policy="always"), lambda function: function)]
print(json.dumps([communication.compiled(step, [w, x], [None, 0]).bytes,
                  *((one.parameters, one.forward.bytes, one.both.bytes) for one in layers)]))
"""


def test_what_is_sent_is_the_gradients():
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    dense, *norms = json.loads(printed_by("-c", COUNTED, XLA_FLAGS=flags))
    assert dense == 4 * (6 * 5 + 1) and norms == [[4 * 2 * 768, 0, 4 * 2 * 768]] * 2


def test_a_step_of_one_process_is_measured_and_sends_nothing(monkeypatch):
    monkeypatch.setattr(scaling, "SIZE", 8)
    found = scaling._measured(1, 0, 4, 2, lambda function: function)
    assert found["ms"] > 0 and found["count"] == found["bytes"] == 0


def test_a_median_leaves_out_the_steps_that_warm_up(monkeypatch):
    clock = iter([0, 9, 10, 19, *(t for begin in (20, 30, 40) for t in (begin, begin + begin / 1e4))])
    monkeypatch.setattr(scaling.time, "perf_counter", lambda: next(clock))
    assert scaling._median(lambda: (), 3) == pytest.approx(3)


@pytest.mark.costly
def test_two_processes_sum_their_gradients():
    """Beside them only what batch norm and the loss sum, the same for any batch."""
    found = scaling._job(2, 1, fused=1)
    variables = jax.eval_shape(scaling.Network().init, jax.random.key(0), jax.ShapeDtypeStruct((1, 32, 32, 3), np.float32))
    gradients = 4 * sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))
    for way in ("strong", "weak"):
        assert gradients < found[way]["bytes"] < 1.01 * gradients and found[way]["ms"] > 0 and found[way]["alone"] > 0, found
