"""Every clip, leaky and where spelling of relu, and hard swish by clip: one kind of activation with parameters, and what comes
close to one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfuse
import layers
from attributes import attributes
from jaxfuse.ops.activations import TABLE, Activation, named
from jaxfuse.ops.naming import of_function
from jaxfuse.runtime import ffi

SPELLINGS = {  # name in reports, whether the value tells the derivative, whether a bit does
    "where > 0": (lambda x: jnp.where(x > 0, x, 0), "relu", True, True),
    "where >= 0": (lambda x: jnp.where(x >= 0, x, 0), "relu", False, True),
    "where < 0": (lambda x: jnp.where(x < 0, 0, x), "relu", False, True),
    "maximum of a tenth": (lambda x: jnp.maximum(x, 0.1 * x), "leaky_relu", True, False),
    "where a fifth": (lambda x: jnp.where(x > 0, x, 0.2 * x), "leaky_relu", True, False),
    "clip": (lambda x: jnp.clip(x, -0.5, 4), "clip", False, False),
    "clip below 0": (lambda x: jnp.clip(x, -6, 0), "clip", False, False),
    "where twice": (lambda x: jnp.where(x > 2, 2, jnp.where(x < -2, -2, x)), "clip", False, True),
    "hard sigmoid by clip": (lambda x: jnp.clip(x / 6 + 0.5, 0, 1), "hard_sigmoid", False, False),
    "hard sigmoid by a fifth": (lambda x: jnp.clip(0.2 * x + 0.5, 0, 1), "hard_sigmoid", False, False),
    "hard sigmoid by relu6": (lambda x: jax.nn.relu6(x + 3) / 6, "hard_sigmoid", True, False),
    "hard swish by clip": (lambda x: x * jnp.clip(x / 6 + 0.5, 0, 1), "hard_swish", False, False),
    "hard swish, divided last": (lambda x: x * jnp.clip(x + 3, 0, 6) / 6, "hard_swish", False, False),
    "hard swish by relu6": (lambda x: x * (jax.nn.relu6(x + 3) / 6), "hard_swish", False, False),
    "hard swish with 1/5": (lambda x: x * jax.nn.relu6(x + 3) / 5, "hard_swish", False, False),
    "leaky below 6": (lambda x: jnp.minimum(jnp.maximum(x, 0.1 * x), 6), "piecewise_linear", False, False),
    "at least a quarter": (lambda x: jnp.maximum(x, 0.25), "piecewise_linear", False, False),
    "soft shrink": (lambda x: jnp.where(x > 0.5, x - 0.5, jnp.where(x < -0.5, x + 0.5, 0.0)), "piecewise_linear", False, True),
}
NEAR_MISSES = {
    "a jump": lambda x: jnp.where(x > 1, x, 0),
    "a relu and a product": lambda x: 2 * jax.nn.relu(x),
    "a relu of something else": lambda x: jax.nn.relu(x - 1),
    "straight": lambda x: 0.5 * x,
    "abs, whose zero has no sign": jnp.abs,
    "four pieces": lambda x: jnp.clip(x, -1, 1) + jnp.clip(x, 2, 3),
    "clip of a square": lambda x: jnp.clip(x * x, 0, 6),
    "another gate": lambda x: (x + 1) * jnp.clip(x / 6 + 0.5, 0, 1),
    "a power at NaN": lambda x: jnp.where(x > 0, x, 0 * x),  # NaN at -infinity
    "softplus that overflows": lambda x: jnp.log(1 + jnp.exp(3 * x)) / 3,
    "celu without a guard": lambda x: jnp.where(x > 0, x, 2 * jnp.expm1(x / 2)),  # its gradient is NaN where exp overflows
}
INEXACT = ["hard sigmoid by clip", "hard sigmoid by a fifth", "hard swish by clip"]  # the compiler decides whether x/6 + 0.5 is 0 at -3
POINTS = [np.nan, np.inf, -np.inf, 0.0, -0.0, 0.25, -0.5, 0.5, 1, 2, -2, 3, -3, 4, 6, -6, 2.5, 1e4, -1e4, 5.75, -1.25]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spelling(spelling):
    function, name, derivative_from_y, is_mask = SPELLINGS[spelling]
    found = of_function(function)
    assert (found.name, found.derivative_from_y, found.is_mask) == (name, derivative_from_y, is_mask)


@pytest.mark.parametrize("near_miss", NEAR_MISSES)
def test_near_miss(near_miss):
    assert of_function(NEAR_MISSES[near_miss]) is None


def test_every_name_is_found_again():
    for name, known in TABLE.items():
        if name != "none" and name not in ("hard_sigmoid", "hard_swish"):  # whose 1/6 is that of float32 then
            activation = named(name, 0.25) if known.has_alpha else named(name)
            assert of_function(activation.value) == activation
    assert of_function(jax.nn.hard_sigmoid) == named("hard_sigmoid") and of_function(jax.nn.hard_swish) == named("hard_swish")


def test_a_zero_is_not_minus_zero():
    """Activations are keys of what is compiled."""
    relu, other = (of_function(lambda x, zero=zero: jnp.where(x > 0, x, zero)) for zero in (0.0, -0.0))
    assert relu != other and relu == of_function(SPELLINGS["where > 0"][0]) and len({relu, other}) == 2


def value_and_gradients(function, x):
    """And the derivative of the derivative in reverse mode, which shows where 0·g was selected away."""
    value, tangent = jax.jvp(function, (x,), (jnp.ones_like(x),))
    return value, tangent, jax.vjp(function, x)[1](jnp.ones_like(x))[0]


def assert_same(got, want, what=""):
    """Within rounding; signs of zeros, NaN and infinities exactly."""
    got, want = np.asarray(got), np.asarray(want)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6, err_msg=what)
    zero = (got == 0) & (want == 0)
    np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(want[zero]), err_msg=what)


def counted(spelling, x):
    """Where derivatives are compared: at infinity it is the piece's slope."""
    return ~np.isinf(x) & ~(np.isin(np.abs(x), [2.5, 3]) & (spelling in INEXACT))


