"""Whole Flax models with their layers exchanged: the same parameters and numbers, the sites of a fused function."""

import contextlib
import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxfuse
import jaxfuse.flax.linen as fused_linen
import jaxfuse.flax.nnx as fused_nnx
from compare import jit
from flax_models import Net, Own, X, close, equal
from layers import SmallNet
from recognition import patterns_of

MESH = jax.make_mesh((1,), ("model",), (jax.sharding.AxisType.Auto,))


def linen_loss(model, params, state, x):
    y, updates = model.apply({"params": params, **state}, x, True, mutable=["batch_stats"])
    return jnp.sum(y**2), updates


def test_linen_model_made_in_compact_methods():
    flax, ours = SmallNet(), fused_linen.replace(SmallNet())
    variables = flax.init(jax.random.key(1), X, True)
    equal(variables, ours.init(jax.random.key(1), X, True))
    state = {"batch_stats": variables["batch_stats"]}
    theirs, mine = (jax.jit(jax.value_and_grad(functools.partial(linen_loss, m), has_aux=True))(variables["params"], state, X)
                    for m in (flax, ours))
    close(mine, theirs, "f32")
    loss = functools.partial(linen_loss, flax)
    assert patterns_of(jaxfuse.explain(functools.partial(linen_loss, ours), variables["params"], state, X)) == patterns_of(
        jaxfuse.explain(loss, variables["params"], state, X))
    assert isinstance(ours, SmallNet) and fused_linen.replace(ours).__class__ is ours.__class__


def test_linen_says_what_became_of_each_module():
    model = SmallNet()
    variables = model.init(jax.random.key(1), X, True)
    became = {e.path: e for e in fused_linen.exchanged(model, variables, X, False, policy="always")}
    assert became["Bottleneck_0/norm1"].now is fused_linen.BatchNorm
    assert became["Conv_0"].now is fused_linen.Conv and became["Conv_0"].reason == ""
    assert "no layer that has a drop-in" in became["Bottleneck_0"].reason
    never = {e.path: e for e in fused_linen.exchanged(model, variables, X, False, policy="never")}
    assert never["Conv_0"] == ("Conv_0", nn.Conv, nn.Conv, 'policy "never"')


class Coder(nn.Module):
    """Modules made in `setup`, one of them shared; several methods; random numbers."""

    features: int = 3
    activation: Callable = lambda x: nn.relu(x)  # a function that is no method

    def setup(self):
        # called twice; the gradient of a bias would be rounding alone, for a batch norm follows
        self.conv = nn.Conv(self.features, (3, 3), use_bias=False)
        self.norms = [nn.BatchNorm(use_running_average=False) for _ in range(2)]
        self.dropout = nn.Dropout(0.5, deterministic=False)

    def encode(self, x):
        for norm in self.norms:
            x = self.activation(norm(self.conv(x)))
        return self.dropout(x)

    def describe(self):
        return "a coder"

    def __call__(self, x):
        return self.encode(x) + self.encode(x)


def test_linen_modules_made_in_setup_shared_and_called_by_any_method():
    flax, ours, wide = Coder(), fused_linen.replace(Coder()), fused_linen.replace(Coder(64))
    keys = {"params": jax.random.key(1), "dropout": jax.random.key(2)}
    variables = jax.jit(flax.init)(keys, X)
    equal(variables, jax.jit(ours.init)(keys, X))

    def graded(model):
        def loss(variables):
            y, updates = model.apply(variables, X, method="encode", mutable=["batch_stats"], rngs=keys)
            return jnp.sum(jnp.sin(y)), (y, updates)

        return jax.grad(loss, has_aux=True)

    close(*jit(lambda variables: (graded(ours)(variables), graded(flax)(variables)))(variables), "f32")
    assert ours.apply(variables, method="describe") == "a coder"
    large = jax.ShapeDtypeStruct((8, 56, 56, 64), jnp.float32)  # where it is worth it
    for method in ("__call__", "encode"):
        run = functools.partial(wide.apply, method=method, mutable=["batch_stats"], rngs=keys)
        assert "jaxfuse_conv" in str(jax.make_jaxpr(run)(jax.eval_shape(wide.init, keys, large), large)), method
    became = [e.path for e in fused_linen.exchanged(flax, variables, X, mutable=["batch_stats"], rngs=keys) if e.was is nn.Conv]
    assert became == ["conv"]


