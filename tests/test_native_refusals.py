"""Calls that no op of ours makes, of targets by themselves: an error in words, or the right result, where a handler was found to divide by
zero, to recurse for ever or to read elsewhere."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attributes import attributes
from conv_oracle import Case, backward, forward, random
from jaxfuse.ops import matrices
from jaxfuse.ops.conv import int8, packed
from jaxfuse.ops.conv.config import ConvConfig
from jaxfuse.ops.conv.conv import forward_attrs
from jaxfuse.runtime import ffi

pytestmark = pytest.mark.skipif(ffi.native() is None, reason="the native module is not built")
DENSE = dict(by_value=True, want_dx=False, want_dw=False, want_db=False, want_dresidual=False) | attributes("none")
NHWC = jax.lax.conv_dimension_numbers((1, 1, 1, 1), (1, 1, 1, 1), ("NHWC", "HWIO", "NHWC"))


def refused(words, target, types, *operands, **attrs):
    with pytest.raises(jax.errors.JaxRuntimeError, match=words):
        jax.block_until_ready(ffi.call(target, types, *operands, **attrs))


def test_a_gradient_whose_rows_and_columns_are_apart():
    attrs = matrices.matrices((2, 2), (2, 1), (((1,), (0,)), ((), ()))).attributes()
    attrs["x_strides"] = np.array([0, 2])
    x, w, dy = jnp.ones((2, 2)), jnp.ones((2, 1)), jnp.ones((2, 1))
    refused("expected rows or columns side by side", "jaxfuse_dense_bwd", [x], w, dy, **attrs, **DENSE | dict(want_dx=True))


def test_a_cotangent_of_bytes():
    attrs = matrices.matrices((2, 2), (2, 3), (((1,), (0,)), ((), ()))).attributes()
    refused("dy has dtype", "jaxfuse_dense_bwd", [jnp.ones(3)], jnp.ones((2, 3), jnp.int8), **attrs, **DENSE | dict(want_db=True))


def test_extents_whose_product_overflows():
    x, vector = jnp.zeros((3, 4)), jnp.zeros((1, 4))
    refused("too large", "jaxfuse_norm_fwd", [x], x, vector, vector, inner=(1 << 32, 1 << 32, 1), has_residual=False, wants_sum=False,
            saving=False, centered=True, epsilon=1e-6, epsilon_outside=False, **attributes("none"))


@pytest.mark.parametrize("name", ["window_strides", "rhs_dilation", "padding_low"])
def test_a_geometry_beyond_every_memory(name):
    spec = (0, 2, 1), (2, 1, 0), (0, 2, 1)
    attrs = forward_attrs(ConvConfig((1,), ((2, 2),), (1,), 3, *spec, (1,)))
    attrs[name] = np.array([1 << 62])
    refused("expected entries from", "jaxfuse_conv_fwd", [jnp.ones((1, 16, 3))], jnp.ones((1, 16, 3)), jnp.ones((5, 1, 3)), **attrs)


@pytest.mark.parametrize("in_int8", [False, True])
def test_packed_filters_over_an_image_without_columns(in_int8):
    """Its borders are padding alone, so the sums are zeros."""
    x, w = jnp.ones((2, 8, 0, 4)), jnp.ones((3, 3, 4, 6))
    config = ConvConfig((1, 1), ((2, 2), (2, 2)), (1, 1), 1, *NHWC, (1, 1))
    y = jax.ShapeDtypeStruct((2, 10, 2, 6), jnp.float32)
    if in_int8:
        made = int8.config_of(config, w.shape, int8.Range.of(-1, 1), narrow=True)
        run, filters = functools.partial(int8.OP, made), int8.pack(made, w)
        (found,) = run(x, *filters)
    else:
        made = packed.config_of(config, x, w)
        (filters,) = packed.pack(made, w)[:1]
        attrs = forward_attrs(config) | dict(filter_shape=made.shape, winograd=False)
        (found,) = ffi.call("jaxfuse_conv_packed", [y], x, filters, **attrs)
    np.testing.assert_array_equal(found, np.zeros(y.shape))


EXPANDED = {  # words; what is another in the call
    "x has 5 features": dict(lhs_spec=np.array([0, 1, 2, 3])),
    "expected 4 dimensions": dict(x=jnp.ones((1, 5, 3)), y=(1, 5, 8)),
    "packed has shape": dict(packed=jnp.zeros(64, jnp.uint8)),
    "packed has dtype": dict(packed=jnp.zeros(192)),
    "not depthwise": dict(feature_group_count=np.int64(4), w=jnp.ones((3, 3, 2, 8))),
    "not divisible by feature_group_count": dict(w=jnp.ones((3, 3, 1, 4))),
    "y has shape": dict(y=(1, 5, 4, 8)),
    "w has dtype": dict(w=jnp.ones((3, 3, 1, 8), jnp.int32)),
    "bias has shape": dict(bias=jnp.ones(7)),
    "operands, expected": dict(has_bias=False),
    "expansion_activation is": dict(expansion_activation="nothing"),
    "expansion_parameters has": dict(expansion_parameters=np.ones(2, np.float32)),
    "is transposed": dict(lhs_dilation=np.array([2, 2]), y=(1, 9, 9, 8)),
}


@pytest.mark.parametrize("words, other", EXPANDED.items(), ids=EXPANDED)
def test_expansions_that_do_not_fit(words, other):
    config = ConvConfig((1, 1), ((1, 1), (1, 1)), (1, 1), 8, *NHWC, (1, 1), has_bias=True)
    attrs = config.geometry_attrs() | dict(has_bias=True, expansion_has_bias=False)
    attrs |= {f"expansion_{name}": value for name, value in attributes("none").items()}
    given = dict(x=jnp.ones((1, 5, 5, 3)), packed=jnp.zeros(192, jnp.uint8), w=jnp.ones((3, 3, 1, 8)), bias=jnp.ones(8), y=(1, 5, 5, 8))
    x, filters, w, bias, y = (other.get(name, value) for name, value in given.items())
    attrs = {name: other.get(name, value) for name, value in attrs.items()}
    refused(words, "jaxfuse_conv_expanded", [jax.ShapeDtypeStruct(y, jnp.float32)], x, filters, w, bias, **attrs)


def test_batch_norm_without_channels():
    x, none = jnp.ones((4, 5, 0)), jnp.ones(0)
    (y,) = ffi.call("jaxfuse_batch_norm_apply", [x], x, none, none, none, has_residual=False, save_mask=False, **attributes("relu"))
    assert y.shape == x.shape


@pytest.mark.parametrize("part", ["forward", "gradient of the filter"])
def test_winograd_of_few_features_repeats_bit_for_bit(part):
    """Of a narrow panel half of the sums are never written: they decide nothing."""
    case = Case((1, 14, 14, 72), (3, 3, 72, 40), padding=(1, 1))
    x, w, dy = random(case.x), random(case.w, seed=1), random(case.y, seed=2)
    run = jax.jit(lambda x: forward(case, x, w) if part == "forward" else backward(case, x, w, dy, None, "none", want=("dw",))["dw"])
    first = run(x)
    for value in (np.nan, np.inf, 1.0):  # whatever scratch memory held before
        jax.block_until_ready(run(jnp.full_like(x, value)))
        np.testing.assert_array_equal(run(x), first)
