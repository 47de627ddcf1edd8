"""`fuse` in the place of `jax.jit`: its keyword arguments, its methods, its errors, pickling, and what is freed when."""

import copy
import dataclasses
import functools
import gc
import pathlib
import pickle
import re
import tomllib
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pjit import pjit
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxfuse
import layers
from layers import W, X

pytestmark = pytest.mark.usefixtures("some_kernel")


def conv(x, w=W):
    return jax.nn.relu(layers.conv(x, w))


@jaxfuse.fuse(policy="always", static_argnames="times")
def decorated(x, times=1):
    return conv(x) * times


by_name = jaxfuse.fuse(conv, policy="always")
close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)


def scaled(x, w, n):
    return conv(x, w)[..., :4] * n


class Plain:
    def __init__(self):
        self.w = W

    def step(self, x):
        self.w = self.w + 1
        return conv(x, self.w)


def kernels(text) -> int:
    return text.count("jaxfuse_conv")


MADE_OF_ANOTHER = {
    "grad": jax.grad, "value_and_grad": jax.value_and_grad, "vmap": jax.vmap, "jacrev": jax.jacrev, "hessian": jax.hessian,
    "checkpoint": jax.checkpoint, "wraps": lambda f: functools.wraps(f)(lambda x: 2 * f(x)), "partial": functools.partial,
    "shard_map": lambda f: jax.shard_map(
        f, mesh=jax.make_mesh((1,), "a", axis_types=(AxisType.Auto,)), in_specs=PartitionSpec(), out_specs=PartitionSpec()),
}


@pytest.mark.parametrize("compiled", [jax.jit, jaxfuse.fuse])
@pytest.mark.parametrize("made", MADE_OF_ANOTHER)
def test_what_is_made_of_a_jitted_function_is_not_taken_for_it(made, compiled):
    """It has the attributes of the jitted one, as `functools.wraps` gives them."""

    def of(compiled):
        return MADE_OF_ANOTHER[made](compiled(lambda x: jnp.sum(x**3)))

    jax.tree.map(close, jaxfuse.fuse(of(compiled))(jnp.arange(3.0)), of(lambda f: f)(jnp.arange(3.0)))


@pytest.mark.parametrize("options", [
    dict(static_argnums=2), dict(static_argnames="n"), dict(donate_argnums=0, static_argnames=("n",)),
    dict(donate_argnames="x", keep_unused=True), dict(inline=True), dict(compiler_options={"xla_cpu_enable_fast_math": False}),
    dict(out_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0])), {}], ids=lambda o: "+".join(o) or "none")
@pytest.mark.parametrize("of", ["fuse", "jit", "fuse of fuse"])
def test_options(options, of):
    """They are jit's, whether fuse is given them or the function was jitted with them."""
    fuse = functools.partial(jaxfuse.fuse, policy="always")
    fused = {"fuse": lambda: fuse(scaled, **options), "jit": lambda: fuse(jax.jit(scaled, **options)),
             "fuse of fuse": lambda: fuse(fuse(scaled, **options))}[of]()
    plain, given, same = jax.jit(scaled, **options), X + 0, X + 0
    close(fused(given, W, 3), plain(same, W, 3))
    assert given.is_deleted() == same.is_deleted()
    assert kernels(str(fused.trace(X, W, 3).jaxpr)) == 1
    infos = [[(a.donated, a.shape) for a in jax.tree.leaves(f.trace(X, W, 3).args_info)] for f in (fused, plain)]
    assert infos[0] == infos[1]


@pytest.mark.parametrize("wrong, right", [("polcy", "policy"), ("skp", "skip"), ("static_argname", "static_argnames")])
def test_a_misspelt_option(wrong, right):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{wrong}'") as raised:
        jaxfuse.fuse(scaled, **{wrong: "n"})
    assert f"jaxfuse.fuse: {wrong}; did you mean {right}?" in raised.value.__notes__