def test_nnx_model_in_place_shared_layers_and_dropout():
    flax, ours = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    kernel = ours.stem.kernel
    assert fused_nnx.replace(ours) is ours and isinstance(ours, Net)
    assert ours.stem.kernel is kernel and ours.again is ours.layers[0]
    for _ in range(2):  # statistics and the dropout's count move on
        close(ours(X), flax(X), "f32")
    kept = nnx.Any(nnx.Param, nnx.BatchStat, nnx.RngCount)
    close(*[nnx.to_pure_dict(nnx.state(m, kept)) for m in (ours, flax)], "f32")
    for m in (flax, ours):
        m.eval()
    close(ours(X), flax(X), "f32")


def test_nnx_says_what_was_exchanged():
    became = {e.path: e for e in fused_nnx.exchanged(fused_nnx.replace(Net(nnx.Rngs(0))))}
    assert became["stem"][1:] == (nnx.Conv, fused_nnx.Conv, "")
    assert became["layers.1"].now is fused_nnx.BatchNorm
    assert became["own"].now is Own and "a subclass of BatchNorm, whose call may differ" in became["own"].reason
    assert "no layer that has a drop-in" in became["dropout"].reason


def test_nnx_report_is_that_of_the_function():
    model = Net(nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    plain = jaxfuse.explain(lambda state, x: nnx.merge(graphdef, state)(x), state, X, policy="always")
    assert patterns_of(fused_nnx.explain(fused_nnx.replace(model), X, policy="always")) == patterns_of(plain)


def test_nnx_trains_with_an_optimizer():
    optax = pytest.importorskip("optax")

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    losses = []
    for model in (Net(nnx.Rngs(0)), fused_nnx.replace(Net(nnx.Rngs(0)))):
        optimizer = nnx.Optimizer(model, optax.sgd(0.1, 0.9), wrt=nnx.Param)
        losses.append([float(step(model, optimizer, X)) for _ in range(4)])
    np.testing.assert_allclose(*losses, rtol=1e-4)


class Sowing(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 16, (3, 3), rngs=rngs)

    @fused_nnx.fused
    def __call__(self, x):
        y = nnx.relu(self.conv(x))
        self.sow(nnx.Intermediate, "y", y)
        return y


def test_nnx_method_that_makes_variables_runs_as_it_is():
    model = Sowing(nnx.Rngs(0))
    y = model(X)
    np.testing.assert_array_equal(jax.tree.leaves(nnx.state(model, nnx.Intermediate))[0], y)


def linen_over_batch(layers, x):
    norm = layers.BatchNorm(use_running_average=False, axis_name="batch")
    variables = norm.init(jax.random.key(0), x[0])
    return jax.vmap(lambda x: norm.apply(variables, x, mutable=["batch_stats"]), axis_name="batch")(x)


def nnx_over_batch(layers, x):
    graphdef, state = nnx.split(layers.BatchNorm(3, axis_name="batch", rngs=nnx.Rngs(0)))

    def one(x):
        norm = nnx.merge(graphdef, state, copy=True)
        return norm(x), nnx.to_pure_dict(nnx.state(norm))

    return jax.vmap(one, axis_name="batch")(x)


@pytest.mark.parametrize("over_batch, flax, ours", [(linen_over_batch, nn, fused_linen), (nnx_over_batch, nnx, fused_nnx)],
                         ids=["linen", "nnx"])
def test_batch_norm_over_a_named_axis(over_batch, flax, ours):
    def graded(layers):
        def loss(x):
            y, state = over_batch(layers, x)
            return jnp.sum(jnp.sin(y)), (y, state)

        return jax.jit(jax.grad(loss, has_aux=True))(X)

    close(graded(ours), graded(flax), "f32")


@pytest.mark.parametrize("boxed", [False, True], ids=["plain", "on a mesh"])
def test_linen_partitioning(boxed):
    """Metadata stays with parameters and gradients, and constrains them where a mesh is set."""
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, None, None, "model"))
    flax, ours = (layers.Conv(16, (3, 3), kernel_init=init) for layers in (nn, fused_linen))
    with jax.set_mesh(MESH) if boxed else contextlib.nullcontext():
        variables = flax.init(jax.random.key(0), X)
        assert nn.get_partition_spec(variables) == nn.get_partition_spec(ours.init(jax.random.key(0), X))
        theirs, mine = (jax.jit(jax.grad(lambda v, m=m: jnp.sum(jnp.sin(m.apply(v, X)))))(variables) for m in (flax, ours))
    assert nn.get_partition_spec(mine) == nn.get_partition_spec(theirs)
    close(nn.unbox(mine), nn.unbox(theirs), "f32")


