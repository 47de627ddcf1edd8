"""Convolution and batch norm with frozen statistics, whose scale and bias are trained: one site forward and one backward in a
whole train step, in each spelling. The gradient of the scale comes from the filter's: Σ g·conv(x, w) = <Σ x·g, w>."""

import equinox
import flax.linen as nn
import haiku
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

from compare import as_float64, as_near_to_the_truth, jit, same
from layers import BETA, MEAN, R, W, X, conv, randn
from recognition import explain, fuse, same_as_unfused

C, GAMMA, VAR = randn(2, 8, 8, 8, seed=10), 1 + 0.3 * randn(8, seed=3), 0.5 + jnp.abs(randn(8, seed=6))


def centered(y, gamma, beta):
    return (y - MEAN) * (lax.rsqrt(VAR + 1e-5) * gamma) + beta


# name -> what is done to conv(x, w) by gamma and beta with the residual r
SPELLINGS = {
    "bn": lambda y, gamma, beta, r: centered(y, gamma, beta),
    "bn+relu": lambda y, gamma, beta, r: jax.nn.relu(centered(y, gamma, beta)),
    "bn+add+relu": lambda y, gamma, beta, r: jax.nn.relu(centered(y, gamma, beta) + r),
    "bn+add+relu, scaled twice": lambda y, gamma, beta, r: jax.nn.relu(r + ((y - MEAN) / jnp.sqrt(VAR + 1e-3) * gamma + beta)),
    "bn+add+relu, folded": lambda y, gamma, beta, r: (
        lambda s: jax.nn.relu(y * s + (beta - MEAN * s) + r))(gamma * lax.rsqrt(VAR + 1e-5)),
    "bn+silu": lambda y, gamma, beta, r: jax.nn.silu(centered(y, gamma, beta)),
    "bn+relu6, a bias of the convolution": lambda y, gamma, beta, r: jax.nn.relu6(centered(y + beta, gamma, beta)),
    "bn+silu+add": lambda y, gamma, beta, r: jax.nn.silu(centered(y, gamma, beta)) + r,
}


def loss_of(body):
    return lambda x, w, gamma, beta, r: jnp.sum(jnp.sin(body(conv(x, w), gamma, beta, r)) * C)


def sites(step, *args):
    report = explain(step, *args)
    left = *report.skipped, *report.unfused_steps
    return sorted((site.direction, site.pattern) for site in report.fused), [(s.pattern, s.reason) for s in left]


def near(step, *args):
    """The fused step gives what the step gives; the scale's gradient is a sum over the filter's."""
    same_as_unfused(step, *args, times=5)


@pytest.mark.parametrize("name", SPELLINGS)
def test_train_step_is_one_site_forward_and_one_backward(name):
    label = f"conv+{name.split(',')[0]}"
    behind = label.replace("silu+add", "silu")  # there the residual's gradient is the cotangent itself
    step, args = jax.value_and_grad(loss_of(SPELLINGS[name]), (0, 1, 2, 3, *[4] * ("add" in name))), (X, W, GAMMA, BETA, R)
    assert sites(step, *args) == ([("backward", behind), ("forward", label)], [])
    near(step, *args)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_as_near_to_float64_as_the_unfused_step(dtype):
    args = X.astype(dtype), W.astype(dtype), GAMMA, BETA, R.astype(dtype)
    body = loss_of(lambda y, gamma, beta, r: jax.nn.relu(centered(y.astype(jnp.float32), gamma, beta).astype(dtype) + r))
    step = jax.grad(body, (0, 1, 2, 3, 4))
    assert [direction for direction, _ in sites(step, *args)[0]] == ["backward", "forward"]
    fused, plain = (jit(f)(*args) for f in (fuse(step), step))
    with jax.enable_x64(True):
        exact = jit(jax.grad(loss_of(SPELLINGS["bn+add+relu"]), (0, 1, 2, 3, 4)))(*as_float64(args))
    as_near_to_the_truth(fused, plain, exact, narrowest=dtype)


def test_gradient_of_the_fused_loss():
    loss = loss_of(SPELLINGS["bn+add+relu"])
    near(jax.grad(loss, (0, 1, 2, 3)), X, W, GAMMA, BETA, R)
    same(*(jit(jax.grad(f, (0, 1, 2, 3)))(X, W, GAMMA, BETA, R) for f in (fuse(loss), loss)), times=5)


def test_only_the_filter_is_trained():
    step = jax.grad(loss_of(SPELLINGS["bn+relu"]), 1)
    assert sites(step, X, W, GAMMA, BETA, R) == ([("backward", "conv+scale+relu"), ("forward", "conv+bn+relu")], [])
    near(step, X, W, GAMMA, BETA, R)


