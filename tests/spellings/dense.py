"""Dense layers and products of matrices."""

import jax
import jax.numpy as jnp
from jax import lax

from layers import randn
from spellings import Hit, Miss, hits

X, W, V, B, R = randn(2, 5, 8), randn(8, 16), randn(8, 16, seed=1), randn(16), randn(2, 5, 16, seed=2)
U = randn(16, 8, seed=3)
ARGS = X, W, V, B, R


def bf16(*arrays):
    return [a.astype(jnp.bfloat16) for a in arrays]


HITS = hits(ARGS, {
    "dense": lambda x, w, v, b, r: x @ w,
    "dense+bias": lambda x, w, v, b, r: x @ w + b,
    "dense+bias, bias first": lambda x, w, v, b, r: b[None, None] + x @ w,
    "dense+bias, computed weight": lambda x, w, v, b, r: x[0] @ (w + v) + b,
    "dense+bias, a vector": lambda x, w, v, b, r: x[0, 0] @ w + b,
    "dense+bias+add": lambda x, w, v, b, r: r + (x @ w + b),
    "dense+bias+add+relu": lambda x, w, v, b, r: jax.nn.relu(x @ w + b + r),
    "dense+bias+gelu": lambda x, w, v, b, r: jax.nn.gelu(x @ w + b, approximate=False),
    "dense+bias+relu, transposed weight": lambda x, w, v, b, r: jax.nn.relu(jnp.einsum("btk,nk->btn", x, w.T) + b),
    "dense+bias+relu, transposed input": lambda x, w, v, b, r: jax.nn.relu(
        jnp.einsum("kbt,kn->btn", x.transpose(2, 0, 1) * 2, w) + b),
    "dense+bias+relu, weight first": lambda x, w, v, b, r: jax.nn.relu(jax.vmap(jax.vmap(lambda x: w.T @ x))(x) + b),
    "dense+bias, heads": lambda x, w, v, b, r: jnp.einsum("btk,knh->btnh", x, w.reshape(8, 2, 8)) + b.reshape(2, 8),
    "dense+bias+relu, heads merged before": lambda x, w, v, b, r: jax.nn.relu(
        jnp.einsum("btk,knh->btnh", x, w.reshape(8, 2, 8)).reshape(2, 5, 16) + b),
    "dense+bias+relu, columns transposed at the end": lambda x, w, v, b, r: jax.nn.relu(w.T @ x[0].T + b[:, None]).T,
    "dense+bias, several contracted axes": lambda x, w, v, b, r: (
        jnp.einsum("btnk,nkm->btm", x.reshape(2, 5, 2, 4), w.reshape(2, 4, 16)) + b),
    "dense+bias+tanh, bf16 in, f32 out": lambda x, w, v, b, r: jnp.tanh(
        lax.dot_general(*bf16(x, w), (((2,), (0,)), ((), ())), preferred_element_type=jnp.float32) + b),
    "dense+bias+tanh, bf16 in between": lambda x, w, v, b, r: jnp.tanh(
        bf16(x)[0] @ bf16(w)[0] + bf16(b)[0]).astype(jnp.float32),
}) | {name: Hit(function, ARGS, fused) for name, (function, *fused) in {  # several layers: a row each, and XLA multiplies by a gate
    "two of one input": (lambda x, w, v, b, r: (x @ w, x @ v), "dense", "dense"),
    "two of one input, a head of one output": (lambda x, w, v, b, r: (x @ w + b, x @ v[:, :1]), "dense+bias", "dense"),
    "key and value": (lambda x, w, v, b, r: (x @ v + b, x @ (w + v) + b), "dense+bias", "dense+bias"),
    "gate, silu": (lambda x, w, v, b, r: jax.nn.silu(x @ w) * (x @ v), "dense+silu", "dense"),
    "gate, linear first": (lambda x, w, v, b, r: (x @ v) * jax.nn.silu(x @ w), "dense", "dense+silu"),
    "gate, gelu and biases": (lambda x, w, v, b, r: jax.nn.gelu(x @ w + b) * (x @ v + b), "dense+bias+gelu_tanh", "dense+bias"),
    "gate, jax.nn.glu of one weight": (lambda x, w, v, b, r: jax.nn.glu(x @ w), "dense"),
    "gate, split by hand": (
        lambda x, w, v, b, r: (lambda u, v: v * jax.nn.silu(u))(*jnp.split(x @ w + b, 2, -1)), "dense+bias"),
    "gate, another function": (lambda x, w, v, b, r: jnp.sin(x @ w) * (x @ v), "dense", "dense"),
    "gate, another input": (lambda x, w, v, b, r: jax.nn.silu(x @ w) * ((x + 1) @ v), "dense+silu", "dense"),
}.items()}


