"""What `fuse` does not rewrite survives: values and types, derivatives in every mode, rules, names, effects, errors."""

import functools
import itertools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals
from jax.experimental import checkify, io_callback

import jaxfuse
from jaxfuse.runtime import ffi
from compare import jit
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from programs import IMAGE, NO_FORWARD, NOT_DIFFERENTIABLE, PROGRAMS
from programs import block, doubled_slope, halved_slope, mesh, normalised
from processes import on_devices

fuse = functools.partial(jaxfuse.fuse, policy="always")
pytestmark = pytest.mark.usefixtures("some_kernel")


def loss(fn):
    """Over what is of floats."""
    return lambda x: sum(
        jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(fn(x)) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating))


def tangent(fn):
    return lambda x: jax.jvp(fn, (x,), (jnp.cos(x),))


TRANSFORMATIONS = {
    "nothing": lambda wrap, fn: wrap(fn),
    "vmap": lambda wrap, fn: jit(lambda x: jax.vmap(wrap(fn))(jnp.stack([x, 2 * x]))),
    "gradient of fused": lambda wrap, fn: jit(jax.grad(loss(wrap(fn)))),
    "fused gradient": lambda wrap, fn: wrap(jax.grad(loss(fn))),
    "forward mode": lambda wrap, fn: jit(tangent(wrap(fn))),
    "linearize": lambda wrap, fn: lambda x: jax.linearize(loss(wrap(fn)), x)[1](jnp.cos(x)),
    "forward over reverse": lambda wrap, fn: jit(tangent(jax.grad(loss(wrap(fn))))),
}
OF_VALUES = ("nothing", "vmap")
REFUSED = {(name, mode) for name in NO_FORWARD for mode in ("forward mode", "linearize", "forward over reverse")}
REFUSED = REFUSED - {("custom_gradient", "forward over reverse")} | {("callback_with_effects", "vmap")}


def same(got, expected, tolerance=5e-4):
    """The same trees of the same kinds of leaves, weak types included, and the same numbers."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
        assert type(a) is type(b) and a.dtype == b.dtype
        assert getattr(a, "weak_type", False) == getattr(b, "weak_type", False)
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = map(jax.random.key_data, (a, b))
        if a.dtype != jax.dtypes.float0:
            a, b = (np.asarray(v).astype(np.complex128) for v in (a, b))
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1, np.abs(b).max(initial=0)))


@pytest.mark.parametrize("name, transformation", [
    (name, transformation) for name in PROGRAMS for transformation in TRANSFORMATIONS
    if (name, transformation) not in REFUSED and (transformation in OF_VALUES or name not in NOT_DIFFERENTIABLE)])
def test_as_unfused(name, transformation):
    fn, transform = PROGRAMS[name], TRANSFORMATIONS[transformation]
    assert jaxfuse.explain(fn, IMAGE, policy="always").fused
    same(transform(fuse, fn)(IMAGE), transform(jax.jit, fn)(IMAGE))


@pytest.mark.parametrize("name, transformation", sorted(REFUSED))
def test_refused_as_unfused(name, transformation):
    messages = []
    for wrap in (jax.jit, fuse):
        with pytest.raises((TypeError, ValueError)) as raised:
            TRANSFORMATIONS[transformation](wrap, PROGRAMS[name])(IMAGE)
        messages.append((raised.type, str(raised.value)))
    assert messages[0] == messages[1]


def primitives(jaxpr):
    """Names of all primitives of the program, bodies included."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from primitives(inner)


KEPT = dict(custom_jvp_call=2, custom_vjp_call=1, sharding_constraint=1, name=1, optimization_barrier=1)


@pytest.mark.parametrize("name, count", KEPT.items())
def test_stays_in_the_program(name, count):
    def fn(x):
        y = doubled_slope(doubled_slope(block(x))) + halved_slope(x)
        y = lax.with_sharding_constraint(y, NamedSharding(mesh(), PartitionSpec("d")))
        return lax.optimization_barrier(checkpoint_name(y, "kept"))

    program = list(primitives(jax.make_jaxpr(fuse(fn))(IMAGE).jaxpr))
    assert program.count(name) == count + (name == "custom_jvp_call")  # and the relu inside of halved_slope
    assert program.count("jaxfuse_conv") == 1


