"""fuse(train_step): autodiff has already run when the program is matched. The sites are those of grad(fuse(loss)), the
backward ones among them, and the numbers those of the unfused step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from compare import jit, same
from layers import BETA, GAMMA, ZR, SmallNet, Z, batch_norm, conv, randn
from recognition import correct, differentiated, explain, fuse, labelled, same_as_unfused, sites
from spellings.norm import layer_norm

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
DEEP = 50  # roundings in a gradient through all layers of the network


class Problem:
    """A small network, its state and its loss."""

    def __init__(self, dtype=jnp.float32, model=None):
        self.model, self.x = model or SmallNet(dtype), randn(4, 16, 16, 3, dtype=dtype)
        self.labels = jnp.arange(4) % 10
        variables = jit(lambda x: self.model.init(jax.random.key(0), x, False))(self.x)
        self.params = jax.tree.map(lambda v: v + 0.05 * randn(*v.shape, seed=3), variables["params"])
        self.batch_stats = variables["batch_stats"]

    def loss(self, params, batch_stats, x, labels):
        variables = {"params": params, "batch_stats": batch_stats}
        logits, updates = self.model.apply(variables, x, True, mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
        return losses.mean(), updates["batch_stats"]

    def step(self, params, batch_stats, x, labels):
        (loss, batch_stats), grads = jax.value_and_grad(self.loss, has_aux=True)(params, batch_stats, x, labels)
        return loss, batch_stats, grads

    @property
    def arguments(self):
        return self.params, self.batch_stats, self.x, self.labels


@functools.cache
def problem_of(dtype="f32"):
    return Problem(DTYPES[dtype])


@each_dtype
def test_inference(dtype):
    problem = problem_of(dtype)
    statistics = jax.tree.map(lambda v: v + 0.1 * jnp.abs(randn(*v.shape, seed=9)), problem.batch_stats)

    def apply(params, statistics, x):
        return problem.model.apply({"params": params, "batch_stats": statistics}, x, False)

    args = problem.params, statistics, problem.x
    report = explain(apply, *args)
    expected = {"conv+bias+relu": 1, "conv+bn+relu": 4, "conv+bn": 1, "conv+bn+add+relu": 2, "conv+bias+relu6": 1, "dense+bias": 1,
                "global_average_pool": 1}
    assert sites(report, "forward") == expected and not report.skipped
    lines = {site.source for site in report.fused}
    assert all("layers.py:" in line for line in lines) and len(lines) > 4
    same_as_unfused(apply, *args, times=5)


@each_dtype
def test_same_sites_and_numbers_as_through_the_loss(dtype):
    problem = problem_of(dtype)
    through_loss = explain(problem.loss, *problem.arguments)
    report = explain(problem.step, *problem.arguments)
    backward, forward = sites(report, "backward"), sites(report, "forward")
    assert forward == sites(through_loss, "forward") == {
        "conv": 7, "bn+relu": 4, "bn": 1, "bn+add+relu": 2, "conv+bias+relu": 1, "conv+bias+relu6": 1, "dense+bias": 1,
        "global_average_pool": 1}
    assert not through_loss.skipped
    assert backward.pop("dense_grad+bias_grad") == forward.pop("dense+bias") == 1
    assert forward.pop("global_average_pool") == 1  # its gradient is a broadcast
    assert backward == forward
    residual = [site for site in report.unfused_steps if site.pattern == "conv+residual gradient"]
    # the second block's skip connection; and in the first the gradients of two convolutions meet in one sum
    assert len(residual) == 3 and all("add_any" in site.reason and site.direction == "backward" for site in residual)
    step = fuse(problem.step)
    if dtype == "f32":  # bf16 gradients of so small a network are noise: see the comparison with float64
        same(step(*problem.arguments), jit(problem.step)(*problem.arguments), times=DEEP, floor=1e-3)
    by_loss = jax.value_and_grad(fuse(problem.loss), has_aux=True)
    (loss, batch_stats), grads = jit(by_loss)(*problem.arguments)
    same(loss, jit(problem.loss)(*problem.arguments)[0], narrowest=DTYPES[dtype], times=25)
    # f32: of other orders of sums; bf16: as near as the kinks of relus let it be
    same(step(*problem.arguments), (loss, batch_stats, grads), narrowest=DTYPES[dtype], times=5 if dtype == "f32" else 25, floor=1e-3)


@each_dtype
def test_as_close_to_float64_as_unfused(dtype):
    """The relative error against float64, root mean square over all arrays: at most a quarter above the unfused step's;
    in bf16, where it is as large as the sign flips of a few relus and 0.06 to 0.19 by the seed, at most twice."""
    problem = problem_of(dtype)
    with jax.enable_x64(True):
        exact = Problem(jnp.float64, SmallNet(jnp.float64))
        wide = jax.tree.map(lambda a: a.astype(jnp.float64) if a.dtype != jnp.int32 else a, problem.arguments)
        truth = jax.tree.leaves(jax.tree.map(np.asarray, jit(exact.step)(*wide)))

    def error(step):
        found = [np.asarray(a, np.float64) for a in jax.tree.leaves(step(*problem.arguments))]
        return np.sqrt(np.mean([np.mean((a - t) ** 2) / np.mean(t**2) for a, t in zip(found, truth)]))

    plain, fused = error(jax.jit(problem.step)), error(fuse(problem.step))
    assert 0 < fused <= (1.25 if dtype == "f32" else 2) * plain


def with_optax(problem):
    optimizer = optax.adamw(1e-3)

    def step(params, batch_stats, x, labels):
        loss, batch_stats, grads = problem.step(params, batch_stats, x, labels)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return loss, batch_stats, optax.apply_updates(params, updates)

    return step


def microbatched(problem):
    def step(params, batch_stats, x, labels):
        def one(carry, batch):
            total, stats = carry
            loss, stats, grads = problem.step(params, stats, *batch)
            return (jax.tree.map(jnp.add, total, grads), stats), loss

        parts = x.reshape(2, 2, *x.shape[1:]), labels.reshape(2, 2)
        zero = jax.tree.map(jnp.zeros_like, params)
        (grads, stats), losses = lax.scan(one, (zero, batch_stats), parts)
        return losses, stats, grads

    return step


def rematerialised(problem):
    def step(*arguments):
        (loss, batch_stats), grads = jax.value_and_grad(jax.checkpoint(problem.loss), has_aux=True)(*arguments)
        return loss, batch_stats, grads

    return step


def frozen(problem):
    """Only the last dense layer and the batch norms are trained."""
    def step(params, batch_stats, x, labels):
        trained = {k: v for k, v in params.items() if not k.startswith("Conv")}

        def loss(trained):
            return problem.loss(params | trained, batch_stats, x, labels)

        return jax.value_and_grad(loss, has_aux=True)(trained)

    return step


def image_gradient(problem):
    def step(params, batch_stats, x, labels):
        return jax.value_and_grad(problem.loss, argnums=(0, 2), has_aux=True)(params, batch_stats, x, labels)

    return step


def evaluated_too(problem):
    """A second forward pass, in inference, shares inputs with the first."""
    def step(params, batch_stats, x, labels):
        logits = problem.model.apply({"params": params, "batch_stats": batch_stats}, x, False)
        return problem.step(params, batch_stats, x, labels), logits.argmax(-1) == labels

    return step


def penalised(problem):
    """Batch statistics and activations enter the loss a second time, and the gradient of it."""
    def step(params, batch_stats, x, labels):
        def loss(params):
            value, stats = problem.loss(params, batch_stats, x, labels)
            return value + 1e-3 * sum(jnp.sum(jnp.square(v)) for v in jax.tree.leaves((params, stats))), stats

        return jax.value_and_grad(loss, has_aux=True)(params)

    return step


STEPS = {f.__name__: f for f in (with_optax, microbatched, rematerialised, frozen, image_gradient, evaluated_too, penalised)}


@pytest.mark.costly
@pytest.mark.parametrize("name", STEPS)
def test_steps(name):
    problem = problem_of()
    step = STEPS[name](problem)
    report = explain(step, *problem.arguments)
    forward, backward = sites(report, "forward"), sites(report, "backward")
    norms = sum(n for pattern, n in forward.items() if pattern.startswith("bn"))
    again = 2 if name == "rematerialised" else 1  # forward sites of the recomputation
    assert norms == 7 * again, report
    assert sum(n for pattern, n in backward.items() if pattern.startswith("bn")) == 7, report
    same_as_unfused(step, *problem.arguments, times=DEEP, floor=1e-3)


def test_tangents_that_are_the_values():
    """In forward mode along the parameters themselves a tangent is a sum with x in it, and not a cotangent of its own."""
    problem = problem_of()

    def along_itself(params, x):
        value, linear = jax.linearize(lambda params: problem.loss(params, problem.batch_stats, x, problem.labels)[0], params)
        return value, linear(params)

    same_as_unfused(along_itself, problem.params, problem.x, times=DEEP, floor=1e-3)


FILTER = randn(3, 3, 8, 8) / 6
RECOMPUTED = {  # what ends a `jax.checkpoint`, and what is fused of the step: of that end only what the gradient reads is computed again
    "relu": (lambda x, g, b: jax.nn.relu(batch_norm(x, g, b)), ["backward bn", "bn", "bn+relu"]),
    "relu, of tanh": (lambda x, g, b: jax.nn.relu(batch_norm(jnp.tanh(x), g, b)), ["backward bn", "bn", "bn+relu"]),
    "add, relu": (lambda x, g, b: jax.nn.relu(batch_norm(x, g, b) + ZR), ["backward bn+add", "bn+add", "bn+add+relu"]),
    "sigmoid": (lambda x, g, b: jax.nn.sigmoid(batch_norm(x, g, b)), ["backward bn+sigmoid", "bn+sigmoid", "bn+sigmoid"]),
    "the norm": (batch_norm, ["backward bn", "bn"]),
    "the norm, of silu": (lambda x, g, b: batch_norm(jax.nn.silu(x), g, b), ["backward bn", "bn"]),
    "a convolution": (lambda x, g, b: conv(jnp.tanh(x), FILTER * g) + b, ["backward conv", "backward conv", "conv+bias"]),
    "a layer norm": (layer_norm, ["backward layer_norm", "layer_norm", "layer_norm"]),
    "a layer norm, silu": (lambda x, g, b: jax.nn.silu(layer_norm(x, g, b)), ["backward layer_norm", "layer_norm", "layer_norm+silu"]),
}


@pytest.mark.parametrize("name", RECOMPUTED)
def test_the_end_of_what_is_computed_again(name):
    layer, expected = RECOMPUTED[name]
    step = differentiated(jax.checkpoint(layer), Z, GAMMA, BETA)
    report = explain(step, Z, GAMMA, BETA)
    assert (sorted(map(labelled, report.fused)), report.skipped) == (expected, ())
    correct(step, Z, GAMMA, BETA)