@pytest.mark.parametrize("where", ["fuse", "jit"])
def test_shardings(where):
    mesh = Mesh(np.array(jax.devices()[:1]), "d")
    options = dict(in_shardings=NamedSharding(mesh, PartitionSpec("d")), out_shardings=NamedSharding(mesh, PartitionSpec(None, "d")))
    fused = jaxfuse.fuse(conv, policy="always", **options) if where == "fuse" else jaxfuse.fuse(jax.jit(conv, **options), policy="always")
    y = fused(X)
    assert y.sharding.is_equivalent_to(options["out_shardings"], 4) and y.sharding.spec == PartitionSpec(None, "d")
    assert kernels(str(fused.trace(X).jaxpr)) == 1
    close(y, conv(X))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_pjit_has_its_partition_specs_from_the_mesh_around():
    with jax.make_mesh((1,), "a", axis_types=(AxisType.Auto,)):
        function = pjit(conv, in_shardings=PartitionSpec("a"))
        close(jaxfuse.fuse(function)(X), jax.jit(function)(X))


def test_a_traceback_leads_to_the_users_line():
    with pytest.raises(TypeError) as raised:
        jaxfuse.fuse(lambda x: x @ jnp.ones((3, 4)))(jnp.ones((2, 5)))
    files = [pathlib.Path(entry.path).name for entry in raised.traceback]
    assert files[:3] == ["test_jit.py", "jitted.py", "test_jit.py"]


def test_methods_of_jit():
    spec, fused = jax.ShapeDtypeStruct(X.shape, X.dtype), jaxfuse.fuse(conv, policy="always")
    assert isinstance(fused, jax.stages.Wrapped)
    assert "jaxfuse_conv" in fused.lower(spec).as_text() and "jit_conv" in fused.lower(spec).as_text()
    close(fused.lower(spec).compile()(X), conv(X))
    close(fused.trace(spec).lower().compile()(X), conv(X))
    close(jax.jit(fused).lower(spec).compile()(X), conv(X))
    assert fused.eval_shape(spec).shape == jax.eval_shape(fused, spec).shape == (2, 8, 8, 8)
    traces = []
    counted = jaxfuse.fuse(lambda x: (traces.append(1), conv(x))[1])
    for _ in range(2):
        counted(X)
    assert (len(traces), counted._cache_size()) == (1, 1)
    counted.clear_cache()
    assert counted._cache_size() == 0
    counted(X)
    assert len(traces) == 2
    assert fused.__wrapped__ is conv and fused.__name__ == "conv"


def test_decorators():
    @jaxfuse.fuse
    def one(x):
        return conv(x)

    assert kernels(str(decorated.trace(X, times=3).jaxpr)) == 1 and decorated.__name__ == "decorated"
    close(decorated(X, times=3), 3 * conv(X))
    close(one(X), conv(X))


def test_attributes_of_the_function():
    def named(x):
        return conv(x)

    named.note, named.options = "seen", 1
    fused = jaxfuse.fuse(named, policy="always")
    assert fused.note == "seen" and fused.__wrapped__ is named
    close(fused(X), conv(X))
    assert pickle.loads(pickle.dumps(jaxfuse.fuse(conv, keep_unused=True))).options == {"keep_unused": True}


def test_constants_reach_every_method():
    fused = jaxfuse.fuse(lambda x, mode: conv(x) if mode == "a" else -conv(x), policy="always")
    assert kernels(fused.lower(X, "b").as_text()) and fused.eval_shape(X, "a").shape == (2, 8, 8, 8)
    close(fused(X, "a"), conv(X))
    close(fused(X, "b"), -conv(X))
    assert fused._cache_size() == 2


def test_two_first_calls_at_once():
    """A call that finds out what the arguments are leaves others that began before it to go on."""
    @jax.tree_util.register_pytree_node_class
    class Meanwhile:
        calls = 1

        def tree_flatten(self):
            if Meanwhile.calls:
                Meanwhile.calls -= 1
                close(fused(X, "a", X), conv(X))
            return (X,), None

        @classmethod
        def tree_unflatten(cls, aux, children):
            return children[0]

    fused = jaxfuse.fuse(lambda x, mode, other: conv(x) if mode == "a" else -conv(x), policy="always")
    close(fused(X, "b", Meanwhile()), -conv(X))


@pytest.mark.parametrize("fn, args", [
    (lambda x, flag: conv(x) if flag else x, (X, True)), (lambda x, n: sum(conv(x) for _ in range(n)), (X, 3)),
    (lambda x: conv(x) if float(x.mean()) > 1 else x, (X,)), (lambda x, n: conv(x) * n, (X, 2**40)),
    (lambda x, s: conv(x), (X, {"set"})), (lambda x, s: conv(x), (X, np.array(["a"], object))), (lambda x, s: conv(x), (X, Plain())),
    (Plain.step, (Plain(), X)), (lambda x: conv(x) + jnp.ones(3), (X,))])
