"""Networks from other people's packages, small: every convolution and norm in a fused site, numbers as good as unfused.

The same at full size: `python -m benchmarks.coverage`.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfuse
from benchmarks.coverage import covered, layers, programs, reasons
from benchmarks.networks import NETWORKS
from compare import jit
from exact import in_float64

RESNET = {"conv+bn+relu": 5, "conv+bn": 2, "conv+bn+add+relu": 2, "max_pool": 1, "global_average_pool": 1}
EQUINOX = {"conv+bn+relu": 2, "conv+bn+add+relu": 1}
# name -> the fused sites in inference, and of the convolutions in the loss, whose norms then stand apart
SITES = {
    "keras ResNet50": ({"pad+conv+bn+relu": 1, "conv+bn+relu": 32, "conv+bn": 4, "conv+bn+add+relu": 16, "max_pool": 1,
                        "global_average_pool": 1}, {"pad+conv+bias": 1, "conv+bias": 52}),
    "keras MobileNet": ({"conv+bn+relu6": 23, "pad+conv+bn+relu6": 4, "conv+bias": 1, "global_average_pool": 1},
                        {"conv": 23, "pad+conv": 4, "conv+bias": 1}),
    "keras VGG16": ({"conv+bias+relu": 13, "max_pool": 5, "global_average_pool": 1}, {"conv+bias+relu": 13}),
    "keras InceptionV3": ({"conv+bn+relu": 94, "max_pool": 4, "global_average_pool": 1}, {"conv": 94}),
    "haiku ResNet18": ({"conv+bn+relu": 5, "conv+bn": 3, "conv+bn+add+relu": 4, "max_pool": 1, "global_average_pool": 1}, {"conv": 12}),
    "haiku MobileNetV1": ({"conv+bn+relu": 5, "global_average_pool": 1}, {"conv": 5}),
    "flax linen ResNet50": (RESNET, {"conv": 9}),
    "flax linen ResNet50 bf16": (RESNET, {"conv": 9}),
    "flax nnx ResNet50": (RESNET, {"conv": 9}),
    "flax nnx U-Net": ({"conv+bn+relu": 10, "conv+bias": 3, "max_pool": 2}, {"conv": 10, "conv+bias": 3}),
    "flax linen MLP-Mixer": ({"conv+bias": 1, "global_average_pool": 1}, {"conv+bias": 1}),
    "equinox CNN, ema": (EQUINOX, {"conv+bias": 2, "conv": 1}),
    "equinox CNN, batch": (EQUINOX, {"conv+bias": 2, "conv": 1}),
    "transformers ResNet": (
        {"transpose+conv+bn+relu": 1, "conv+bn+relu": 4, "conv+bn": 2, "conv+bn+add+relu": 2, "max_pool": 1},
        {"transpose+conv": 1, "conv": 8}),
    "transformers ViT": ({"transpose+conv+bias": 1}, {"transpose+conv+bias": 1}),
    "transformers BERT": ({}, {}),
}
OTHERS = {"dense", "dense+bias", "layer_norm", "matmul", "attention", "attention scores"}


def counted(sites, part: str) -> int:
    return sum(n for pattern, n in sites.items() if part in pattern)


def in_loss(name):
    """Batch norms with their residuals and activations, pools, and the convolutions alone."""
    inference, convolutions = SITES[name]
    apart = collections.Counter(convolutions)
    for pattern, n in inference.items():
        if "bn" in pattern or "conv" not in pattern:
            apart[pattern[pattern.find("bn") :] if "bn" in pattern else pattern] += n
    return apart


# convolutions and batch norms that the network has
LAYERS = {name: (counted(inference, "conv"), counted(inference, "bn")) for name, (inference, _) in SITES.items()}
SMALL_ENOUGH_TO_RUN = [name for name in NETWORKS if LAYERS[name][1] and LAYERS[name][0] < 50]

network = functools.cache(lambda name: NETWORKS[name](small=True))


@pytest.mark.parametrize("name", NETWORKS)
def test_every_convolution_and_batch_norm_is_fused(name):
    """In inference each with its norm, residual and activation; in the loss every batch norm with residual and activation;
    in the whole train step the same, and the gradient of each."""
    calls = programs(network(name))
    there = layers(*calls["inference"])
    assert (there["conv"], there["batch norm"]) == LAYERS[name]
    for call, expected in {"inference": SITES[name][0], "loss": in_loss(name), "train step": in_loss(name)}.items():
        function, args = calls[call]
        report = jaxfuse.explain(function, *args, policy="always")
        forward = [site.pattern for site in report.fused if site.direction == "forward" and not OTHERS & set(site.pattern.split("+"))]
        assert collections.Counter(forward) == expected
        backward = [site.pattern for site in report.fused if site.direction == "backward"]
        convolutions, norms = LAYERS[name] if call == "train step" else (0, 0)
        assert sum("conv" in pattern for pattern in backward) == convolutions
        assert sum(pattern.startswith("bn") for pattern in backward) == norms
        of_rows = there["layer norm"]
        assert covered(report, "layer norm") == of_rows
        assert covered(report, "attention") == there["attention"]  # BERT's with dropout, but in inference
        assert sum("attention" in pattern for pattern in backward) == there["attention"] * (call == "train step")
        assert sum("layer_norm" in pattern for pattern in backward) == of_rows * (call == "train step")
        unfused = {pattern for pattern, _ in reasons(report) if "conv" in pattern or "bn" in pattern}
        assert unfused <= {"conv+residual gradient", "conv+bias+add"}  # the additions alone: XLA's, or in a dense layer's site


def arguments(net, seed=0):
    """Parameters away from 0 and 1, variances away from 0, images and labels."""
    rng = np.random.default_rng(seed)

    def noisy(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(leaf)
        return jnp.asarray(leaf + 0.1 * np.abs(rng.standard_normal(leaf.shape)), leaf.dtype)

    params, state = jax.tree.map(noisy, jit(net.init)())
    x = jnp.asarray(rng.standard_normal(net.x.shape), net.x.dtype)
    return params, state, x, jnp.arange(x.shape[0], dtype=jnp.int32)


def error(tree, exact):
    """Root mean square over the leaves of each one's error, relative to the leaf; a leaf that is nearly zero beside the
    others (the gradient of a bias before a batch norm is rounding alone) relative to the others."""
    pairs = [(np.asarray(a, np.float64), np.asarray(e)) for a, e in zip(jax.tree.leaves(tree), jax.tree.leaves(exact))]
    sizes = [np.sqrt(np.mean(e**2)) for _, e in pairs]
    floor = 1e-3 * max(sizes)
    return np.sqrt(np.mean([np.mean((a - e) ** 2) / max(size, floor) ** 2 for (a, e), size in zip(pairs, sizes)]))


@pytest.mark.costly
@pytest.mark.parametrize("name", SMALL_ENOUGH_TO_RUN)
def test_inference_is_as_exact_as_unfused(name):
    net = network(name)
    *args, _ = arguments(net)
    exact = in_float64(net.apply, *args)
    fused, plain = [error(jit(f)(*args), exact) for f in (jaxfuse.fuse(net.apply, policy="always"), net.apply)]
    assert fused <= 2 * plain + 2e-7  # a few roundings of float32, where the unfused network happens to have fewer


@pytest.mark.costly
@pytest.mark.parametrize("name", SMALL_ENOUGH_TO_RUN)
def test_training_is_as_exact_as_unfused(name):
    """The loss, the running statistics and every gradient, by grad(fuse(loss)) and by fuse(train_step).
    In one of two draws: a gate whose input is zero but for rounding opens in one program and not in another. That was seen
    in 5 % of the draws of Keras' MobileNet, fused and unfused alike."""
    net = network(name)

    def step(loss):
        return lambda *args: jax.value_and_grad(loss, has_aux=True)(*args)

    through_loss, plain = jit(step(jaxfuse.fuse(net.loss, policy="always"))), jit(step(net.loss))
    whole = jit(jaxfuse.fuse(step(net.loss), policy="always"))

    def is_as_exact(seed):
        args = arguments(net, seed)
        exact, unfused = in_float64(step(net.loss), *args), plain(*args)
        return all(  # where a gradient is rounding alone, a bias's before a norm, one sum is as good as another
            error(run(*args)[part], exact[part]) <= 3 * error(unfused[part], exact[part]) + 2e-6
            for run in (through_loss, whole)
            for part in (0, 1)
        )

    assert is_as_exact(0) or is_as_exact(1)
