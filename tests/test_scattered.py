"""Transposed convolutions of few outputs, which a product of matrices computes, by themselves and as programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfuse
from jaxfuse import ops
from jaxfuse.ops.conv import scattered
from jaxfuse.runtime import ffi

# name: (x, w, options)
GEOMETRIES = {
    "window of four blocks": ((2, 9, 5), (8, 5, 1), dict(lhs_dilation=(2,), padding=((7, 7),))),
    "same": ((2, 6, 5, 4), (4, 3, 4, 3), dict(lhs_dilation=(2, 2), padding=((2, 2), (2, 1)))),
    "padding all in front": ((1, 5, 5, 4), (3, 3, 4, 2), dict(lhs_dilation=(2, 3), padding=((2, 0), (0, 1)))),
    "beyond the window": ((2, 5, 3), (2, 3, 2), dict(lhs_dilation=(3,), padding=((1, 2),))),
    "cropped": ((2, 7, 3), (5, 3, 2), dict(lhs_dilation=(2,), padding=((-1, 1),))),
    "one axis spread": ((2, 4, 5, 3), (3, 2, 3, 2), dict(lhs_dilation=(1, 2), padding=((2, 2), (1, 1)))),
    "three dimensions": ((1, 3, 2, 4, 3), (3, 2, 4, 3, 1), dict(lhs_dilation=(2, 2, 2), padding=((1, 2), (1, 1), (2, 2)))),
    "channels first": ((2, 3, 6, 4), (2, 3, 4, 4), dict(lhs_dilation=(2, 2), padding=((2, 2), (1, 2)),
                                                        dimension_numbers=("NCHW", "OIHW", "NCHW"))),
}


def arguments(name, dtype):
    random = np.random.default_rng(0)
    x, w, options = GEOMETRIES[name]
    return [jnp.asarray(random.normal(size=shape), dtype) for shape in (x, w)], options


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_as_xla_computes_it_and_its_gradients(name, dtype):
    (x, w), options = arguments(name, dtype)
    features = ops.conv(x, w, **options).shape[1 if "dimension_numbers" in options else -1]
    bias = jnp.linspace(-1, 1, features)

    def layer(x, w, bias):
        return ops.conv(x, w, bias, activation="silu", **options)

    def value_and_gradients(x, w, bias):
        y, pullback = jax.vjp(layer, x, w, bias)
        return y, *pullback(jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype))

    lowered = jax.jit(value_and_gradients).lower(x, w, bias)
    got, text = lowered.compile()(x, w, bias), lowered.as_text()
    assert "jaxfuse_conv" not in text and "lhs_dilate" not in text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scattered, "FEW", 0)
        patch.setattr(ffi, "unavailable", lambda target: "switched off by the test")
        jax.clear_caches()
        wide = [a.astype(jnp.float32) for a in (x, w, bias)]
        expected = jax.jit(value_and_gradients)(*wide)
        jax.clear_caches()
    tolerance = 2e-5 if dtype == "float32" else 3e-2
    for value, truth in zip(got, expected, strict=True):
        assert value.shape == truth.shape
        np.testing.assert_allclose(np.asarray(value, np.float32), truth, rtol=tolerance, atol=tolerance * np.abs(truth).max())


def test_it_is_for_few_outputs_of_one_group():
    config = dict(window_strides=(1,), padding=((3, 3),), lhs_dilation=(2,))
    x = jnp.zeros((1, 4, 8))

    def kernel(w, **options):
        fused = jaxfuse.explain(lambda x, w: jax.lax.conv_general_dilated(
            x, w, dimension_numbers=("NWC", "WIO", "NWC"), **(config | options)), x, w, policy="always").fused
        return [site.kernel for site in fused]

    assert kernel(jnp.zeros((4, 8, 7))) == ["product"]
    others = (kernel(jnp.zeros((4, 8, 8))), kernel(jnp.zeros((4, 4, 2)), feature_group_count=2),
              kernel(jnp.zeros((4, 8, 2)), rhs_dilation=(2,)))
    assert all(names in (["onednn"], []) for names in others)
    assert kernel(jnp.zeros((4, 8, 2)), lhs_dilation=(1,)) in (["onednn"], [])