# name -> (function, what is fused all the same, what is left)
MISSES = {name: Miss(function, ARGS, left, fused, "bf16-math" not in name) for name, (function, fused, *left) in {
    "bias along another axis": (
        lambda x, w, v, b, r: x @ w + r[:1, :, :1], ["dense"],
        ("dense+bias", "operand float32[1, 5, 1] varies along axis 1, the channel axis is 2")),
    "bias along the last axis of heads": (
        lambda x, w, v, b, r: jnp.einsum("btk,knh->btnh", x, w.reshape(8, 2, 8)) + b[:8], ["dense"],
        ("dense+bias", "operand float32[1, 1, 1, 8] varies along axis 3 alone, the channel axes are 2 and 3")),
    "inner value returned": (
        lambda x, w, v, b, r: (lambda y: (y, y + b))(x @ w), ["dense"], ("dense+bias", "float32[2, 5, 16] is returned by the program")),
    "sum read twice": (
        lambda x, w, v, b, r: (lambda y: jax.nn.relu(y) + jnp.cos(y))(x @ w + b), ["dense+bias"],
        ("dense+bias+relu", "float32[2, 5, 16] is read 2 times: by custom_jvp_call at ")),
    "silu with 1.1": (
        lambda x, w, v, b, r: (lambda z: z * jax.nn.sigmoid(1.1 * z))(x @ w + b), ["dense+bias"],
        ("dense+bias+silu", "resembles silu, but")),
    "a scale": (lambda x, w, v, b, r: (x @ w) / 4, ["dense"], ("dense+scale", "a scale of a dense layer: no kernel yet")),
    "a factor for each output": (
        lambda x, w, v, b, r: jax.nn.relu((x @ w) * jnp.exp(b) + b), ["dense"],
        ("dense+bn+relu", "a scale of a dense layer: no kernel yet")),
    "a query's scale": (
        lambda x, w, v, b, r: ((x @ w + b) / 4, x @ v + b), ["dense+bias"] * 2,
        ("dense+bias+scale", "a scale of a dense layer: no kernel yet")),
    "weight first and bias in columns": (
        lambda x, w, v, b, r: w.T @ x[0].T + b[:, None], [],
        ("dense+bias", "has its weight on the left and makes columns: the kernel writes rows")),
    "contracted axes apart": (
        lambda x, w, v, b, r: jnp.einsum("btk,bkn->tn", x, jnp.stack([w, v])) + b, [],
        ("dense+bias", "do not lie one after the other: no matrix in memory")),
    "bf16-math asked for": (
        lambda x, w, v, b, r: jnp.dot(x, w, precision=lax.DotAlgorithmPreset.BF16_BF16_F32) + b, [],
        ("dense+bias", "the kernel computes in its operands' dtype")),
    "another contraction of one input": (
        lambda x, w, v, b, r: (x @ w, x.transpose(0, 2, 1) @ R[0]), ["dense"] * 2),
    "integers": (
        lambda x, w, v, b, r: x.astype(int) @ w.astype(int), [], ("dense", "dtypes int32, int32 -> int32: the kernel takes")),
    "optimization_barrier": (lambda x, w, v, b, r: jax.nn.relu(lax.optimization_barrier(x @ w)), ["dense"]),
}.items()}


def attention(x, w, dropped=lambda p: p):
    q, k, v = (jnp.einsum("btk,knh->btnh", x, (w * c).reshape(8, 2, 8)) for c in (1.0, 0.5, 0.25))
    scores = jax.nn.softmax(jnp.einsum("bqnh,bknh->bnqk", q, k) / 3.0)
    return jnp.einsum("bnqk,bknh->bqnh", dropped(scores), v)


def scores_and_values(x, w):
    return attention(x, w, lambda p: jnp.where(jnp.tril(jnp.ones((5, 5), bool)), p, 0.1))  # no dropout


