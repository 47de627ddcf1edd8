"""`fuse` of functions that change Flax nnx's objects: they train as by `nnx.jit`, whatever is mutable."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

optax = pytest.importorskip("optax")
nnx = pytest.importorskip("flax.nnx")

import jaxfuse  # noqa: E402

pytestmark = pytest.mark.usefixtures("some_kernel")
fuse = functools.partial(jaxfuse.fuse, policy="always")
X, Y = jax.random.normal(jax.random.key(0), (8, 8, 8, 3)), jnp.arange(8) % 4


class Calls(nnx.Variable):
    """A kind of variable of the user's own."""


class Network(nnx.Module):
    def __init__(self, seed: int = 0):
        rngs = nnx.Rngs(params=seed, dropout=seed + 1)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.head = nnx.Linear(3, 4, rngs=rngs)
        self.calls = Calls(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return self.head(self.dropout(nnx.relu(self.norm(x)).mean((1, 2))))


class Unregistered(nnx.Module, pytree=False):
    """That is no pytree, so that `jax.jit` takes it for an object."""

    def __init__(self):
        self.inner = Network()

    def __call__(self, x):
        return self.inner(x)


def gradient_step(model, optimizer, x, y):
    def loss_fn(model):
        logits = model(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), logits

    (loss, logits), gradients = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, gradients)
    return loss, logits


def with_metrics(model, optimizer, metrics, x, y):
    loss, logits = gradient_step(model, optimizer, x, y)
    metrics.update(loss=loss, logits=logits, labels=y)
    return loss


def in_containers(state, batch):
    loss, _ = gradient_step(state["models"][0], state["optimizer"], batch["x"], batch["y"])
    return {"loss": loss}


def twice(first, second, optimizer, x, y):
    assert first is second
    return gradient_step(second, optimizer, x, y)[0]


def making_variables(model, x):
    if not hasattr(model, "mean"):
        model.mean = nnx.BatchStat(jnp.zeros(()))
    model.mean[...] = 0.9 * model.mean[...] + model(x).mean()


class Remembering(nnx.Module):
    """With every kind of variable that a step may write: a cache, an intermediate, a perturbation."""

    def __init__(self):
        self.network = Network()
        self.seen = nnx.Cache(jnp.zeros((4, 4)))
        self.place = nnx.Cache(jnp.zeros((), jnp.int32))
        self.added = nnx.Perturbation(jnp.zeros((8, 4)))

    def __call__(self, x):
        y = self.network(x) + self.added[...]
        self.seen[...] = jax.lax.dynamic_update_slice(self.seen[...], y.mean(0)[None], (self.place[...], 0))
        self.place[...] = (self.place[...] + 1) % 4
        self.sow(nnx.Intermediate, "y", y)
        return y + self.seen[...].sum(0)


def remembering(model, optimizer, x, y):
    """The perturbation's gradient is that of what it is added to."""
    out = gradient_step(model, optimizer, x, y)
    loss = lambda model: optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()
    return out, nnx.grad(loss, argnums=nnx.DiffState(0, nnx.Perturbation))(model)


def popping(model, x):
    model(x)
    return nnx.pop(model, lambda path, variable: type(variable) is nnx.Intermediate)  # a perturbation is one too


def returning(model, x):
    model(x)
    other = nnx.Linear(4, 4, rngs=nnx.Rngs(3))
    return model, {"new": other, "same": model.head}


def of_adapters(model, optimizer, spread, x, y):
    """LoRA alone is trained, what it is added to stays; Welford's metric counts in integers."""
    loss_fn = lambda model: optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()
    loss, gradients = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
    optimizer.update(model, gradients)
    spread.update(values=loss)
    return spread.compute()


def of_a_variable(count, rngs, x):
    count[...] += 2
    return x + jax.random.uniform(rngs.noise(), x.shape)


def with_sgd(model, *rest):
    return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param), *rest


