"""attention: y = (f·softmax(scale·q·kᵀ + bias))·v as one op, and its gradients.

With p = softmax(s), s = scale·q·kᵀ + bias and a factor f for each p (dropout's), of the cotangent dy:

    dv = (f·p)ᵀ·dy,  dp = f·(dy·vᵀ),  ds = p·(dp - Σ p·dp),  Σ p·dp = Σ dy·y,  dq = scale·ds·k,  dk = scale·dsᵀ·q,  dbias = ds

Scores are never in memory: of each row its largest score and the sum of its exponentials are kept, and the backward pass
computes them again (Dao et al. 2022).
"""

import dataclasses
import math
from itertools import compress

import jax
import jax.numpy as jnp
from jax import lax

from jaxfuse.ops.arrays import wide
from jaxfuse.ops.attention_config import AttentionConfig, to_layout, strides
from jaxfuse.ops.batch_axes import BatchAxes, completed
from jaxfuse.ops.errors import Arguments, Array, checked_names
from jaxfuse.ops.op import FusedOp, Linear
from jaxfuse.ops.stage import FLOATS, Kernel
from jaxfuse.runtime import ffi, private
from jaxfuse.runtime.settings import ours

MASKED = -1e30  # the score where a mask is False: less than any that a network makes, and a row of nothing else is no NaN


@checked_names
@ours
def attention(q: Array, k: Array, v: Array, bias: Array | None = None, mask: Array | None = None,
              factor: Array | None = None, *, scale: float | None = None) -> jax.Array:
    """Attention of several heads: y = (factor · softmax(scale · q·kᵀ + bias)) · v      (Vaswani et al. 2017)

    Args:
      q: queries `[batch, rows, heads, features]`, float.
      k, v: keys and values `[batch, keys, heads, features]`, of q's dtype; v may have other features than k. They may have
        fewer heads than q, by a whole factor n: then n heads of q after one another share one of them (grouped queries).
      bias: added to the scores; broadcast to `[batch, heads, rows, keys]`. Float.
      mask: bool, broadcast like bias: a score where it is False is -1e30, and gives 0 unless the whole row is masked.
      factor: of each number that the softmax gives, broadcast like bias: dropout's 0 or 1/(1 - rate). Float.
      scale: of the product, by default 1/sqrt(features).

    Returns: `[batch, rows, heads, features of v]` in q's dtype. Scores, softmax and sums are float32.
    Raises: OpError (a ValueError), at trace time, for shapes, dtypes or options that do not fit.
    """
    arguments = Arguments("attention")
    added = dict(bias=bias, mask=mask, factor=factor)
    arguments.floats(q=q, k=k, v=v, **{name: a for name, a in added.items() if a is not None and name != "mask"})
    for name, array in dict(q=q, k=k, v=v).items():
        arguments.check(array.ndim == 4, name, f"of rank {array.ndim}", "rank 4: (batch, rows, heads, features)", "reshape it")
        arguments.check(array.dtype == q.dtype, name, str(array.dtype), f"{q.dtype}, as q is", "cast one of them")
    batch, rows, heads, features = q.shape
    keys, shared = k.shape[1:3]
    arguments.check(shared > 0 and heads % max(1, shared) == 0, "k", f"of {shared} heads", f"a divisor of q's {heads}", "repeat its heads")
    for name, array, wanted in (("k", k, (batch, keys, shared, features)), ("v", v, (batch, keys, shared, v.shape[3]))):
        arguments.check(array.shape == wanted, name, f"of shape {array.shape}", f"{wanted}, to fit q and k", "check its axes")
    groups = heads // shared
    config = AttentionConfig(
        "btngd", "bsnd", "bsne", "btnge", out_dtype=str(q.dtype), fill=MASKED,
        scale=1 / math.sqrt(max(1, features)) if scale is None else arguments.number("scale", scale))
    operands = [q.reshape(batch, rows, shared, groups, features), k, v]
    for name, over_scores in added.items():
        if over_scores is not None:
            spec, operand = _broadcast(arguments, name, over_scores, (batch, shared, groups, rows, keys))
            config = dataclasses.replace(config, **{name: spec})
            operands.append(operand)
    return OP(config, *operands)[0].reshape(batch, rows, heads, v.shape[3])


def _broadcast(arguments, name: str, array, sizes):
    """The letters of those axes of the scores along which this is not repeated, and the array with these alone."""
    batch, shared, groups, rows, keys = sizes
    wanted = batch, shared * groups, rows, keys
    if name == "mask":
        came = str(getattr(array, "dtype", type(array).__name__))
        arguments.check(came == "bool", name, came, "a bool array", "compare it with 0")
    shape = (1,) * (4 - array.ndim) + tuple(array.shape)
    fits = len(shape) == 4 and all(n in (1, w) for n, w in zip(shape, wanted))
    arguments.check(fits, name, f"of shape {tuple(array.shape)}", f"one that broadcasts to {wanted}", "check its axes")
    split = [shared, groups] if shape[1] > 1 else [1, 1]
    array = jnp.asarray(array).reshape(shape[0], *split, *shape[2:])
    long = [d for d, n in enumerate(array.shape) if n != 1]
    return "".join("bngts"[d] for d in long), array.reshape([array.shape[d] for d in long])