# the program, its arguments, and what must be fused: forward, and of its gradient
PROGRAMS = {
    "alone": (lambda x, w: x @ w, (X, W), ["dense"], ["dense_grad"]),
    "bias": (lambda x, w, b: x @ w + b, (X, W, B), ["dense+bias"], ["dense_grad+bias_grad"]),
    "bias, residual": (
        lambda x, w, b, r: r + (x @ w + b), (X, W, B, R), ["dense+bias+add"], ["dense_grad+bias_grad"]),
    "bias, residual subtracted": (
        lambda x, w, b, r: jnp.tanh(x @ w + b - r), (X, W, B, R), ["dense+bias+add+tanh"], ["tanh_grad+dense_grad+bias_grad"]),
    "bias, residual, tanh": (
        lambda x, w, b, r: jnp.tanh(x @ w + b + r), (X, W, B, R), ["dense+bias+add+tanh"], ["tanh_grad+dense_grad+bias_grad"]),
    "two layers": (
        lambda x, w, b, r, u: jax.nn.relu(jax.nn.gelu(x @ w + b, approximate=False) @ u + x),
        (X, W, B, R, U), ["dense+bias+gelu", "dense+add+relu"],
        ["gelu_grad+dense_grad+bias_grad", "relu_grad+dense_grad"]),
    "bias twice": (lambda x, w, b: jax.nn.silu(x @ w + b - 2 * b), (X, W, B), ["dense+bias+silu"], ["silu_grad+dense_grad+bias_grad"]),
    "weight first": (
        lambda x, w, b: jax.vmap(jax.vmap(lambda x: w.T @ x + b))(x), (X, W, B), ["dense+bias"], ["dense_grad"]),
    "transposed result": (
        lambda x, w, b: jnp.einsum("btk,knh->bnth", x, w.reshape(8, 2, 8)) + b.reshape(2, 1, 8), (X, W, B), ["dense+bias"], ["dense_grad"]),
    "heads": (
        lambda x, w, b: jax.nn.gelu(jnp.einsum("btk,knh->btnh", x, w.reshape(8, 2, 8)) + b.reshape(2, 8)), (X, W, B),
        ["dense+bias+gelu_tanh"], ["gelu_tanh_grad+dense_grad+bias_grad"]),
    "gate": (lambda x, w, v: jax.nn.silu(x @ w) * (x @ v), (X, W, V), ["dense", "dense+silu"],
             ["dense_grad", "silu_grad+dense_grad"]),
    "three": (lambda x, w, v, b: ((x @ w + b) / 4, x @ v + b, x @ (w * v) + b), (X, W, V, B), ["dense+bias"] * 3,
              ["dense_grad+bias_grad"] * 3),
    "attention": (attention, (X, W), ["attention"] + ["dense"] * 3, ["attention"] + ["dense_grad"] * 3),
    "scores and values": (
        scores_and_values, (X, W), ["attention scores"] + ["dense"] * 3 + ["matmul"], ["dense_grad"] * 3 + ["matmul_grad"] * 2),
    "float32 result": (
        lambda x, w, b: jnp.tanh(
            lax.dot_general(x, w, (((2,), (0,)), ((), ())), preferred_element_type=jnp.promote_types(x.dtype, jnp.float32)) + b),
        (X, W, B), ["dense+bias+tanh"], ["tanh_grad+dense_grad+bias_grad"]),
    "with itself": (lambda x, r: (jnp.tanh(jnp.einsum("tk,sk->ts", x[0], x[0])), jnp.einsum("btk,btk->bt", r, r)), (X / 4, R / 4),
                    ["dense+tanh", "matmul"], ["tanh_grad+dense_grad", "matmul_grad"]),
}
LOOPS = {  # autodiff's loops have no row of their own
    "scanned": (lambda x, w, b: lax.scan(lambda c, x: (c, jnp.tanh(x @ w + b)), 0.0, x)[1], (X, W, B), ["dense+bias+tanh"]),
}


def hit(dtype, function, args, fused, gradients=None):
    step = None if gradients is None else sorted([*fused, *[f"backward {pattern}" for pattern in gradients]])
    return Hit(function, tuple(a.astype(dtype) for a in args), fused, step, None)


HITS |= {f"{name}, {dtype}": hit(dtype, *row) for name, row in (PROGRAMS | LOOPS).items() for dtype in ("float32", "bfloat16", "float16")}