def test_values_and_derivatives_in_plain_jax():
    x = jnp.asarray(POINTS, jnp.float32)
    functions = {name: (function, of_function(function).value) for name, (function, *_) in SPELLINGS.items()}
    want, got = jax.jit(lambda x: tuple({n: value_and_gradients(f[i], x) for n, f in functions.items()} for i in (0, 1)))(x)
    for name in SPELLINGS:
        assert_same(got[name][0], want[name][0], name)
        for mine, programs in zip(got[name][1:], want[name][1:]):
            near = counted(name, x)
            np.testing.assert_allclose(mine[near], programs[near], rtol=1e-6, atol=1e-7, err_msg=name)


def run(target, *operands, **attrs):
    """A batch norm that changes nothing, not even -0."""
    x = operands[-1]
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype)] * (1 + (target == "bwd_apply"))
    vectors = [np.zeros(1, np.float32), np.ones(1, np.float32), -np.zeros(1, np.float32)]
    first = operands if target == "apply" else (*operands, vectors[0], vectors[1], vectors[0], vectors[0])
    return ffi.call(f"jaxfuse_batch_norm_{target}", results, *first, *vectors, has_residual=False, **attrs)


@pytest.mark.skipif(ffi.unavailable("jaxfuse_batch_norm_apply") is not None, reason="no kernel")
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_values_and_derivatives_by_the_kernel(spelling):
    function = SPELLINGS[spelling][0]
    x = np.tile(np.asarray(POINTS, np.float32), 2)[:, None]
    activation = of_function(function).attributes()
    (y,) = run("apply", x, save_mask=False, **activation)
    want, _, gradient = jax.jit(lambda x: value_and_gradients(function, x))(x)
    assert_same(y, want)
    *_, g = run("bwd_apply", np.ones_like(x), x, deriv="recompute", want_dresidual=True, **activation)
    near = counted(spelling, x)
    np.testing.assert_allclose(np.asarray(g)[near], np.asarray(gradient)[near], rtol=1e-6, atol=1e-7)


def test_the_kernel_refuses_other_parameters():
    x, activation = np.ones((4, 1), np.float32), of_function(SPELLINGS["clip"][0]).attributes()
    short = dict(activation, parameters=activation["parameters"][:3])
    for attrs, message in [(short | dict(save_mask=False), "has 3 numbers, expected 15"),
                           (attributes("leaky_relu", 0.5) | dict(save_mask=True), "is no mask")]:
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            run("apply", x, **attrs)[0].block_until_ready()


W = np.eye(8, dtype=np.float32)
INTEGERS = np.arange(-8, 8, 0.25, np.float32).reshape(8, 8)  # z is every multiple of a quarter: ties of all
BIAS = np.zeros(8, np.float32)


def dense(act, x, w, b):
    return act(x @ w + b)


def conv(act, x, w, b):
    return act(layers.conv(x.reshape(2, 2, 2, 8), w[None, None]) + b)


def batch_norm(act, x, w, b):
    return act((x - x.mean(0)) * jax.lax.rsqrt(x.var(0) + 1e-5) * w.sum(0) + b)


LABELS = {dense: "dense+bias", conv: "conv+bias", batch_norm: "bn"}


@pytest.mark.parametrize("layer", LABELS)
@pytest.mark.parametrize("spelling", ["where > 0", "maximum of a tenth", "where a fifth", "clip", "hard sigmoid by clip",
                                      "hard swish by clip", "hard swish, divided last"])
def test_layers(layer, spelling):
    """Forward, grad(fuse(f)) and fuse(train step), with ties in what the activation is applied to."""
    act, name, *_ = SPELLINGS[spelling]

    def loss(x, w, b):
        return (jnp.sin(layer(act, x, w, b)) * jnp.cos(jnp.arange(8.0))).sum()

    args, step = (INTEGERS, W, BIAS + 0.125 * (spelling in INEXACT)), jax.value_and_grad(loss, (0, 1, 2))
    labels = [site.pattern for site in jaxfuse.explain(loss, *args, policy="always").fused]
    assert labels == [f"{LABELS[layer]}+{name}"]
    want = jax.jit(step)(*args)
    for fused in (jax.value_and_grad(jaxfuse.fuse(loss, policy="always"), (0, 1, 2)), jaxfuse.fuse(step, policy="always")):
        for got, plain in zip(jax.tree.leaves(fused(*args)), jax.tree.leaves(want)):
            np.testing.assert_allclose(got, plain, rtol=2e-4, atol=2e-4)
    steps = jaxfuse.explain(step, *args, policy="always")
    assert any(site.direction == "backward" and (layer is not batch_norm or name in site.pattern) for site in steps.fused)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("near_miss", ["a jump", "softplus that overflows", "celu without a guard"])
