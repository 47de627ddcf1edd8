"""Ops called with what does not fit: an OpError at trace time that says what came, what was expected and what to do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfuse import ops

CONV = dict(x=(2, 8, 8, 6), w=(3, 3, 6, 4), bias=(4,), scale=(4,), residual=(2, 8, 8, 4))
ATTENTION = dict(q=(2, 6, 4, 8), k=(2, 5, 2, 8), v=(2, 5, 2, 6), bias=(2, 4, 6, 5))
BATCH_NORM = dict(x=(2, 4, 4, 6), gamma=(6,), beta=(6,), residual=(2, 4, 4, 6))


def of(shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


# (op, what is changed in a call that fits, parts of the message)
WRONG = [
    ("conv", dict(x=of((6, 4))), ["x", "rank 2", "rank 3, 4 or 5"]),
    ("conv", dict(x=of((1,) * 6)), ["x", "rank 6", "rank 3, 4 or 5"]),
    ("conv", dict(x=of((2, 8, 8, 6), "int32")), ["x", "int32", "a float dtype", "cast"]),
    ("conv", dict(x=of((2, 8, 8, 5))), ["w", "(3, 3, 6, 4)", "5", "feature_group_count"]),
    ("conv", dict(w=of((3, 6, 4))), ["w", "rank 3", "rank 4"]),
    ("conv", dict(w=of((3, 3, 6, 4), "bfloat16")), ["w", "bfloat16", "float32", "cast"]),
    ("conv", dict(feature_group_count=4), ["x", "6 channels", "a multiple of feature_group_count 4"]),
    ("conv", dict(feature_group_count=3), ["w", "(3, 3, 6, 4)", "feature_group_count"]),
    ("conv", dict(batch_group_count=3), ["x", "a batch of 2", "a multiple of batch_group_count 3"]),
    ("conv", dict(batch_group_count=2, feature_group_count=2), ["batch_group_count", "2 with feature_group_count 2", "one of them"]),
    ("conv", dict(feature_group_count=0), ["feature_group_count", "0", "positive"]),
    ("conv", dict(bias=of((6,))), ["bias", "(6,)", "(4,)", "output channel"]),
    ("conv", dict(bias=of((4,), "int32")), ["bias", "int32", "a float dtype"]),
    ("conv", dict(bias=of((1, 1, 1, 4))), ["bias", "(1, 1, 1, 4)", "(4,)", "reshape"]),
    ("conv", dict(bias=[1.0, 2.0, 3.0, 4.0]), ["bias", "list", "array"]),
    ("conv", dict(scale=of((3,))), ["scale", "(3,)", "(4,)"]),
    ("conv", dict(residual=of((2, 8, 8, 6))), ["residual", "[2, 8, 8, 6]", "[2, 8, 8, 4]"]),
    ("conv", dict(residual=of((2, 8, 8, 4), "bfloat16")), ["residual", "bfloat16", "float32"]),
    ("conv", dict(residual=of((4,))), ["residual", "[4]", "[2, 8, 8, 4]", "broadcast"]),
    ("conv", dict(activation="rellu"), ["activation", "'rellu'", "'relu'"]),
    ("conv", dict(activation="leaky"), ["activation", "'leaky_relu'"]),
    ("conv", dict(activation="Relu"), ["activation", "'Relu'", "did you mean 'relu'?"]),
    ("conv", dict(activation="swish"), ["activation", "'swish'", "did you mean 'silu'?"]),
    ("conv", dict(alpha="0.1"), ["alpha", "'0.1'", "number"]),
    ("conv", dict(window_strides=(2,)), ["window_strides", "(2,)", "2 positive integers"]),
    ("conv", dict(window_strides=(0, 1)), ["window_strides", "(0, 1)", "2 positive integers"]),
    ("conv", dict(window_strides=2), ["window_strides", "2", "2 positive integers"]),
    ("conv", dict(rhs_dilation=(1, 1, 1)), ["rhs_dilation", "(1, 1, 1)", "2 positive integers"]),
    ("conv", dict(padding="SAMME"), ["padding", "'SAMME'", "'SAME'"]),
    ("conv", dict(padding="same"), ["padding", "'same'", "did you mean 'SAME'?"]),
    ("conv", dict(padding=((1, 1),)), ["padding", "2 pairs"]),
    ("conv", dict(padding=(1, 1)), ["padding", "(1, 1)", "2 pairs"]),
    ("conv", dict(padding=((1, 1, 1), (1, 1, 1))), ["padding", "2 pairs"]),
    ("conv", dict(dimension_numbers=("NHWC", "HWIO")), ["dimension_numbers", "three"]),
    ("conv", dict(dimension_numbers=("NHWC", "HWI", "NHWC")), ["dimension_numbers", "HWI"]),
    ("batch_norm", dict(x=of((6,))), ["x", "rank 1", "rank 2 or more"]),
    ("batch_norm", dict(x=of((2, 4, 4, 6), "int8")), ["x", "int8", "a float dtype"]),
    ("batch_norm", dict(x=[[1.0], [2.0]]), ["x", "list", "array"]),
    ("batch_norm", dict(axis=4), ["axis", "4", "rank is 4"]),
    ("batch_norm", dict(axis=1), ["gamma", "(6,)", "(4,)", "axis"]),
    ("batch_norm", dict(axis=(0, 1)), ["axis", "(0, 1)"]),
    ("batch_norm", dict(gamma=of((5,))), ["gamma", "(5,)", "(6,)"]),
    ("batch_norm", dict(gamma=of((6,), "int32")), ["gamma", "int32", "a float dtype"]),
    ("batch_norm", dict(gamma=None), ["gamma", "None"]),
    ("batch_norm", dict(beta=of((2, 6))), ["beta", "(2, 6)", "(6,)"]),
    ("batch_norm", dict(mean=of((6,))), ["mean and var", "both or neither"]),
    ("batch_norm", dict(mean=of((6,)), var=of((4,))), ["var", "(4,)", "(6,)"]),
    ("batch_norm", dict(residual=of((2, 4, 4, 1))), ["residual", "[2, 4, 4, 1]", "[2, 4, 4, 6]", "broadcast"]),
    ("batch_norm", dict(residual=of((2, 4, 4, 6), "bfloat16")), ["residual", "bfloat16", "float32"]),
    ("batch_norm", dict(activation="relu7"), ["activation", "'relu7'", "'relu6'"]),
    ("batch_norm", dict(activation="celu"), ["alpha is 0", "celu divides", "jax.nn.celu"]),
    ("batch_norm", dict(epsilon=-1e-3), ["epsilon", "-0.001", "0 or more"]),
    ("batch_norm", dict(epsilon="small"), ["epsilon", "'small'", "number"]),
    ("batch_norm", dict(epsilon=None), ["epsilon", "None", "number"]),
    ("attention", dict(q=of((6, 4, 8))), ["q", "rank 3", "rank 4: (batch, rows, heads, features)"]),
    ("attention", dict(k=of((2, 5, 2, 8), "bfloat16")), ["k", "bfloat16", "float32, as q is"]),
    ("attention", dict(k=of((2, 5, 3, 8)), v=of((2, 5, 3, 6))), ["k", "of 3 heads", "a divisor of q's 4"]),
    ("attention", dict(k=of((2, 5, 2, 7))), ["k", "(2, 5, 2, 7)", "(2, 5, 2, 8), to fit q and k"]),
    ("attention", dict(v=of((2, 4, 2, 6))), ["v", "(2, 4, 2, 6)", "(2, 5, 2, 6), to fit q and k"]),
    ("attention", dict(v=of((2, 5, 2, 6), "int8")), ["v", "int8", "a float dtype"]),
    ("attention", dict(bias=of((2, 2, 6, 5))), ["bias", "(2, 2, 6, 5)", "one that broadcasts to (2, 4, 6, 5)"]),
    ("attention", dict(bias=of((5,), "int32")), ["bias", "int32", "a float dtype"]),
    ("attention", dict(mask=of((6, 5))), ["mask", "float32", "a bool array"]),
    ("attention", dict(mask=of((1, 2, 4, 6, 5), "bool")), ["mask", "(1, 2, 4, 6, 5)", "one that broadcasts to (2, 4, 6, 5)"]),
    ("attention", dict(scale="small"), ["scale", "'small'", "number"]),
]


@pytest.mark.parametrize("op, changes, parts", WRONG, ids=lambda v: v if isinstance(v, str) else "-".join(v))
def test_says_what_came_what_was_expected_and_what_to_do(op, changes, parts):
    call = {name: of(shape) for name, shape in dict(attention=ATTENTION, conv=CONV, batch_norm=BATCH_NORM)[op].items()} | changes
    arrays = {name: value for name, value in call.items() if isinstance(value, jax.ShapeDtypeStruct)}
    rest = {name: value for name, value in call.items() if name not in arrays}
    with pytest.raises(ops.OpError) as caught:
        jax.eval_shape(functools.partial(getattr(ops, op), **rest), **arrays)
    message = str(caught.value)
    assert op in message.split(":")[0] and all(part in message for part in parts), message
    assert "\n" not in message and message.count(";") >= 1, "what came, what was expected; what to do"


def test_an_op_error_is_a_value_error():
    assert issubclass(ops.OpError, ValueError)


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray])
def test_numpy_arrays_fit(convert):
    x, w = np.ones((1, 4, 4, 3), np.float32), np.ones((3, 3, 3, 2), np.float32)
    y = ops.conv(convert(x), convert(w), convert(np.ones(2, np.float32)))
    assert float(y[0, 1, 1, 0]) == 28
    y, mean, var = ops.batch_norm(convert(x), convert(np.ones(3, np.float32)), convert(np.zeros(3, np.float32)))
    assert (mean.shape, float(var.sum()), float(abs(y).sum())) == ((3,), 0, 0)


def test_a_window_beyond_the_image_gives_an_empty_output():
    assert ops.conv(jnp.ones((1, 2, 2, 3)), jnp.ones((3, 3, 3, 2)), padding="VALID").shape == (1, 0, 0, 2)


def test_a_filter_in_pytorchs_order_is_told_the_shape_expected_and_the_transpose():
    with pytest.raises(ops.OpError, match=r"w is of shape \(16, 8, 3, 3\), expected .*8 input channels.*OIHW.*transpose\(2, 3, 1, 0\)"):
        ops.conv(jnp.ones((1, 9, 9, 8)), jnp.ones((16, 8, 3, 3)))
    with pytest.raises(ops.OpError, match=r"w is of shape \(3, 3, 4, 16\), expected \(3, 3, 8, 16\), for 8 input channels in 1 groups"):
        ops.conv(jnp.ones((1, 9, 9, 8)), jnp.ones((3, 3, 4, 16)))


@pytest.mark.parametrize("op, name, words", [
    ("conv", "stride", "; did you mean window_strides?"), ("max_pool", "stride", "; did you mean strides?"),
    ("layer_norm", "eps", "; did you mean epsilon?"), ("rms_norm", "colour", "; it has x, gamma, residual, ")])
def test_an_argument_of_another_name(op, name, words):
    with pytest.raises(TypeError, match=f"^jaxfuse.ops.{op}: there is no argument {name}{words}".replace("?", r"\?")):
        getattr(ops, op)(jnp.ones((2, 4, 4, 3)), **{name: 2})