def _product(letters: str, one, other):
    dtype = jnp.promote_types(jnp.promote_types(one.dtype, other.dtype), jnp.float32)
    return jnp.einsum(letters, one, other, preferred_element_type=dtype)


def _over_scores(config: AttentionConfig, array, spec: str | None):
    """A bias, a mask or a factor, which broadcasts against the scores."""
    assert spec is not None, "what is among the arguments has its axes in the config"
    return to_layout(array, spec, config.scores)


def _scores(config: AttentionConfig, q, k, bias, mask):
    scores = _product(f"{config.q},{config.k}->{config.scores}", q, k) * config.scale
    if bias is not None:
        scores = scores + _over_scores(config, bias, config.bias).astype(scores.dtype)
    return scores if mask is None else jnp.where(_over_scores(config, mask, config.mask), scores, config.fill)


def _times(config: AttentionConfig, scores, factor):
    return scores if factor is None else scores * _over_scores(config, factor, config.factor).astype(scores.dtype)


def _reference(config: AttentionConfig, *args):
    q, k, v, bias, mask, factor = config.unpack(args)
    scores = _scores(config, q, k, bias, mask)
    largest = lax.stop_gradient(scores).max(-1, initial=-jnp.inf)  # the softmax is the same whatever is subtracted
    largest = jnp.where(largest == -jnp.inf, 0, largest)
    e = jnp.exp(scores - largest[..., None])
    inverse = 1 / e.sum(-1)
    p = _times(config, e * inverse[..., None], factor).astype(v.dtype)
    y = _product(f"{config.scores},{config.v}->{config.out}", p, v).astype(config.out_dtype)
    return (y, largest, inverse) if config.with_residuals else (y,)


def _residuals(config: AttentionConfig, args, outs):
    return (*args, *outs)


def _tangent(config: AttentionConfig, residuals, tangents):
    q, k, v, bias, mask, factor = config.unpack(residuals[:-3])
    largest, inverse = residuals[-2:]
    dq, dk, dv, dbias, _, dfactor = config.unpack(tangents)
    scores = _scores(config, q, k, bias, mask)
    p = jnp.exp(scores - largest[..., None]) * inverse[..., None]
    ds = jnp.zeros_like(scores)
    for one, other in ((dq, k), (q, dk)):
        if one is not None and other is not None:
            ds = ds + _product(f"{config.q},{config.k}->{config.scores}", one, other) * config.scale
    if dbias is not None:
        ds = ds + _over_scores(config, dbias, config.bias).astype(ds.dtype)
    if mask is not None:
        ds = jnp.where(_over_scores(config, mask, config.mask), ds, 0)
    mix = f"{config.scores},{config.v}->{config.out}"
    dy = _product(mix, _times(config, p * (ds - (p * ds).sum(-1, keepdims=True)), factor), wide(v))
    if dv is not None:
        dy = dy + _product(mix, _times(config, p, factor), wide(dv))
    if dfactor is not None:
        dy = dy + _product(mix, _times(config, p, dfactor), wide(v))
    return (dy.astype(config.out_dtype),)


def _forward_axes(config: AttentionConfig, ranks) -> BatchAxes:
    *inputs, out, statistic = config.item_axes()
    return BatchAxes(tuple(inputs), (out, statistic, statistic) if config.with_residuals else (out,))


def _backward_axes(linear: Linear, ranks) -> BatchAxes:
    *inputs, out, statistic = linear.config.item_axes()
    return BatchAxes((*inputs, out, statistic, statistic, out), tuple(compress(inputs, linear.active)))


# --- CPU kernel: our own loops -----------------------------------------------------------------------------------


def _refuse(config: AttentionConfig, args) -> str | None:
    q, k, v, bias, mask, factor = config.unpack(args)
    dtypes = {str(a.dtype) for a in (q, k, v)}
    if len(dtypes) > 1 or str(q.dtype) not in FLOATS or config.out_dtype not in (str(q.dtype), "float32"):
        return f"dtypes {q.dtype}, {k.dtype}, {v.dtype} -> {config.out_dtype}: the kernel takes one of {', '.join(FLOATS)}"
    other = next((a.dtype for a in (bias, factor) if a is not None and str(a.dtype) not in FLOATS), None)
    if other is not None:
        return f"bias or factor of dtype {other}: the kernel takes {', '.join(FLOATS)}"
    empty = next((a for a in (q, k, v) if 0 in a.shape), None)
    return f"empty array of shape {tuple(empty.shape)}" if empty is not None else ffi.unavailable("jaxfuse_attention_fwd")


