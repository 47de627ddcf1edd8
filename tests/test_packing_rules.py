"""When `freeze` packs a weight under policy "measured": what each instruction set was measured to be faster with."""

import jax
import jax.numpy as jnp
import pytest

from jaxfuse.ops.activations import Activation
from jaxfuse.ops.conv.config import ConvConfig
from jaxfuse.tuning import policy, tuned
from jaxfuse.tuning.rules import packed
from jaxfuse.tuning.rules.packed import Packing

pytestmark = pytest.mark.whole
NHWC = (0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2)
AVX2, ZEN5, OTHER = ("avx2", "avx2"), ("avx512", "avx512_core_bf16"), ("portable", "sse41")
AMX = "avx512", "avx512_core_amx"  # of oneDNN, and of our own loops
ONEDNNS_AMX = "avx512, as JAXFUSE_SIMD has it", "avx512_core_amx"
RELU, SILU = Activation("relu"), Activation("silu")


@pytest.fixture
def with_isa(monkeypatch):
    def choose(isa):
        monkeypatch.setattr(tuned, "isa", lambda: isa)
        monkeypatch.setattr(tuned, "multiplies_matrices", lambda: isa == AMX)

    return choose


def layout(size, inputs, outputs, kernel=1, stride=1, batch=1, dtype=jnp.float32):
    config = ConvConfig((stride, stride), ((kernel // 2,) * 2,) * 2, (1, 1), 1, *NHWC, (1, 1))
    x = jax.ShapeDtypeStruct((batch, size, size, inputs), dtype)
    return policy.packing("measured", config, x, jax.ShapeDtypeStruct((kernel, kernel, inputs, outputs), dtype), is_dense=False)


@pytest.mark.parametrize("layer, wanted", [
    (dict(size=14, inputs=64, outputs=384), Packing.direct),
    (dict(size=28, inputs=512, outputs=1024, stride=2), Packing.direct),
    (dict(size=28, inputs=128, outputs=512), Packing.direct),
    (dict(size=28, inputs=512, outputs=128), Packing.direct),
    (dict(size=56, inputs=256, outputs=64), Packing.direct),
    (dict(size=56, inputs=144, outputs=24), Packing.direct),
    (dict(size=56, inputs=144, outputs=16), Packing.direct),
    (dict(size=56, inputs=144, outputs=12), Packing.none),  # less than half a tile of features
    (dict(size=14, inputs=40, outputs=240), Packing.none),  # a short sum
    (dict(size=56, inputs=64, outputs=256), Packing.direct),
    (dict(size=56, inputs=64, outputs=256, batch=8), Packing.direct),
    (dict(size=224, inputs=3, outputs=64, kernel=7, stride=2), Packing.none),
    (dict(size=7, inputs=512, outputs=2048, batch=8), Packing.direct),
    (dict(size=14, inputs=256, outputs=1024, batch=8), Packing.direct),
    (dict(size=28, inputs=128, outputs=512, batch=8), Packing.direct),
    (dict(size=56, inputs=64, outputs=64, kernel=3), Packing.winograd),
    (dict(size=14, inputs=64, outputs=384, dtype=jnp.bfloat16), Packing.none)])
def test_convolutions_with_avx2(with_isa, layer, wanted):
    with_isa(AVX2)
    assert layout(**layer) is wanted


@pytest.mark.parametrize("layer, with_onednns, with_ours", [
    (dict(size=7, inputs=512, outputs=512), Packing.direct, Packing.direct),
    (dict(size=7, inputs=512, outputs=512, dtype=jnp.bfloat16), Packing.none, Packing.direct),
    (dict(size=14, inputs=96, outputs=576, dtype=jnp.bfloat16), Packing.none, Packing.none),  # a short sum
    (dict(size=56, inputs=64, outputs=64, kernel=3, dtype=jnp.bfloat16), Packing.none, Packing.direct),
    (dict(size=1, inputs=48, outputs=8, dtype=jnp.bfloat16), Packing.none, Packing.direct)])
def test_convolutions_with_amx(with_isa, layer, with_onednns, with_ours):
    """In bf16 no loops of vectors are as fast as oneDNN there."""
    with_isa(ONEDNNS_AMX)
    assert layout(**layer) is with_onednns
    with_isa(AMX)
    assert layout(**layer) is with_ours


@pytest.mark.parametrize("isa, activation, widths", [
    (AVX2, RELU, {7: False, 14: False, 28: True}), (AVX2, SILU, {6: False, 7: True}), (ZEN5, RELU, {7: True}),
    (OTHER, SILU, {56: False})])
def test_expansions(with_isa, isa, activation, widths):
    with_isa(isa)
    images = {width: jax.ShapeDtypeStruct((1, width, width, 32), jnp.float32) for width in widths}
    assert {width: policy.expands("measured", x, activation) for width, x in images.items()} == widths


@pytest.mark.parametrize("isa, expands", [(ZEN5, True), (AMX, False), (ONEDNNS_AMX, False)])
def test_expansions_in_bf16(with_isa, isa, expands):
    with_isa(isa)
    assert policy.expands("measured", jax.ShapeDtypeStruct((1, 14, 14, 32), jnp.bfloat16), SILU) == expands


@pytest.mark.parametrize("isa, dtype, rows", [
    (AVX2, jnp.float32, {1: True, 8: True, 9: False}), (AVX2, jnp.bfloat16, {1: False}), (ZEN5, jnp.float32, {2000: True}),
    (AMX, jnp.float32, {2000: True}), (AMX, jnp.bfloat16, {1: True, 2000: True}),
    (ONEDNNS_AMX, jnp.bfloat16, {1: False}), (OTHER, jnp.float32, {1: False})])
def test_dense_layers_that_inference_leaves_to_xla_elsewhere(with_isa, isa, dtype, rows):
    with_isa(isa)
    assert {n: packed.wins_packed(dtype, n) for n in rows} == rows


@pytest.mark.parametrize("isa, dtype, takes", [
    (AVX2, jnp.float32, True), (AVX2, jnp.bfloat16, False), (ZEN5, jnp.bfloat16, True), (AMX, jnp.float32, True),
    (AMX, jnp.bfloat16, True), (ONEDNNS_AMX, jnp.bfloat16, False), (OTHER, jnp.float32, False)])
def test_gates(with_isa, isa, dtype, takes):
    with_isa(isa)
    assert policy.takes_gates("measured", dtype) == takes
