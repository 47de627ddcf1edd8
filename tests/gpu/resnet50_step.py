"""Counts what a ResNet-50 train step (Flax, bf16, batch 128) moves on an H200, unfused and fused; takes minutes, no GPU.
Fails if it is more than budgeted, or if the library is called another number of times.

    JAX_PLATFORMS=cpu python tests/gpu/resnet50_step.py
"""

import pathlib
import sys
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
from deviceless import bytes_moved, launches, specs

import jaxfuse
import stand_in
from benchmarks.models import ResNet50, TrainState, make_train_step
from jaxfuse.runtime import cuda, platforms

CALLS = {"fused, the CUDA library's calls": 4 * 39}  # of 53 batch norms; 5 are small, 9 computed along with a neighbour
LESS = {"fused, plain JAX": 0.2, "fused, the CUDA library's calls": 0.2}  # of the bytes outside of convolutions


def main() -> None:
    model, images = ResNet50(jnp.bfloat16), jax.ShapeDtypeStruct((128, 224, 224, 3), jnp.bfloat16)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    state = TrainState(variables["params"], variables["batch_stats"], variables["params"])
    step = make_train_step(model, lambda loss: loss)
    arguments = specs((state, images, jax.ShapeDtypeStruct((128,), jnp.int32)))
    programs = {"as written": (step, False), "fused, plain JAX": (jaxfuse.fuse(step), False),
                "fused, the CUDA library's calls": (jaxfuse.fuse(step), True)}
    written, missed = 0, []
    for name, (function, calls) in programs.items():
        found = _launches(function, arguments, calls)
        convolutions = [launch for launch in found if "conv" in launch.target]
        moved = bytes_moved(found) - bytes_moved(convolutions)
        written = written or moved
        less = 1 - moved / written
        called = sum(launch.target.startswith("jaxfuse_") for launch in found)
        print(f"{name}: {len(found)} launches, {called} of them calls; convolutions {bytes_moved(convolutions) / 1e9:.1f} GB, "
              f"all else {moved / 1e9:.1f} GB, {less:.1%} less", flush=True)
        missed += [name] * (less < LESS.get(name, 0) or called != CALLS.get(name, 0))
    if missed:
        sys.exit(f"beyond the budget: {', '.join(missed)}")


def _launches(function, arguments, calls: bool):
    """`calls`: as where the CUDA library is built."""
    if calls and (reason := stand_in.register()):
        sys.exit(reason)
    with platforms.assumed("cuda"), mock.patch.object(cuda, "unavailable", lambda target: None if calls else "not asked for"):
        jax.clear_caches()
        return launches(function, *arguments)


if __name__ == "__main__":
    main()
