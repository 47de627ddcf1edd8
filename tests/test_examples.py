"""The examples in their short form, as a user starts them."""

import importlib
import os
import threading
import time

import numpy as np
import pytest

import jaxfuse
from processes import ROOT, printed_by

EXAMPLES = ROOT / "examples"
SAYS = {
    "distributed": "one of 2 processes was killed; the other one ended with jax.errors.JaxRuntimeError",
    "dp_sgd": "conv per sample (backward)",
    "equinox_data_parallel": "3 × conv (backward)",
    "haiku_scan": "bn+relu",
    "imagenet_style": "bn+relu",
    "keras_fit": "bn+relu",
    "linen_optax": "resumed from a checkpoint: bit for bit the same",
    "nnx_bf16": "exchanged: 16 layers",
    "serve": "convolutions took in their norms",
    "transformer_dropout": "attention+dropout (forward)",
    "unet_segmentation": "bn+relu",
}
NOT_COMPARED = {"distributed"}  # with the unfused program; its processes are compared with one
DEVICES = {"equinox_data_parallel": 2}  # which it asks for itself only where the environment has no flags


def test_every_example_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} - {"common"} == set(SAYS)


@pytest.mark.costly
@pytest.mark.parametrize("name", SAYS)
def test_example(name):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES.get(name, 1)}"
    text = " ".join(printed_by(EXAMPLES / f"{name}.py", "--quick", XLA_FLAGS=flags).split())
    assert SAYS[name] in text and "nothing" not in text and "conv" in text, text
    assert name in NOT_COMPARED or "unfused" in text, text
    assert name not in DEVICES or f"{DEVICES[name]} devices" in text, text


@pytest.fixture
def example(monkeypatch):
    """Imports one."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(jaxfuse, "retain_memory", lambda: True)  # this process has computed already
    return importlib.import_module


def test_a_batch_is_taken_when_its_step_begins(example):
    taken, seen = [], []

    def data():
        for i in range(3):
            taken.append(i)
            yield (np.float32(i),)

    def step(state, x):
        seen.append(len(taken))
        return state + x, x

    state, losses, _ = example("common").train("counting", step, 0, data(), 3)
    assert (state, losses, seen) == (3, [0, 1, 2], [1, 2, 3])


def test_threads_make_the_next_batches_and_no_more(example, monkeypatch):
    imagenet, before, made = example("imagenet_style"), set(threading.enumerate()), []
    augmented = imagenet.augmented
    monkeypatch.setattr(imagenet, "augmented", lambda *given: made.append(0) or augmented(*given))
    pipeline = imagenet.pipeline(1000)
    next(pipeline)
    ahead, limit = imagenet.BATCH * (1 + imagenet.AHEAD), time.monotonic() + 60
    while len(made) < ahead and time.monotonic() < limit:
        time.sleep(0.01)
    time.sleep(0.2)  # in which more would be made
    assert len(made) == ahead
    pipeline.close()
    assert len(made) == ahead and set(threading.enumerate()) <= before


def test_batches_of_threads_are_in_a_fixed_order(example):
    imagenet = example("imagenet_style")
    once, again = ([labels for _, labels in imagenet.pipeline(2 * imagenet.AHEAD)] for _ in range(2))
    assert np.array_equal(once, again) and len(once) == 2 * imagenet.AHEAD and not np.array_equal(once[0], once[1])
    assert len([*imagenet.pipeline(1)]) == 1


def test_an_error_in_a_thread_ends_the_training(example, monkeypatch):
    imagenet = example("imagenet_style")
    monkeypatch.setattr(imagenet, "augmented", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(imagenet.pipeline(3))
