"""Attention: scores, what is done to them, a softmax, and the product with the values."""

import jax
import jax.numpy as jnp

from layers import randn
from spellings import Hit, Miss, hits

Q, K, V = (randn(2, 5, 4, 8, seed=i) for i in range(3))
CAUSAL = jnp.tril(jnp.ones((5, 5), bool))
KEPT = randn(2, 4, 5, 5, seed=7) > -0.5


def product(q, k):
    return jnp.einsum("btnh,bsnh->bnts", q, k)


def scores(q, k, between=lambda s: s / 3):
    return jax.nn.softmax(between(product(q, k)))


def mixed(p, v):
    return jnp.einsum("bnts,bsnh->btnh", p, v)


def attention(between=lambda s: s / 3, after=lambda p: p):
    return lambda q, k, v: mixed(after(scores(q, k, between)), v)


def by_hand(softmax):
    return lambda q, k, v: mixed(softmax(product(q, k)), v)


def framework(**options):
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **options)


SPELLINGS = {
    "attention": attention(),
    "attention, no scale": attention(lambda s: s),
    "attention, query scaled": lambda q, k, v: attention(lambda s: s)(q / 3, k, v),
    "attention, query and keys scaled": lambda q, k, v: attention(lambda s: s * 2)(q * 0.5, k * -0.3, v),
    "attention, scaled query that is negative": lambda q, k, v: attention(lambda s: s)(-(q / 3), k, v),
    "attention, query scaled, bf16": lambda q, k, v: attention(lambda s: s)(q / 3, k, v),
    "attention+bias, query scaled": lambda q, k, v: attention(lambda s: s + jnp.ones((5, 5)))(q * 0.3, k, v),
    "attention+mask, query scaled": lambda q, k, v: attention(lambda s: jnp.where(CAUSAL, s, -1e9))(q * 0.3, k, v),
    "attention, values first": lambda q, k, v: jnp.einsum("bsnh,bnts->bthn", v, scores(q, k)),
    "attention, keys first": lambda q, k, v: mixed(jax.nn.softmax(jnp.einsum("bsnh,btnh->bnts", k, q)), v),
    "attention, one head": lambda q, k, v: jax.nn.softmax(q[:, :, 0] @ k[:, :, 1].swapaxes(1, 2)) @ v[:, :, 2],
    "attention, vmapped": jax.vmap(jax.vmap(lambda q, k, v: jax.nn.softmax(q @ k.T / 3) @ v, 1, 1)),
    "attention, other features": lambda q, k, v: mixed(scores(q, k), v[..., :3]),
    "attention, by hand": by_hand(lambda s: (lambda e: e / e.sum(3)[..., None])(jnp.exp(s - s.max(3)[..., None]))),
    "attention, bf16": attention(lambda s: s.astype("float32") / 3, lambda p: p.astype("bfloat16")),
    "attention, bf16 softmax": attention(),
    "attention, widened": lambda *arrays: attention()(*(a.astype("bfloat16").astype("float32") for a in arrays)),
    "attention, grouped": lambda q, k, v: framework()(q, k[:, :, :2], v[:, :, 2:]),
    "attention, batch of one": lambda *arrays: framework()(*(a[:1] for a in arrays)),
    "attention, mask of heads": attention(after=lambda p: p * jnp.arange(4)[:, None, None]),
    "attention, mask of heads by einsum": attention(after=lambda p: jnp.einsum("bnts,n->bnts", p, jnp.arange(4))),
    "attention, scaled softmax": attention(after=lambda p: p * 0.7),
    "attention+dropout": attention(after=lambda p: p * (KEPT / 0.7)),
    "attention+dropout, selected": attention(after=lambda p: jnp.where(KEPT, p / 0.7, 0)),
    "attention+dropout, turned": attention(after=lambda p: jax.lax.select(~KEPT, jnp.zeros_like(p), p) * 1.5),
    "attention+dropout, of all items": attention(after=lambda p: p * KEPT[0, 0]),
    "attention+dropout, of rows": attention(after=lambda p: p * jnp.arange(5)[:, None]),
    "attention+dropout, bf16": attention(lambda s: s.astype("float32"), lambda p: p.astype("bfloat16") * (KEPT / 0.7).astype("bfloat16")),
    "attention+mask+dropout": attention(lambda s: jnp.where(CAUSAL, s, -1e9), lambda p: jnp.where(KEPT, p / 0.7, 0)),
    "attention+mask+dropout, with a mask of heads": attention(
        lambda s: jnp.where(CAUSAL, s, -1e9), lambda p: jnp.where(KEPT, p / 0.7, 0) * jnp.arange(4)[:, None, None]),
    "attention+bias": attention(lambda s: s * 0.3 + jnp.ones((5, 5))),
    "attention+bias, two": lambda q, k, v: attention(lambda s: s / 3 + q[:, :1, :, :1].swapaxes(1, 2) + jnp.arange(5.0))(q, k, v),
    "attention+bias, given": framework(bias=jnp.ones((2, 4, 5, 5))),
    "attention+mask": attention(lambda s: jnp.where(CAUSAL, s / 3, -1e9)),
    "attention+mask, turned": attention(lambda s: jnp.where(~CAUSAL, -jnp.inf, s / 3)),
    "attention+mask, two": lambda q, k, v: attention(
        lambda s: jnp.where(k[:, None, None, :, 0, 0] > -1, jnp.where(CAUSAL, s, -1e9), -1e9))(q, k, v),
    "attention+mask, causal": framework(is_causal=True),
    "attention+mask, bf16 grouped": lambda q, k, v: framework(is_causal=True)(q, k[:, :, :1], v[:, :, :1]),
    "attention+bias+mask": lambda q, k, v: attention(lambda s: jnp.where(CAUSAL, s + q[0, 0, 0, 0], -1e9))(q, k, v),
}
SPELLINGS["attention, along the other axis"] = lambda q, k, v: jnp.einsum("bnts,btnh->bsnh", jax.nn.softmax(product(q, k), 2), v)

