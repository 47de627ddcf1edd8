"""Checkpoints by orbax: what Flax's layers wrote, ours read, and the other way round."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jaxfuse.flax.linen as fused_linen
import jaxfuse.flax.nnx as fused_nnx
from flax_models import Net, X, close, equal

CELLS = ("LSTMCell", "OptimizedLSTMCell", "GRUCell")


def linen_variables(layers, seed):
    """{name: variables} of every layer, with random numbers for scales and biases too."""
    random = nn.initializers.normal(1.0)
    norms = dict(scale_init=random, bias_init=random)
    cells = {name: getattr(layers, name)(16, bias_init=random) for name in CELLS}
    modules = {
        "Conv": layers.Conv(16, (3, 3), bias_init=random), "ConvTranspose": layers.ConvTranspose(16, (3, 3), bias_init=random),
        "Dense": layers.Dense(16, bias_init=random), "BatchNorm": layers.BatchNorm(False, **norms),
        "LayerNorm": layers.LayerNorm(**norms), "RMSNorm": layers.RMSNorm(scale_init=random),
        "GroupNorm": layers.GroupNorm(3, **norms), **{f"RNN {name}": layers.RNN(cell) for name, cell in cells.items()}}
    made = {name: module.init(jax.random.key(seed), X[:1, 0] if "RNN" in name else X[:1]) for name, module in modules.items()}
    x, h = X[0, 0], jnp.zeros((16, 16))
    return made | {name: cell.init(jax.random.key(seed), (h, h) if "LSTM" in name else h, x) for name, cell in cells.items()}


def nnx_variables(layers, seed):
    random, rngs = nn.initializers.normal(1.0), nnx.Rngs(seed)
    norms = dict(scale_init=random, bias_init=random, rngs=rngs)
    cells = {name: getattr(layers, name)(3, 16, bias_init=random, rngs=rngs) for name in CELLS}
    modules = {
        "Conv": layers.Conv(3, 16, (3, 3), bias_init=random, rngs=rngs),
        "ConvTranspose": layers.ConvTranspose(3, 16, (3, 3), bias_init=random, rngs=rngs),
        "Linear": layers.Linear(3, 16, bias_init=random, rngs=rngs), "BatchNorm": layers.BatchNorm(16, **norms),
        "LayerNorm": layers.LayerNorm(16, **norms), "RMSNorm": layers.RMSNorm(16, scale_init=random, rngs=rngs),
        "GroupNorm": layers.GroupNorm(16, 4, **norms), **cells, **{f"RNN {name}": layers.RNN(cell) for name, cell in cells.items()}}
    return {name: nnx.state(module, nnx.Any(nnx.Param, nnx.BatchStat)) for name, module in modules.items()}


@pytest.mark.parametrize("variables, writer, reader", [
    (linen_variables, nn, fused_linen), (linen_variables, fused_linen, nn),
    (nnx_variables, nnx, fused_nnx), (nnx_variables, fused_nnx, nnx),
], ids=["linen to ours", "ours to linen", "nnx to ours", "ours to nnx"])
def test_checkpoints_of_every_layer_cross_load(tmp_path, variables, writer, reader):
    written, fresh = variables(writer, 4), variables(reader, 5)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", written)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", fresh)
    equal(restored, written)
    assert jax.tree.structure(restored) == jax.tree.structure(fresh)
    names = {layer.__name__ for layer in (fused_linen if variables is linen_variables else fused_nnx).layers.EXCHANGE.values()}
    assert {name.partition(" ")[0] for name in written} == names


@pytest.mark.parametrize("exchange", ["before", "after"])
def test_nnx_checkpoints_cross_load(tmp_path, exchange):
    written, read = Net(nnx.Rngs(1)), Net(nnx.Rngs(2))
    fused_nnx.replace(written if exchange == "before" else read)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.to_pure_dict(nnx.state(written, nnx.Param, nnx.BatchStat)[0]))
        checkpointer.wait_until_finished()
        state = nnx.state(read, nnx.Param, nnx.BatchStat)[0]
        nnx.replace_by_pure_dict(state, checkpointer.restore(tmp_path / "state", nnx.to_pure_dict(state)))
    nnx.update(read, state)
    for model in (written, read):
        model.eval()
    close(read(X), written(X), "f32")
