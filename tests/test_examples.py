"""The examples in their short form, as a user starts them."""

import os

import pytest

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
    text = " ".join(printed_by(EXAMPLES / f"{name}.py", "--steps", "3", XLA_FLAGS=flags).split())
    assert SAYS[name] in text and "nothing" not in text and "conv" in text, text
    assert name in NOT_COMPARED or "unfused" in text, text
    assert name not in DEVICES or f"{DEVICES[name]} devices" in text, text