def test_a_scale_of_zero():
    near(jax.grad(loss_of(SPELLINGS["bn+relu"]), (0, 1, 2, 3)), X, W, 0 * GAMMA, BETA, R)


def test_groups_strides_and_channels_first():
    def loss(x, w, gamma, beta):
        y = lax.conv_general_dilated(x.transpose(0, 3, 1, 2), w[:, :, :2], (2, 2), "SAME", feature_group_count=2,
                                     dimension_numbers=("NCHW", "HWIO", "NCHW"))
        shape = (8, 1, 1)
        return jnp.sum(jnp.sin(jax.nn.relu(y * (gamma * lax.rsqrt(VAR)).reshape(shape) + beta.reshape(shape))))

    step = jax.grad(loss, (0, 1, 2, 3))
    fused, skipped = sites(step, X, W, GAMMA, BETA)
    assert [direction for direction, _ in fused] == ["backward", "forward"] and not skipped
    near(step, X, W, GAMMA, BETA)


NEAR_MISSES = {
    "a factor for each example": lambda y, gamma, beta, r: jax.nn.relu(y * r[:, :1, :1] + beta),
    "a factor for each row": lambda y, gamma, beta, r: jax.nn.relu(y * gamma[:, None] + beta),
    "the value is read elsewhere": lambda y, gamma, beta, r: jax.nn.relu(centered(y, gamma, beta)) + jnp.cos(y),
    "scaled after the residual": lambda y, gamma, beta, r: jax.nn.relu((y + r) * gamma + beta),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss(name):
    step, args = jax.grad(loss_of(NEAR_MISSES[name]), (0, 1, 2, 3, 4)), (X, W, GAMMA, BETA, R)
    fused, _ = sites(step, *args)
    assert not any("bn" in pattern for direction, pattern in fused if direction == "forward")
    near(step, *args)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.BatchNorm(use_running_average=True)(nn.Conv(8, (3, 3), use_bias=False)(x))
        return nn.relu(y + jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, 4))))


def linen_step():
    model = Linen()
    variables = model.init(jax.random.key(0), X)
    return jax.grad(lambda params: jnp.sum(jnp.sin(model.apply(variables | {"params": params}, X)))), variables["params"]


def nnx_step():
    rngs = nnx.Rngs(0)
    conv, norm = nnx.Conv(4, 8, (3, 3), use_bias=False, rngs=rngs), nnx.BatchNorm(8, use_running_average=True, rngs=rngs)
    graph, params, rest = nnx.split((conv, norm), nnx.Param, ...)

    def loss(params):
        conv, norm = nnx.merge(graph, params, rest)
        return jnp.sum(jnp.sin(nnx.relu(norm(conv(X)) + R)))

    return jax.grad(loss), params


def haiku_step():
    def forward(x, is_training):
        y = haiku.BatchNorm(True, True, 0.9)(haiku.Conv2D(8, 3, with_bias=False)(x), is_training)
        return jax.nn.relu(y + R)

    model = haiku.transform_with_state(forward)
    params, state = model.init(jax.random.key(0), X, True)
    _, state = model.apply(params, state, None, X, True)
    return jax.grad(lambda params: jnp.sum(jnp.sin(model.apply(params, state, None, X, False)[0]))), params


def equinox_step():
    conv = equinox.nn.Conv2d(4, 8, 3, padding=1, use_bias=False, key=jax.random.key(0))
    norm, state = equinox.nn.make_with_state(equinox.nn.BatchNorm)(8, "batch", mode="ema", inference=True)
    params, rest = equinox.partition((conv, norm), equinox.is_inexact_array)

    def loss(params):
        conv, norm = equinox.combine(params, rest)
        one = lambda x, r: jax.nn.relu(norm(conv(x), state)[0] + r)
        added = R.transpose(0, 3, 1, 2)
        y = jax.vmap(one, axis_name="batch")(X.transpose(0, 3, 1, 2), added)
        return jnp.sum(jnp.sin(y / 300))  # the norm has seen no batch: its variance is 0, and it multiplies by 1/√ε

    return jax.grad(loss), params


@pytest.mark.parametrize("made", [linen_step, nnx_step, haiku_step, equinox_step])
def test_frameworks(made):
    step, params = made()
    fused, skipped = sites(step, params)
    assert [direction for direction, _ in fused] == ["backward", "forward"] and not skipped, (fused, skipped)
    assert all("bn+add+relu" in pattern or "bn+relu" in pattern for _, pattern in fused)
    near(step, params)