def test_nnx_partitioning():
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, None, None, "model"))
    with jax.set_mesh(MESH):
        flax, ours, exchanged = (layers.Conv(3, 16, (3, 3), kernel_init=init, kernel_metadata={"mine": 1}, rngs=nnx.Rngs(0))
                                 for layers in (nnx, fused_nnx, nnx))
        layers = flax, ours, fused_nnx.replace(exchanged)
        grads = [nnx.jit(nnx.grad(lambda layer: jnp.sum(jnp.sin(layer(X)))))(layer) for layer in layers]
    for layer, grad in zip(layers[1:], grads[1:]):
        assert layer.kernel.get_metadata() == flax.kernel.get_metadata() and layer.kernel.get_metadata()["mine"] == 1
        assert grad["kernel"].get_metadata() == grads[0]["kernel"].get_metadata()
        assert nnx.get_partition_spec(nnx.state(layer)) == nnx.get_partition_spec(nnx.state(flax))
        close(nnx.to_pure_dict(grad), nnx.to_pure_dict(grads[0]), "f32")


@pytest.mark.parametrize("lift", [nn.remat, nn.jit], ids=["remat", "jit"])
def test_lifted_by_flax(lift):
    theirs, mine = lift(nn.Conv)(16, (3, 3)), lift(fused_linen.Conv)(16, (3, 3))
    variables = theirs.init(jax.random.key(0), X)
    equal(jax.tree.leaves(variables), jax.tree.leaves(mine.init(jax.random.key(0), X)))
    gradients = [jax.grad(lambda v, m=m: jnp.sum(m.apply(v, X) ** 2))(variables) for m in (mine, theirs)]
    close(*gradients, "f32")


def test_scanned_over_layers():
    stack = nn.scan(lambda block, x: (block(x), None), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
    x = jax.random.normal(jax.random.key(0), (2, 16, 16, 8))

    class Stack(nn.Module):
        layer: type

        @nn.compact
        def __call__(self, x):
            return stack(self.layer(8, (3, 3), name="block"), x)[0]

    variables = Stack(nn.Conv).init(jax.random.key(0), x)
    equal(variables, Stack(fused_linen.Conv).init(jax.random.key(0), x))
    close(Stack(fused_linen.Conv).apply(variables, x), Stack(nn.Conv).apply(variables, x), "f32")


BLOCKS = {"ConvNorm": (8, 16), "Residual": (8, 16), "Bottleneck": (8, 4), "InvertedResidual": (8, 8), "ConvNeXt": (8,),
          "MLP": (8, 32)}


@pytest.mark.costly
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_compute_what_they_say(name):
    """In both halves of Flax, with and without the policy's kernels, forward and backward."""
    x = jax.random.normal(jax.random.key(0), (2, 16, 16, 8))
    block = getattr(fused_linen, name)(*([BLOCKS[name][1]] if len(BLOCKS[name]) > 1 else []))
    train = {} if name in ("ConvNeXt", "MLP") else {"train": True}
    variables = block.init(jax.random.key(1), x, **train)
    state = {k: v for k, v in variables.items() if k != "params"}

    def loss(params, x):
        y = block.apply({"params": params, **state}, x, **train, mutable=["batch_stats"])[0]
        return jnp.vdot(y, jax.random.normal(jax.random.key(2), y.shape))

    plain = jaxfuse.fuse(jax.grad(loss, (0, 1)), policy="never")  # within it the layers are Flax's
    close(jax.grad(loss, (0, 1))(variables["params"], x), plain(variables["params"], x), "f32")
    model = getattr(fused_nnx, name)(*BLOCKS[name], rngs=nnx.Rngs(0))
    twin = nnx.clone(model)
    graphdef, states = nnx.split(twin)
    y = jaxfuse.fuse(lambda state, x: nnx.merge(graphdef, state)(x), policy="never")(states, x)
    close(model(x), y, "f32")


def test_errors_name_the_argument():
    with pytest.raises(TypeError, match="replace: module: got int, expected a flax.linen.Module"):
        fused_linen.replace(1)
    with pytest.raises(TypeError, match="replace: model: got Conv, expected a flax.nnx.Module"):
        fused_nnx.replace(nn.Conv(1, (1,)))
    bound = nn.Dense(3).bind(nn.Dense(3).init(jax.random.key(0), jnp.ones((1, 2))))
    with pytest.raises(ValueError, match="bound module, expected an unbound one"):
        fused_linen.replace(bound)
