"""Counts what a ResNet-50 train step (Flax, bf16, batch 128) moves on an H200, unfused and fused; takes minutes, no GPU.

    JAX_PLATFORMS=cpu python tests/gpu/resnet50_step.py
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
from deviceless import bytes_moved, launches, specs

import jaxfuse
from benchmarks.models import ResNet50, TrainState, make_train_step
from jaxfuse import platforms


def main() -> None:
    model, images = ResNet50(jnp.bfloat16), jax.ShapeDtypeStruct((128, 224, 224, 3), jnp.bfloat16)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    state = TrainState(variables["params"], variables["batch_stats"], variables["params"])
    step = make_train_step(model, lambda loss: loss)
    arguments = specs((state, images, jax.ShapeDtypeStruct((128,), jnp.int32)))
    moved = {}
    with platforms.assumed("cuda"):
        for name, function in dict(unfused=step, fused=jaxfuse.fuse(step)).items():
            found = launches(function, *arguments)
            convolutions = [launch for launch in found if "conv" in launch.target]
            moved[name] = bytes_moved(found) - bytes_moved(convolutions)
            print(f"{name}: {len(found)} launches; convolutions {bytes_moved(convolutions) / 1e9:.1f} GB, "
                  f"all else {moved[name] / 1e9:.1f} GB", flush=True)
    print(f"{1 - moved['fused'] / moved['unfused']:.1%} fewer bytes outside of convolutions")


if __name__ == "__main__":
    main()
