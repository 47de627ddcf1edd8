"""A 1×1 convolution, channels first, as a product of matrices: w·x of every image as it lies.

oneDNN's convolutions would have x and y channels last, a reorder each.
"""

import math

import jax.numpy as jnp
from jax import lax

FEWEST = 512  # spatial positions: of fewer the reorders cost less than XLA's product, which is slower than oneDNN's


def refuse(config, x, w) -> str | None:
    if config.feature_group_count != 1 or config.transposed or any(s != 1 for s in config.window_strides):
        return f"feature_group_count {config.feature_group_count}, window_strides {config.window_strides}: the product is for 1"
    if any(w.shape[d] != 1 for d in config.rhs_spec[2:]) or any(map(any, config.padding)):
        return f"a filter of shape {tuple(w.shape)} with padding {config.padding}: the product is for one tap"
    first = tuple(range(len(x.shape)))
    if (config.lhs_spec, config.out_spec) != (first, first):
        return f"axes {config.lhs_spec} -> {config.out_spec}: the product is for channels first"
    if str(x.dtype) != "float32":
        return f"dtype {x.dtype}: the product has been measured in float32"
    features, positions = w.shape[config.rhs_spec[0]], math.prod(x.shape[2:])
    if positions < FEWEST:
        return f"{positions} spatial positions: the product is for {FEWEST} or more"
    if x.shape[0] > 1 and features > positions:
        return f"{features} features, {positions} spatial positions: a filter for each image would be larger than they are"
    return None


def convolve(config, x, w):
    """What `lax.conv_general_dilated` gives."""
    w = jnp.transpose(w, config.rhs_spec).reshape([w.shape[d] for d in config.rhs_spec[:2]])
    images = x.reshape(*x.shape[:2], -1)
    if x.shape[0] == 1:
        y = lax.dot(w, images[0], precision=config.precision)
    else:  # in batches: what contracts w once has the images' axis inside, to be transposed
        every = jnp.broadcast_to(w, (x.shape[0], *w.shape))
        y = lax.dot_general(every, images, (((2,), (1,)), ((0,), (0,))), precision=config.precision)
    return y.reshape(x.shape[0], -1, *x.shape[2:])