def test_raises_where_jit_raises(fn, args):
    raised = []
    for wrap in (jax.jit, jaxfuse.fuse):
        with pytest.raises(Exception) as caught:
            wrap(fn)(*args)
        raised.append((caught.type, re.sub("0x[0-9a-f]+", "", str(caught.value).splitlines()[0])))
    assert raised[0] == raised[1]


def test_a_method_whose_self_is_no_pytree_raises():
    class Mine(Plain):
        step = jaxfuse.fuse(Plain.step)

    model = Mine()
    with pytest.raises(TypeError, match="static_argnums"):
        model.step(X)
    assert model.w is W


def test_a_method_of_a_pytree():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Mine:
        w: jax.Array

        @jaxfuse.fuse(policy="always")
        def step(self, x):
            return conv(x, self.w)

    close(Mine(W).step(X), conv(X))
    close(Mine(2 * W).step(X), conv(X, 2 * W))
    assert kernels(str(Mine.step.trace(Mine(W), X).jaxpr)) == 1


def test_pickles():
    options = dict(policy="always", static_argnames="n", donate_argnums=0)
    for again in (pickle.loads(pickle.dumps(jaxfuse.fuse(scaled, **options))), copy.deepcopy(jaxfuse.fuse(scaled, **options))):
        x = X + 0
        close(again(x, W, n=2), scaled(X, W, 2))
        assert x.is_deleted() and kernels(str(again.trace(X, W, 2).jaxpr)) == 1
    assert pickle.loads(pickle.dumps(decorated)) is decorated and copy.deepcopy(decorated) is decorated
    assert pickle.loads(pickle.dumps(by_name)).__wrapped__ is conv


def test_cloudpickle():
    cloudpickle = pytest.importorskip("cloudpickle")
    times = 3.0
    again = pickle.loads(cloudpickle.dumps(jaxfuse.fuse(lambda x: conv(x) * times, policy="always")))
    close(again(X), 3 * conv(X))


@pytest.mark.parametrize("used", ["called", "differentiated", "lowered", "made"])
def test_freed_by_reference_counting(used):
    """The function, and the weights that it closes over, go when the last name of it goes."""
    class Weights:
        def __init__(self):
            self.w = W + 0

    def made():
        weights = Weights()
        return jaxfuse.fuse(lambda x: conv(x, weights.w).sum(), policy="always"), weakref.ref(weights)

    fused, fused_away = made()
    gc.collect()
    gc.disable()
    try:
        {"called": fused, "differentiated": jax.grad(fused), "lowered": fused.lower, "made": lambda x: None}[used](X)
        del fused
        assert fused_away() is None
    finally:
        gc.enable()


def test_nested_in_a_fused_function():
    inner = jaxfuse.fuse(scaled, policy="always", donate_argnums=0, static_argnames="n")
    report = jaxfuse.explain(lambda x: inner(x + 1, W, n=2), X, policy="always")
    assert [site.pattern for site in report.fused] == ["conv+relu"]


def test_programs_are_shared():
    """By two `fuse` of a function with the same policy, as by two `jax.jit`; by the calls within a larger function."""
    traced = []

    def counted(x):
        traced.append(x)
        return conv(x)

    close(jaxfuse.fuse(counted, policy="always")(X), conv(X))
    close(jaxfuse.fuse(counted, policy="always")(X), conv(X))
    assert len(traced) == 1
    close(jaxfuse.fuse(counted, policy="never")(X), conv(X))
    close(jaxfuse.fuse(counted, policy="always", inline=True)(X), conv(X))
    assert len(traced) == 2
    inner = jaxfuse.fuse(counted, policy="never")
    report = jaxfuse.explain(lambda x: inner(x) + inner(2 * x) + inner(x), X, policy="always")
    assert len(report.fused) == 3 and len(traced) == 3


def test_version():
    project = tomllib.loads((pathlib.Path(__file__).parent.parent / "pyproject.toml").read_text())
    assert jaxfuse.__version__ == project["project"]["version"]