def _refuse_backward(linear: Linear, args) -> str | None:
    if linear.config.unpack(linear.active)[5]:
        return "the kernel has no gradient of the factor"
    return _refuse(linear.config, args[: len(linear.types)])


def _laid_out(config: AttentionConfig, args, y_shape) -> tuple[dict, list]:
    """The attributes of both targets, and their operands: q, k, v and, the keys side by side, bias, mask, factor."""
    q, k, v, *added = config.unpack(args)
    sizes, batch = config.sizes(q, k, v), config.batch
    attributes: dict = {name: sizes[letter] for name, letter in dict(rows="t", keys="s", inner="d", columns="e").items()}
    unknown = [letter for letter in batch if private.is_symbolic_size(sizes[letter])][:1]  # one the handler is told by its operands
    attributes |= dict(batch=[-1 if letter in unknown else sizes[letter] for letter in batch], scale=config.scale, fill=config.fill)
    for name, spec, shape, matrix in (("q", config.q, q.shape, "td"), ("k", config.k, k.shape, "sd"), ("v", config.v, v.shape, "se"),
                                      ("y", config.out, y_shape, "te")):
        attributes[f"{name}_strides"] = strides(spec, shape, batch + matrix)
    operands = [q, k, v]
    for name, axes, array in zip(("bias", "mask", "factor"), (config.bias, config.mask, config.factor), added):
        attributes[f"has_{name}"] = axes is not None
        if axes is not None:
            array = jnp.moveaxis(array, axes.index("s"), -1) if "s" in axes else jnp.repeat(array[..., None], sizes["s"], -1)
            attributes[f"{name}_strides"] = strides(axes.replace("s", "") + "s", array.shape, config.scores)
            operands.append(array.astype(jnp.float32) if name == "factor" else array)
    return attributes, operands


def _types(config: AttentionConfig, args) -> list[jax.ShapeDtypeStruct]:
    sizes = config.sizes(*args[:3])
    y = jax.ShapeDtypeStruct([sizes[letter] for letter in config.out], config.out_dtype)
    statistic = jax.ShapeDtypeStruct([sizes[letter] for letter in config.scores[:-1]], jnp.float32)
    return [y, statistic, statistic] if config.with_residuals else [y]


def _run_forward(config: AttentionConfig, args, mesh_axes):
    types = _types(config, args)
    attributes, operands = _laid_out(config, args, types[0].shape)
    return ffi.call("jaxfuse_attention_fwd", types, *operands, **attributes)


def _run_backward(linear: Linear, args, mesh_axes):
    config, count = linear.config, len(linear.types)
    args, residuals = args[:count], args[count:]
    attributes, operands = _laid_out(config, args, residuals[0].shape)
    sizes, specs = config.sizes(*args[:3]), []
    for name, spec, matrix in (("dq", config.q, "td"), ("dk", config.k, "sd"), ("dv", config.v, "se")):
        fits = spec[-1] == matrix[-1] and all(letter in spec for letter in config.batch)
        specs.append(spec if fits else config.batch + matrix)
        attributes[f"{name}_strides"] = strides(specs[-1], tuple(sizes[letter] for letter in specs[-1]), config.batch + matrix)
    own = [config.q, config.k, config.v]
    if config.bias is not None and config.unpack(linear.active)[3]:
        specs.append(config.scores)
        own.append(config.bias)
    dtypes = [a.dtype if spec == mine else jnp.float32 for spec, mine, a in zip(specs[:3], own, args)]
    results = [jax.ShapeDtypeStruct([sizes[letter] for letter in spec], dtype)
               for spec, dtype in zip(specs, (*dtypes, jnp.float32))]
    found = ffi.call("jaxfuse_attention_bwd", results, *operands, *residuals, **attributes)
    found = [_gathered(d, spec, mine).astype(a.dtype) for d, spec, mine, a in zip(found, specs, own, args)]
    return completed(compress(found, linear.active), _backward_axes(linear, ()).outputs, mesh_axes)


def _gathered(gradient, spec: str, wanted: str):
    """With the wanted letters alone, summed over the others."""
    return gradient if spec == wanted else jnp.einsum(f"{spec}->{wanted}", gradient)


OP = FusedOp(
    "attention",
    reference=_reference,
    residuals=_residuals,
    tangent=_tangent,
    for_autodiff=lambda config: dataclasses.replace(config, with_residuals=True),
    forward_kernels=(Kernel(None, _refuse, _run_forward),),
    backward_kernels=(Kernel(None, _refuse_backward, _run_backward),),
    forward_axes=_forward_axes,
    backward_axes=_backward_axes,
)