def test_a_function_with_rules_of_its_own_is_reported():
    (site,) = jaxfuse.explain(halved_slope, IMAGE, policy="always").skipped
    assert site.reason == "it is inside a custom_vjp_call: a function with rules of its own stays as it is"


@pytest.mark.parametrize("of", [lambda f: f, lambda f: jax.grad(loss(f))], ids=["forward", "gradient"])
def test_names_are_in_the_lowered_program(of):
    def fn(x):
        with jax.named_scope("outer"):
            y = jax.jit(lambda v: jax.named_call(jnp.sin, name="inner")(block(v)))(x)
            return lax.scan(lambda c, _: (jax.named_scope("body")(jnp.cos)(c), None), y, length=2)[0]

    text = jax.jit(fuse(of(fn))).lower(IMAGE).as_text(debug_info=True)
    assert "outer" in text and "inner" in text and "body" in text and "jaxfuse" in text


@pytest.mark.parametrize("place", ["inside", "around"])
def test_checkpoint_policies_say_what_is_saved(place, capsys):
    """The named values are kept for the backward pass, and nothing else that is computed."""
    policy = jax.checkpoint_policies.save_only_these_names("kept")

    def fn(x):
        return block(checkpoint_name(jnp.sin(block(x)), "kept")).sum()

    wrapped = fuse(jax.checkpoint(fn, policy=policy)) if place == "inside" else jax.checkpoint(fuse(fn), policy=policy)
    plain = jax.checkpoint(fn, policy=policy)
    same(jax.jit(jax.grad(wrapped))(IMAGE), jax.jit(jax.grad(plain))(IMAGE))

    def saved(function):
        print_saved_residuals(function, IMAGE)
        lines = capsys.readouterr().out.splitlines()
        return sorted(line.split()[0] for line in lines if "constant" not in line and "literal" not in line)

    assert saved(wrapped) == ["f32[2,8,8,4]"] * 2  # the image, and what is named
    without = jax.checkpoint(fuse(fn), policy=jax.checkpoint_policies.nothing_saveable)
    assert saved(without) == ["f32[2,8,8,4]"]


def test_effects_come_in_their_order():
    def run(wrap):
        log = []

        def note(label, value):
            io_callback(lambda v: log.append((label, round(float(v), 2))), None, value, ordered=True)

        def fn(x):
            note("argument", x.sum())
            y = block(x)
            note("unused", jnp.sin(x).sum())

            def step(carry, _):
                note("loop", carry.sum())
                return 0.5 * block(carry), None

            z = jax.jit(lambda v: lax.scan(step, v, length=2)[0])(y)
            lax.cond(z.sum() > 0, lambda: note("yes", z.sum()), lambda: note("no", z.sum()))
            return z

        jax.block_until_ready(wrap(fn)(IMAGE))
        jax.effects_barrier()
        return log

    expected = run(jax.jit)
    assert len(expected) == 5
    got = run(fuse)
    assert [label for label, _ in got] == [label for label, _ in expected]
    np.testing.assert_allclose([v for _, v in got], [v for _, v in expected], atol=0.02)


def test_errors_are_those_of_the_unfused_function():
    class Mine(ValueError):
        pass

    broken = [True]

    def fn(x, rate):
        if broken[0]:
            raise Mine(f"shape {x.shape}")
        return block(x) * rate

    fused = fuse(fn)
    with pytest.raises(Mine, match=r"shape \(2, 8, 8, 4\)"):
        fused(IMAGE, 0.5)
    broken[0] = False
    same(fused(IMAGE, 0.5), jax.jit(fn)(IMAGE, 0.5))
    assert "jaxfuse_conv" in str(jax.make_jaxpr(fused)(IMAGE, 0.5))  # an error of the moment does not switch it off


