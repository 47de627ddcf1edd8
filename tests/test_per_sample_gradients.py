"""Gradients of every sample by itself: vmap of a gradient. Fused from the outside they run what they run fused from within."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from exact import in_float64
from layers import randn
from recognition import explain, fuse

SAMPLES = 3
LAYERS = {
    "SAME": dict(),
    "VALID": dict(padding="VALID"),
    "strided, the last places not read": dict(window_strides=(3, 2), padding="VALID"),
    "strided and dilated": dict(window_strides=(2, 1), rhs_dilation=(1, 2), padding=((0, 2), (3, 1))),
    "transposed": dict(lhs_dilation=(2, 2), padding=((1, 2), (1, 2))),
    "grouped": dict(feature_group_count=2),
    "depthwise": dict(feature_group_count=4),
    "pointwise": dict(size=1),
    "NCHW": dict(dimension_numbers=("NCHW", "OIHW", "NCHW")),
    "HWNC": dict(dimension_numbers=("HWNC", "HWIO", "HWNC")),
    "1-D": dict(rank=1),
    "several images in a sample": dict(images=2),
    "3-D": dict(rank=3),
}


def layer(rank=2, size=3, dimension_numbers=None, window_strides=None, padding="SAME", feature_group_count=1, images=1,
          dtype=jnp.float32, **options):
    """(loss, (w, b), x): a convolution with bias and relu of the images of one sample, and all samples."""
    letters = "DHW"[3 - rank :]
    names = dimension_numbers or (f"N{letters}C", f"{letters}IO", f"N{letters}C")
    lengths = dict(zip("DHW", (4, 9, 8)), N=images, C=4, I=4 // feature_group_count, O=8)
    x = randn(SAMPLES, *[lengths[name] for name in names[0]], dtype=dtype)
    w = randn(*[lengths[name] if name in "IO" else size for name in names[1]], dtype=dtype)

    def loss(parameters, x):
        w, b = parameters
        y = lax.conv_general_dilated(x, w, window_strides or (1,) * rank, padding, dimension_numbers=names,
                                     feature_group_count=feature_group_count, **options)
        y = jax.nn.relu(y + jnp.expand_dims(b, [d for d, name in enumerate(names[2]) if name != "C"]))
        return jnp.sum(jnp.sin(y))

    return loss, (w, randn(8, dtype=dtype)), x


def per_sample(loss, in_axes=(None, 0), argnums=0):
    return jax.vmap(jax.grad(loss, argnums), in_axes)


def backward(fn, *args):
    """The patterns of the fused backward rows."""
    return sorted(s.pattern for s in explain(fn, *args).fused if s.direction == "backward")


def check(fn, *args, tolerance=1e-4):
    made, known = fuse(fn)(*args), jax.jit(fn)(*args)
    for value, expected in zip(jax.tree.leaves(made), jax.tree.leaves(known), strict=True):
        np.testing.assert_allclose(value, expected, tolerance, tolerance * max(1, float(jnp.abs(expected).max())))


def calls(fn, *args):
    """The kernels that are called, and the loops."""
    return sorted(re.findall(r"custom_call @(jaxfuse_\w+)|stablehlo\.(while)", jax.jit(fn).lower(*args).as_text()))


@pytest.mark.parametrize("name", LAYERS)
def test_hit(name):
    loss, parameters, x = layer(**LAYERS[name])
    assert backward(per_sample(loss), parameters, x) == ["conv per sample"]
    outside, inside = (calls(fn, parameters, x) for fn in (fuse(per_sample(loss)), per_sample(fuse(loss))))
    assert outside == inside and len(outside) == 3
    check(per_sample(loss), parameters, x)


# --- what is differentiated, and over what vmap goes ------------------------------------------------------------


def frozen(loss, parameter):
    def of_the_others(w, b, x):
        held = jax.lax.stop_gradient((w, b)[parameter])
        return loss((held, b) if parameter == 0 else (w, held), x)

    return lambda parameters, x: per_sample(of_the_others, (None, None, 0), (0, 1))(*parameters, x)


def clipped(loss):
    """As differentially private training has it."""

    def mean(parameters, x):
        gradients = per_sample(loss)(parameters, x)
        norms = jnp.sqrt(sum(jnp.sum(g**2, range(1, g.ndim)) for g in jax.tree.leaves(gradients)))
        return jax.tree.map(lambda g: jnp.tensordot(jnp.minimum(1, 3 / norms), g, 1), gradients)

    return mean


# (the program made of the loss, its backward rows)
VMAPS = {
    "and of x": (functools.partial(per_sample, argnums=(0, 1)), ["conv", "conv per sample"]),
    "of x only": (functools.partial(per_sample, argnums=1), ["conv"]),
    "bias frozen": (functools.partial(frozen, parameter=1), ["conv per sample"]),
    "weights frozen": (functools.partial(frozen, parameter=0), []),
    "samples along the last axis": (
        lambda loss: lambda p, x: per_sample(loss, (None, -1))(p, jnp.moveaxis(x, 0, -1)), ["conv per sample"]),
    "weights of every sample's own": (
        lambda loss: lambda p, x: per_sample(loss, 0)(jax.tree.map(lambda a: jnp.stack([a, 2 * a, -a]), p), x), ["conv per sample"]),
    "models by samples": (
        lambda loss: lambda p, x: jax.vmap(per_sample(loss), (0, None))(jax.tree.map(lambda a: jnp.stack([a, -a]), p), x),
        ["conv per sample"]),
    "groups of samples": (
        lambda loss: lambda p, x: jax.vmap(per_sample(loss), (None, 0))(p, jnp.stack([x, 2 * x])), ["conv per sample"]),
    "clipped and summed": (clipped, ["conv per sample"]),
    "in a scan": (
        lambda loss: lambda p, x: lax.scan(lambda p, _: (jax.tree.map(jnp.subtract, p, clipped(loss)(p, x)), None), p, None, 2)[0],
        ["conv per sample"]),
    "remat": (lambda loss: per_sample(jax.checkpoint(loss)), ["conv per sample"]),
}


@pytest.mark.parametrize("name", VMAPS)
def test_what_is_differentiated(name):
    of, rows = VMAPS[name]
    loss, parameters, x = layer()
    assert backward(of(loss), parameters, x) == rows
    check(of(loss), parameters, x)


def test_bfloat16_is_no_less_exact():
    loss, parameters, x = layer(dtype=jnp.bfloat16)
    fn = per_sample(lambda w, x: loss((w, parameters[1]), x))
    assert backward(fn, parameters[0], x) == ["conv per sample"]
    exact = np.asarray(in_float64(fn, parameters[0], x))
    ours, plain = (f(parameters[0], x) for f in (fuse(fn), jax.jit(fn)))
    error, allowed = (float(jnp.linalg.norm((np.asarray(v, np.float64) - exact).ravel())) for v in (ours, plain))
    assert ours.dtype == jnp.bfloat16 and error <= 1.1 * allowed


def test_it_can_be_differentiated():
    loss, parameters, x = layer()

    def penalty(of_each):
        return jax.grad(lambda parameters: sum(jnp.sum(jnp.sin(g)) for g in jax.tree.leaves(of_each(parameters, x))))

    made, known = (jax.jit(penalty(of_each))(parameters) for of_each in (fuse(per_sample(loss)), per_sample(loss)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-3, 1e-3), made, known)


def test_in_a_shard_map():
    loss, parameters, x = layer()
    mesh = jax.make_mesh((1,), ("samples",), axis_types=(AxisType.Auto,))
    fn = jax.shard_map(per_sample(loss), mesh=mesh, in_specs=(P(), P("samples")), out_specs=P("samples"))
    assert backward(fn, parameters, x) == ["conv per sample"]
    check(fn, parameters, x)


# --- what is no such gradient ------------------------------------------------------------------------------------


def test_a_layer_in_groups_stays_one():
    """Whether its batch is first or not, and under a vmap over the layer too."""
    loss, parameters, x = layer(images=2, feature_group_count=2)
    assert backward(jax.grad(loss), parameters, x[0]) == ["conv+bias+relu"]
    many = jax.tree.map(lambda a: jnp.stack([a, 2 * a, -a]), parameters)
    assert [site.pattern for site in explain(jax.vmap(loss), many, x).fused] == ["conv+bias+relu"]
    loss, parameters, x = layer(feature_group_count=2, dimension_numbers=("CHWN", "HWIO", "CHWN"))
    assert [site.pattern for site in explain(loss, parameters, x[0]).fused] == ["conv+bias+relu"]


def test_the_gradient_of_x_where_the_batch_is_not_first_is_none():
    loss, parameters, x = layer(dimension_numbers=("HWNC", "HWIO", "HWNC"))
    many = jax.tree.map(lambda a: jnp.stack([a, 2 * a, -a]), parameters)
    fn = per_sample(loss, 0, (0, 1))
    assert backward(fn, many, x) == ["conv per sample"]
    assert [site.pattern for site in explain(fn, many, x).skipped] == ["conv"]
    check(fn, many, x)


def by_hand(x, dy, padding=((1, 1), (1, 1)), **options):
    """Weight gradients as convolutions in groups."""
    return lax.conv_general_dilated(x, dy, (1, 1), padding, feature_group_count=SAMPLES,
                                    dimension_numbers=("CHWN", "IHWO", "HWNC"), **options)


X, DY = randn(SAMPLES, 6, 6, 4), randn(1, 6, 6, SAMPLES * 8)


def test_by_hand():
    report = explain(by_hand, X, DY)
    assert [site.pattern for site in report.fused] == ["conv per sample"]
    check(by_hand, X, DY)


NEARLY = {
    "negative padding": (functools.partial(by_hand, padding=((-1, 1), (1, 1))), "negative padding"),
    "wider than its operands": (
        lambda x, dy: by_hand(*(v.astype(jnp.bfloat16) for v in (x, dy)), preferred_element_type=jnp.float32), "weight gradient"),
}


@pytest.mark.parametrize("name", NEARLY)
def test_near_miss(name):
    fn, why = NEARLY[name]
    (site,) = explain(fn, X, DY).skipped
    assert why in site.reason


def test_what_a_mesh_divides_stays_as_it_is():
    mesh = AbstractMesh((2,), ("inputs",), axis_types=(AxisType.Explicit,))
    along = P(None, None, None, "inputs"), P()
    given = [jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=NamedSharding(mesh, spec)) for v, spec in zip((X, DY), along)]
    (site,) = explain(by_hand, *given).skipped
    assert "weight gradient" in site.reason
