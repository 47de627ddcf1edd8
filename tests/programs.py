"""Small programs that hold one thing each that `fuse` has to leave as it is, beside a convolution that it rewrites.

Each takes an image `[2, 8, 8, 4]` and returns any pytree. NOT_DIFFERENTIABLE: those without any derivative; NO_FORWARD:
those with a `custom_vjp`, to which JAX refuses forward mode.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import sparse
from jax.sharding import Mesh, NamedSharding, PartitionSpec

IMAGE = jax.random.normal(jax.random.key(0), (2, 8, 8, 4))
FILTERS = 0.2 * jax.random.normal(jax.random.key(1), (3, 3, 4, 4))
BIAS = jax.random.normal(jax.random.key(2), (4,))
NOT_DIFFERENTIABLE = {"while_with_closures", "while_in_scan", "callback_with_effects", "callback", "sparse_matrices"}
NO_FORWARD = {"custom_vjp", "custom_gradient", "switch"}
PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def block(x, w=FILTERS):
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu(y + BIAS)


def mesh():
    return Mesh(np.array(jax.devices()[:1]), "d")


# --- derivative rules of the user: each is not the derivative of its value, so that losing it shows


@jax.custom_jvp
def doubled_slope(x):
    return jnp.sin(x)


@doubled_slope.defjvp
def _(primals, tangents):
    return doubled_slope(*primals), 2 * jnp.cos(primals[0]) * tangents[0]


@jax.custom_jvp
@jax.jit
def jitted_inside(x):
    return jnp.sin(x) * 2


jitted_inside.defjvps(lambda t, out, x: 3 * jax.jit(jnp.cos)(x) * t)


@jax.custom_vjp
def halved_slope(x):
    return jnp.sin(block(x))


halved_slope.defvjp(lambda x: (halved_slope(x), x), lambda x, g: (0.5 * g * jnp.cos(x),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def clipped(scale, x, function):
    return function(x) * scale


clipped.defvjp(lambda scale, x, function: (clipped(scale, x, function), x),
               lambda scale, function, x, g: (jnp.clip(g, -scale, scale) * jnp.cos(x),))


@program
def custom_jvp_of_a_fused_part(x):
    wrapped = jax.custom_jvp(lambda v: block(v))
    wrapped.defjvps(lambda t, out, x: 0.25 * t)
    return wrapped(x) + block(x)


@program
def custom_gradient(x):
    @jax.custom_gradient
    def scaled(v):
        return v * 2, lambda g: (g * jnp.sin(v),)

    return scaled(block(x))


@program
def custom_vmap(x):
    @jax.custom_batching.custom_vmap
    def counted(v):
        return v * 2

    @counted.def_vmap
    def _(axis_size, in_batched, v):
        return v * 2 + axis_size, in_batched[0]

    return jax.vmap(lambda v: counted(v))(block(x))


@program
def linear_solve_and_root(x):
    y = block(x).sum((1, 2))
    matrix = jnp.eye(4) * 3 + 0.1
    solved = lax.custom_linear_solve(lambda v: matrix @ v, y[0], lambda mv, b: jnp.linalg.solve(matrix, b),
                                     lambda mv, b: jnp.linalg.solve(matrix.T, b))
    root = lax.custom_root(lambda z: z**3 - jnp.abs(y[0, 0]) - 1, 1.0, lambda f, z: (jnp.abs(y[0, 0]) + 1) ** (1 / 3),
                           lambda g, b: b / g(1.0))
    return solved, root


# --- control flow


@program
def scan_over_images(x):
    def step(carry, image):
        return carry + image.sum(), block(image[None])[0] * carry

    return lax.scan(step, 0.5, x, reverse=True), lax.scan(step, 1.0, x, unroll=2)


@program
def while_with_closures(x):
    limit, w = block(x).sum() + 50, 2 * FILTERS
    return lax.while_loop(lambda s: (s[0] < 3) & (s[1].sum() < limit), lambda s: (s[0] + 1, block(s[1], w)), (0, x))


@program
def while_in_scan(x):
    def step(carry, _):
        return lax.while_loop(lambda v: v.sum() < 3, lambda v: block(v) + 1, carry), carry.sum()

    return lax.scan(step, x, length=2)


@program
def switch(x):
    branches = [block, jnp.sin, lambda v: halved_slope(v) + block(v)]
    return [lax.switch((x.sum() < 1e9) + i, branches, x) for i in (-1, 0, 1)]


@program
def checkpoints(x):
    policy = jax.checkpoint_policies.save_only_these_names("kept")
    named = jax.checkpoint(lambda v: block(checkpoint_name(jnp.sin(block(v)), "kept")), policy=policy)
    plain = jax.checkpoint(block, prevent_cse=False)
    return lax.scan(lambda carry, _: (named(carry), plain(carry).sum()), x, length=2)


@program
def nested_vmaps_with_collectives(x):
    def one(image):
        y = block(image[None])[0]
        return y - lax.pmean(y, "n") * lax.axis_index("n"), lax.psum(1, "n"), lax.all_gather(y.sum(), "n")

    inner = jax.vmap(lambda u: (one(u), lax.psum(u.sum(), ("m", "n"))), axis_name="n")
    return jax.vmap(inner, axis_name="m")(jnp.stack([x, 2 * x]))


@program
def shard_maps(x):
    def body(v):
        y = block(v)
        return y - lax.pmean(y.mean(), "d"), lax.psum(y.sum(), "d")

    batch = PartitionSpec("d")
    return jax.shard_map(body, mesh=mesh(), in_specs=batch, out_specs=(batch, PartitionSpec()))(x)


@program
def jits_with_placements(x):
    sharding = NamedSharding(mesh(), PartitionSpec("d"))
    constrained = lax.with_sharding_constraint(block(x), sharding)
    placed = jax.jit(block, in_shardings=sharding, out_shardings=sharding)(constrained)
    return jax.jit(lambda v: v * 2, donate_argnums=0)(placed) + jax.named_call(block, name="named")(x)


# --- effects


@program
def callback(x):
    y = block(x)
    return jax.pure_callback(lambda v: np.sin(v), jax.ShapeDtypeStruct(y.shape, y.dtype), y, vmap_method="expand_dims")


@program
def callback_with_effects(x):
    number = jax.ShapeDtypeStruct((), jnp.float32)
    return jax.experimental.io_callback(lambda v: np.float32(v) + 1, number, block(x).sum(), ordered=True)


# --- values of every kind


@program
def random_keys(x):
    a, b = jax.random.split(jax.random.key(3))
    old = jax.random.fold_in(jax.random.PRNGKey(4), 7)
    return block(x) * jax.random.bernoulli(a, 0.5, x.shape), jax.random.split(b, 3), old, jax.random.normal(b, (3,))


@program
def kinds_of_values(x):
    y = block(x)
    return {
        "int": (y > 0).sum(), "bool": y > 0, "zero size": jnp.concatenate([y[:0], x[:0]]),
        "complex": jnp.fft.fft(y, axis=1),
        "bf16": y.astype(jnp.bfloat16), "fp8": y.astype(jnp.float8_e4m3fn).view(jnp.uint8),
        "argmax": jnp.argmax(y, -1), "sorted": jnp.sort(y, -1),
        "constant": 2.5, "number": np.float32(1), "array": np.arange(3), "none": None, "argument": x,
        "twice": (x, y, y), "top": lax.top_k(y, 2),
    }


@program
def weak_types(x):
    weak = lax.while_loop(lambda c: c < 3.0, lambda c: c + 1.0, 0.0)
    half = jnp.asarray(1.5)
    numbers = half, lax.add(1.0, 2.0), 7, True, 1j
    return numbers, weak, block(x).sum() * 0 + 1, jnp.where(x.sum() > 0, 1.0, 2.0), weak * np.float32(2)


@program
def sparse_matrices(x):
    matrix = sparse.BCOO.fromdense(np.eye(4, dtype=np.float32) * 2, nse=4)
    return matrix @ block(x)[0, 0].T


@program
def barriers(x):
    y, z = lax.optimization_barrier((block(x), x))
    updated = lax.dynamic_update_slice(y, z[:1], (1, 0, 0, 0))
    return lax.reduce_precision(y, 8, 10) + lax.stop_gradient(z), y.at[0, 1].set(3.0), updated


@program
def higher_derivatives_inside(x):
    loss = lambda v: jnp.sum(jnp.sin(block(v)) ** 2)
    gradient, tangent = jax.jvp(jax.grad(loss), (x,), (jnp.cos(x),))
    value, pullback = jax.vjp(block, x)
    linear = jax.linearize(loss, x)[1]
    return gradient, tangent, pullback(value), linear(x)


@program
def constants_inside_jits_inside_bodies(x):
    def odd(v):
        return jax.jit(lambda u: block(u) * np.arange(4, dtype=np.float32))(v)

    sharded = jax.shard_map(odd, mesh=mesh(), in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d"))
    return lax.scan(lambda c, _: (odd(c), None), x, length=2)[0] + jax.checkpoint(odd)(x) + sharded(x)


def normalised(x, gamma=BIAS, check=True, over=None):
    """Batch norm with the statistics of each shard, and a convolution."""

    def body(v, gamma, beta):
        mean = v.mean((0, 1, 2))
        var = ((v - mean) ** 2).mean((0, 1, 2))
        return jax.nn.silu((v - mean) * lax.rsqrt(var + 1e-5) * gamma + beta), lax.pmean(mean, "d"), block(v)

    batch, same = PartitionSpec("d"), PartitionSpec()
    ins, outs = (batch, same, same), (batch, same, batch)
    return jax.shard_map(body, mesh=over or mesh(), in_specs=ins, out_specs=outs, check_vma=check)(x, gamma, BIAS + 1)


PROGRAMS |= dict(
    custom_jvp=lambda x: (doubled_slope(block(x)), jitted_inside(x)),
    custom_vjp=lambda x: halved_slope(block(x)) + clipped(0.25, x, lambda v: jnp.sin(v)),
    scan_without_xs=lambda x: lax.scan(lambda carry, _: (0.5 * block(carry), None), x, None, length=3)[0],
    fori_loop=lambda x: lax.fori_loop(0, 3, lambda i, v: block(v) * (i + 1), x),
    associative_scan_and_map=lambda x: (
        lax.associative_scan(jnp.add, block(x), axis=1), lax.map(lambda v: block(v[None]), x, batch_size=1)),
    batch_norm_in_shard_map=lambda x: (normalised(x), normalised(x, check=False), normalised(x, x.mean((0, 1, 2)))),
)