def test_checkify():
    def fn(x):
        y = block(x)
        checkify.check(jnp.all(y < 0), "{n} values", n=(y > -1).sum())
        return jnp.log(-y)

    checks = checkify.user_checks | checkify.nan_checks

    def messages(fn):
        return [checkify.checkify(wrap(fn), checks)(IMAGE)[0].get().splitlines()[0] for wrap in (jax.jit, fuse)]

    assert [message.split(" (")[0] for message in messages(fn)] == ["512 values"] * 2
    unfused, fused = messages(lambda x: jnp.log(-block(x) - 1))
    assert "nan generated by primitive: log" in fused and fused == unfused


def test_hessian():
    w = 0.2 * jax.random.normal(jax.random.key(5), (1, 1, 4, 4))

    def fn(w):
        return jnp.sum(jnp.sin(jnp.tanh(block(IMAGE, w))) ** 2)

    for of in (jax.hessian, jax.jacfwd, lambda f: jax.jacrev(jax.jacfwd(f))):
        same(jit(of(fuse(fn)))(w), jit(of(fn))(w))


@pytest.mark.costly
def test_on_several_devices():
    assert on_devices(__file__) == "done\n"


def main():
    devices = jax.devices()
    assert len(devices) == 4
    x = jax.random.normal(jax.random.key(9), (8, 8, 8, 4))
    over_batch = NamedSharding(Mesh(np.array(devices), "d"), PartitionSpec("d"))
    kernels = not any(ffi.unavailable(target) for target in ffi.TARGETS)
    for check in (True, False):
        fn = functools.partial(normalised, check=check, over=over_batch.mesh)
        assert len(jaxfuse.explain(fn, x, policy="always").fused) == 2 * kernels
        for transform in (lambda f: f, lambda f: jax.jit(jax.grad(loss(f)))):
            same(transform(fuse(fn))(x), transform(jax.jit(fn))(x))
        same(fuse(jax.grad(loss(fn)))(x), jax.grad(loss(fn))(x))
    data_parallel_step(over_batch.mesh, x, kernels)
    for placed in (jax.device_put(x, devices[2]), jax.device_put(x, over_batch)):
        for fn in (block, lambda x: lax.with_sharding_constraint(block(jnp.sin(x)), over_batch)):
            if len(placed.devices()) == 4 or fn is block:
                got, expected = fuse(fn)(placed), jax.jit(fn)(placed)
                assert got.sharding.is_equivalent_to(expected.sharding, got.ndim)
                assert got.committed == expected.committed
                same(got, expected)


def data_parallel_step(mesh, x, kernels):
    """The gradient is taken inside of the shard_map, and averaged; the statistics too, or each shard has its own."""
    whole, same_everywhere = PartitionSpec("d"), PartitionSpec()
    w, gamma = 0.2 * jax.random.normal(jax.random.key(8), (3, 3, 4, 4)), jnp.linspace(0.5, 1.5, 4)

    def loss(w, gamma, x, synchronised):
        y = block(x, w)
        mean, squares = y.mean((0, 1, 2)), (y * y).mean((0, 1, 2))
        if synchronised:
            mean, squares = lax.pmean((mean, squares), "d")
        y = jax.nn.relu((y - mean) * lax.rsqrt(squares - mean * mean + 1e-5) * gamma + 0.1)
        return lax.pmean(jnp.sin(block(y, w)).mean(), "d")

    for check, synchronised in itertools.product((True, False), (True, False)):
        def step(w, gamma, x):
            def shard(w, gamma, x):
                return lax.pmean(jax.value_and_grad(loss, (0, 1))(w, gamma, x, synchronised), "d")

            return jax.shard_map(shard, mesh=mesh, in_specs=(same_everywhere, same_everywhere, whole), out_specs=same_everywhere,
                                 check_vma=check)(w, gamma, x)

        report = jaxfuse.explain(step, w, gamma, x, policy="always")
        assert sum(site.direction == "backward" for site in report.fused) == (2 if synchronised else 3) * kernels, report
        shared = [site.reason for site in report.skipped if site.pattern == "bn"]
        assert shared == ["its statistics are shared over the mesh axis 'd': no kernel yet on cpu"] * synchronised
        same(fuse(step)(w, gamma, x), jax.jit(step)(w, gamma, x))


if __name__ == "__main__":
    main()
    print("done")