def metrics():
    return with_sgd(Network(), nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss")), X, Y)


def containers():
    model, optimizer = with_sgd(Network())
    return {"models": [model, Network(5)], "optimizer": optimizer}, {"x": X, "y": Y}


def shared():
    model, *rest = with_sgd(Network(), X, Y)
    return model, model, *rest


def adapted():
    model = Network()
    model.head = nnx.LoRALinear(3, 4, lora_rank=2, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.LoRAParam), nnx.metrics.Welford(), X, Y


STEPS = {"metrics": (with_metrics, metrics),
         "in containers": (in_containers, containers), "one module twice": (twice, shared),
         "cache, intermediate, perturbation": (remembering, lambda: with_sgd(Remembering(), X, Y)),
         "popped intermediates": (popping, lambda: (Remembering(), X)),
         "no pytree": (gradient_step, lambda: with_sgd(Unregistered(), X, Y)), "new variables": (making_variables, lambda: (Network(), X)),
         "returned modules": (returning, lambda: (Network(), X)),
         "LoRA, Welford's metric": (of_adapters, adapted),
         "a variable and rngs": (of_a_variable, lambda: (Calls(jnp.zeros(3)), nnx.Rngs(noise=4), X))}
WAYS = {"fuse": fuse, "fuse of nnx.jit": lambda f: fuse(nnx.jit(f)), "nnx.jit of fuse": lambda f: nnx.jit(fuse(f)),
        "donated": lambda f: fuse(f, donate_argnums=0)}


def after(wrap, step, arguments, times=2):
    """What the step returns and what it leaves in its arguments, as trees of arrays."""
    args, wrapped = arguments(), wrap(step)
    for _ in range(times):
        out = wrapped(*args)
    return nnx.state((out, args)), args


@functools.cache
def plainly(name):
    return after(nnx.jit, *STEPS[name])[0]


def close(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = map(jax.random.key_data, (a, b))
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name, way", [*((name, "fuse") for name in STEPS), *(("metrics", way) for way in WAYS if way != "fuse")])
def test_trains_as_by_nnx_jit(name, way):
    close(after(WAYS[way], *STEPS[name])[0], plainly(name))


def test_everything_moves():
    """And is fused: the test above compares what changes."""
    before, step, (now, optimizer, results, *data) = Network(), fuse(with_metrics), metrics()
    step(now, optimizer, results, *data)
    assert now.calls[...] == optimizer.step[...] == now.dropout.rngs.count[...] == 1 and results.accuracy.count[...] == 8
    assert not np.allclose(now.norm.mean[...], before.norm.mean[...])
    assert not np.allclose(now.head.kernel[...], before.head.kernel[...])
    assert "jaxfuse_batch_norm" in step.lower(now, optimizer, results, *data).as_text()
    assert "bn+relu" in {site.pattern for site in jaxfuse.explain(with_metrics, *metrics(), policy="always").fused}


def test_adapters_move():
    """And nothing else of what is learnt."""
    fused, (model, optimizer, spread, *data) = fuse(of_adapters), adapted()
    before = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))
    for _ in range(2):
        fused(model, optimizer, spread, *data)
    compared = jax.tree.map(lambda a, b: bool((a != b).any()), before, nnx.state(model, nnx.Param))
    moved = [jax.tree_util.keystr(path) for path, differs in jax.tree_util.tree_leaves_with_path(compared) if differs]
    assert len(moved) == 2 and all("lora" in name for name in moved) and spread.count[...] == 2


def test_objects_stay_the_same():
    traces = []

    def step(model, x):
        traces.append(1)
        return returning(model, x)

    model, fused = Network(), fuse(step)
    for _ in range(2):
        same, made = fused(model, X)
        assert same is model and made["same"] is model.head and isinstance(made["new"], nnx.Linear)
    assert len(traces) == 1


def test_a_method_of_a_module():
    class Counting(nnx.Module):
        def __init__(self):
            self.calls = Calls(jnp.zeros(()))

        @fuse
        def step(self, x):
            self.calls[...] += 1
            return x + self.calls[...]

    model = Counting()
    assert [float(model.step(1.0)) for _ in range(3)] == [2, 3, 4] and model.calls[...] == 3


def test_state_as_data_is_data():
    """Split by the user, it goes through `jax.jit` as ever."""
    graphdef, state = nnx.split(Network())

    def step(state, x):
        model = nnx.merge(graphdef, state)
        return model(x), nnx.state(model)

    (y, got), (plain, expected) = fuse(step)(state, X), jax.jit(step)(state, X)
    np.testing.assert_allclose(y, plain, atol=1e-4)
    close(got, expected)
    assert "jaxfuse_batch_norm" in fuse(step).lower(state, X).as_text()


def test_tree_mode():
    step, model = fuse(nnx.jit(lambda model, x: model(x), graph=False)), Network()
    step(model, X)
    assert model.calls[...] == 1 and type(model.calls[...]) is type(X)