HITS = {}
for _name, _function in SPELLINGS.items():
    HITS |= hits([a.astype("bfloat16" if "bf16" in _name else "float32") for a in (Q, K, V)], {_name: _function}, both=True)



@jax.custom_vjp
def clipped(x):
    """The identity; its gradient is clipped."""
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))
plain = attention(lambda s: s)
HITS |= hits((Q, K, V), {  # the scale stays where its gradient is not the attention's own
    "attention, query that is the keys too": lambda q, k, v: plain(q / 3, q, v),
    "attention, query that is the values too": lambda q, k, v: plain(q / 3, k, q),
    "attention, scaled query with a gradient of its own": lambda q, k, v: plain(clipped(q / 3), k, v),
}, both=True)
HITS |= {f"attention, {name}": Hit(function, (Q, K, V), ["attention"], None, None) for name, function in {
    "remat": lambda q, k, v: jax.checkpoint(plain)(q / 3, k, v),
    "small scales of large numbers": lambda q, k, v: plain((3e19 * q) * 1e-19, (3e19 * k) * 1e-19, v),
    "scaled query read elsewhere": lambda q, k, v: (lambda q: (attention(lambda s: s)(q, k, v), jnp.cos(q)))(q / 3),
    "scaled query that is all of it": lambda q, k, v: (lambda q: attention(lambda s: s)(q, q, q))(q / 3),
    "query times nothing": lambda q, k, v: attention(lambda s: s)(q * 0.0, k, v),
}.items()}

# the program, how the reason begins, and what it has; "fused" is right
NEAR_MISSES = {
    "capped": (attention(lambda s: jnp.tanh(s / 3)), "tanh at ", "is not a scale, a bias or a mask"),
    "scaled after the bias": (attention(lambda s: (s + jnp.ones((5, 5))) / 3), "div at ", "scales what a bias or a mask was applied to"),
    "bias after the mask": (
        attention(lambda s: jnp.where(CAUSAL, s, -9.0) + jnp.arange(5.0)), "add at ", "adds a bias to masked scores"),
    "subtracted": (attention(lambda s: s - jnp.arange(5.0)), "sub at ", "subtracts from the scores: add what is negative instead"),
    "stopped": (attention(lambda s: jax.lax.stop_gradient(s)), "stop_gradient at ", "is not a scale, a bias or a mask"),
    "at most": (
        by_hand(lambda s: (lambda e: e / e.sum(3, keepdims=True))(jnp.exp(s - jnp.maximum(9.0, s.max(3, keepdims=True))))),
        "reduce_max at ", "is not the beginning of a softmax"),
    "mask of an array": (
        attention(lambda s: jnp.where(CAUSAL, s, jnp.arange(5.0))), "select_n at ", "gives masked scores something else than one number"),
    "two numbers": (
        attention(lambda s: jnp.where(CAUSAL.T, jnp.where(CAUSAL, s, -9.0), -8.0)), "select_n at ",
        "a mask with another number, -8, than the one before, -9"),
    "dropped to another number": (attention(after=lambda p: jnp.where(KEPT, p, 0.1)), "select_n at ", "is between the softmax and"),
    "squared softmax": (attention(after=lambda p: p * p), "mul at ", "is between the softmax and the product"),
    "shifted softmax": (attention(after=lambda p: p + 1.0), "add at ", "is between the softmax and the product"),
    "softmax of rows": (
        lambda q, k, v: mixed(jax.nn.softmax(product(q, k), 2), v), "dot_general at ", "does not sum over the softmax's axis alone"),
    "no sum": (by_hand(lambda s: jnp.exp(s - s.max(3, keepdims=True))), "exp at ", "is not divided by its sum"),
    "sums of columns": (
        by_hand(lambda s: (lambda e: e / e.sum(2, keepdims=True))(jnp.exp(s - s.max(3, keepdims=True)))),
        "exp at ", "is not divided by its sum"),
    "sums of rows for columns": (
        by_hand(lambda s: (lambda e: e / e.sum(3)[:, :, None])(jnp.exp(s - s.max(3, keepdims=True)))),
        "exp at ", "is not divided by its sum"),
    "maxima of rows for columns": (
        by_hand(lambda s: (lambda e: e / e.sum(3, keepdims=True))(jnp.exp(s - s.max(3)[:, :, None]))),
        "reduce_max at ", "is not the beginning of a softmax"),
    "values without features": (
        lambda q, k, v: jnp.einsum("bnts,bsn->btn", scores(q, k), v[..., 0]), "the values", "have 0 axes of their own"),
    "softmax returned": (lambda q, k, v: (lambda p: (p, mixed(p, v)))(scores(q, k)), "float32[2, 4, 5, 5] is read by dot_general", ""),
    "scores read": (
        lambda q, k, v: (lambda s: (s.mean(), mixed(jax.nn.softmax(s), v)))(product(q, k)), "what is inside is read by reduce_sum", ""),
    "keys of several axes": (
        lambda q, k, v: jnp.einsum("btmns,bsmh->btnh", jax.nn.softmax(jnp.einsum("btnh,bsmh->btmns", q, k)), v),
        "dot_general at ", "does not sum over the softmax's axis alone"),
    "another precision": (
        lambda q, k, v: mixed(jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k, precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32)), v),
        "precision ", "the kernel computes in its operands' dtype"),
}
MISSES = {name: Miss(function, (Q, K, V), [("attention", words)], None, "precision" not in name)
          for name, (function, *words) in NEAR_MISSES.items()}