def test_a_near_miss_behind_a_layer_stays(near_miss):
    report = jaxfuse.explain(lambda *args: dense(NEAR_MISSES[near_miss], *args), INTEGERS, W, BIAS, policy="always")
    assert [site.pattern for site in report.fused] == ["dense+bias"]
    if near_miss == "celu without a guard":
        assert "where exp overflows its derivative is nan at 100000" in report.unfused_steps[0].reason


def elu_by_where(x):
    return jnp.where(x > 0, x, jnp.expm1(x))


@pytest.mark.parametrize("layer", LABELS)
@pytest.mark.parametrize("far", [80.0, 100.0])
def test_an_elu_without_a_guard_is_what_the_user_wrote(layer, far):
    """Where exp(x) overflows its gradient is NaN in reverse mode and 1 in forward mode, fused inside and outside of `grad`."""
    x = jnp.asarray(np.where(np.arange(INTEGERS.size).reshape(INTEGERS.shape) == 3, far, INTEGERS), jnp.float32)

    def function(x):
        return layer(elu_by_where, x, W, BIAS)

    def gradient(x):
        return jax.grad(lambda x: jnp.sum(jnp.sin(function(x))))(x)

    fused, always = jaxfuse.fuse(function, policy="always"), dict(policy="always")
    assert any("elu_expm1" in site.pattern for site in jaxfuse.explain(function, x, **always).fused)
    np.testing.assert_allclose(fused(x), function(x), rtol=1e-5, atol=1e-5)
    want = gradient(x)
    outside = jax.grad(lambda x: jnp.sum(jnp.sin(fused(x))))(x)
    for got in (jaxfuse.fuse(gradient, **always)(x), outside):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert np.isnan(want).any() == (layer is not batch_norm and far > 90)
    tangents = [jax.jvp(f, (x,), (jnp.ones_like(x),))[1] for f in (fused, function)]
    assert np.isfinite(tangents[1]).all()
    np.testing.assert_allclose(*tangents, rtol=1e-4, atol=1e-4)


@jax.custom_jvp
def elu_with_a_rule(x):
    return elu_by_where(x)


elu_with_a_rule.defjvps(lambda t, y, x: t * ((x > 0) + (x <= 0) * jnp.exp(x)))
OTHER_ELUS = {
    "halves": (lambda x: jnp.where(x > 0, x, jnp.exp(x / 2) ** 2 - 1), "float32"),  # overflows later
    "a rule": (elu_with_a_rule, "float32"),
    "max and min": (lambda x: jnp.maximum(x, 0) + jnp.minimum(jnp.expm1(x), 0), "float32"),  # NaN in forward mode as well
    "float16": (elu_by_where, "float16"),  # overflows at 11
}


@pytest.mark.parametrize("name", OTHER_ELUS)
def test_an_elu_that_overflows_elsewhere_stays(name):
    act, dtype = OTHER_ELUS[name]
    function = jax.jit(lambda x: dense(act, x, W.astype(dtype), BIAS.astype(dtype)))
    fused = jaxfuse.fuse(function, policy="always")
    x = jnp.asarray(np.broadcast_to([5, 20, 80, 100, 150, 200, -5, -200], (8, 8)), dtype)
    for z, one in zip(x.T[:, :, None] * np.eye(8, dtype=dtype), np.eye(8, dtype=dtype)):
        got, want = (jax.jit(jax.grad(lambda z: jnp.sum(f(z) * one)))(z) for f in (fused, function))
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3)
        got, want = (jax.jvp(f, (z,), (jnp.ones_like(z),))[1] for f in (fused, function))
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3)


def test_an_activation_given_as_a_function():
    for given, name in [(jax.nn.relu, "relu"), (lambda x: jnp.maximum(x, 0.1 * x), "leaky_relu"), (jnp.tanh, "tanh")]:
        y = jaxfuse.ops.dense(INTEGERS, W, BIAS, activation=given)
        np.testing.assert_allclose(y, given(jnp.asarray(INTEGERS)), rtol=1e-5, atol=1e-6)
        assert of_function(given).name == name
    for wrong in (jnp.sin, jnp.maximum, jax.nn.softmax):
        with pytest.raises(jaxfuse.ops.OpError, match="activation is <.*expected a function that is an activation of the table"):
            jaxfuse.ops.dense(INTEGERS, W, BIAS, activation=wrong)


def test_activations_are_hashable_values():
    assert Activation("elu", 1.0) == named("elu", 1.0) and hash(named("relu6")) == hash(of_function(jax.nn.relu6))
