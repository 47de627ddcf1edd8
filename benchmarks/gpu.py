"""Everything that has to be known from an NVIDIA GPU, by one command:

    python -m benchmarks.gpu [--only SECTION ..] [--json FILE]

predicted   what was expected before (gpu_programs.PREDICTED)   ceilings   copies, and bf16 products
correct     every program and dtype against float64, results in memory full of NaN, twice, bit for bit the same
micro       forward, and with gradients, at the shapes of ResNet-50 and of transformers: XLA, plain JAX, the kernels
convolutions   with what XLA does not fuse: XLA, cuDNN's plans (a minute of it goes into making them)
graphs      the same programs with and without CUDA graphs, by the wall's clock
blocks      a train step of two residual blocks                 resnet50   one of ResNet-50, batch 128, bfloat16
transformers   train steps of ViT-S/16, batch 256, and of BERT-base, 64 texts of 128 tokens, bfloat16

For XLA and the kernels an H200 took 4 seconds for ceilings, 64 for micro, 53 for resnet50 and 101 for transformers.

The result is a dated file in benchmarks/results/gpu/. Without a GPU it says what is missing, and ends with status 1.
"""

import argparse
import datetime
import functools
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

import jaxfuse
from jaxfuse.runtime import cuda, platforms

from . import gpu_measure as measure
from .gpu_convolutions import convolutions
from .gpu_programs import DIRECTIONS, PREDICTED, PROGRAMS, predictions, two_blocks

RESULTS = Path(__file__).parent / "results" / "gpu"
DTYPES = ("bfloat16", "float16", "float32")
LONGEST = 40  # kernels of a train step that a result names


def missing() -> list[str]:
    """Sentences: what this machine lacks. Empty: nothing."""
    if platforms.current() == "cuda":
        return []
    found = [f"JAX has no CUDA device; its default platform is {platforms.current()}"]
    if importlib.util.find_spec("jax_plugins") is None or not importlib.util.find_spec("jax_plugins.xla_cuda13"):
        found.append("the CUDA plugin of JAX is not installed; to install: python -m pip install 'jax[cuda13]'")
    if reason := cuda.unavailable("jaxfuse_batch_norm_stats"):
        found.append(f"the kernels: {reason}")
    return found


def peers() -> list[str]:
    return [p for p in measure.PEERS if p != "kernels" or cuda.unavailable("jaxfuse_batch_norm_stats") is None]


def fused(function, peer: str):
    return function if peer == "xla" else jaxfuse.fuse(function, policy="always")


def versions() -> dict:
    device = jax.devices()[0]
    names = ("jax", "jaxlib", "jaxfuse", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "nvidia-cuda-runtime")
    installed = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return dict(device=device.device_kind, client=device.client.platform_version, flags=os.environ.get("XLA_FLAGS", ""),
                versions={name: installed[name] for name in names if name in installed}, library=cuda.info())


def ceilings() -> dict:
    """Bytes a second of a copy (read and written), and operations a second of a bf16 product."""
    size, side = 1 << 28, 8192
    copy, _ = measure.profiled(lambda x: x * 2, lambda i: [jnp.full(size, i + 1, jnp.float32)])
    product, _ = measure.profiled(jnp.matmul, lambda i: list(jax.random.normal(jax.random.key(i), (2, side, side), jnp.bfloat16)))
    return {"copy bandwidth": 8 * size / copy.us * 1e6, "bf16 matmul": 2 * side**3 / product.us * 1e6}


def correct() -> list[dict]:
    rows = []
    for program in PROGRAMS:
        for dtype in DTYPES:
            for shape in (program.odd, program.shapes[-1]):
                rows += _correct(program, dtype, shape)
    return rows


def _correct(program, dtype, shape) -> list[dict]:
    arguments = program.arguments(shape, dtype)
    given = [jax.random.normal(jax.random.key(9), shape, dtype), *arguments]
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        exact = jax.jit(measure.value_and_gradients(program.function))(*[jnp.asarray(jax.device_get(a), jnp.float64) for a in given])
    rows, xla = [], None
    for peer in peers():
        with measure.peer(peer):
            run = jax.jit(measure.value_and_gradients(fused(program.function, peer)))
            results = []
            for _ in range(2):
                measure.poison(4 * sum(a.nbytes for a in given))
                results.append(jax.device_get(run(*given)))
        found = measure.errors(results[0], exact)
        xla = xla or found
        rows.append(dict(program=program.name, dtype=dtype, shape=shape, peer=peer, errors=found,
                         repeatable=measure.bitwise_equal(*results), wrong=measure.wrong(found, xla, dtype)))
    return rows


def micro() -> list[dict]:
    rows = []
    for program in PROGRAMS:
        for shape in program.shapes:
            for peer in peers():
                with measure.peer(peer):
                    rows += _micro(program, shape, peer)
            latest = rows[-len(DIRECTIONS) * len(peers()) :]
            print(program.name, shape, *(f"{r['peer']}, {r['direction']}: {r['us']:.1f} µs" for r in latest), sep="; ", flush=True)
    return rows


def _micro(program, shape, peer) -> list[dict]:
    """Forward as in inference, and the value with all gradients; microseconds of the kernels, and of each one."""
    function = fused(program.function, peer)
    rows = []
    for direction, run in zip(DIRECTIONS, (lambda ct, *arguments: function(*arguments), _apart(function))):
        found, kernels = measure.profiled(run, functools.partial(_arguments, program, shape))
        rows.append(dict(program=program.name, shape=shape, peer=peer, direction=direction, us=found.us, spread=found.spread,
                         kernels=kernels))
    return rows


def _arguments(program, shape, seed):
    return [jax.random.normal(jax.random.key(~seed), shape, jnp.bfloat16), *program.arguments(shape, jnp.bfloat16, seed)]


def _apart(function):
    """Value and gradients, the gradients' cotangent not known before the value is: as in a network."""
    def run(ct, *arguments):
        y, pullback = jax.vjp(function, *arguments)
        y, ct = jax.lax.optimization_barrier((y, ct))
        return y, *pullback(ct)

    return run


def graphs() -> list[dict]:
    """The smallest shapes with gradients, where launches count, in processes with and without XLA's command buffers."""
    rows = []
    for name, flag in dict(without="--xla_gpu_enable_command_buffer=", with_graphs="--xla_gpu_graph_min_graph_size=1").items():
        flags = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
        environment = os.environ | {"XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        code = "import json; from benchmarks import gpu; print(json.dumps(gpu.smallest()))"
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)
        if done.returncode:
            rows.append(dict(graphs=name, failed=done.stderr.strip().splitlines()[-1:]))
        else:
            rows += [dict(row, graphs=name) for row in json.loads(done.stdout.splitlines()[-1])]
    return rows


def smallest() -> list[dict]:
    rows = []
    for peer in peers():
        with measure.peer(peer):
            for program in PROGRAMS:
                shape = program.shapes[-1]
                found = measure.timed(_apart(fused(program.function, peer)), functools.partial(_arguments, program, shape), 0.3)
                rows.append(dict(program=program.name, shape=shape, peer=peer, us=found.us, spread=found.spread))
    return rows


def blocks() -> list[dict]:
    def step(x, weights, vectors):
        def loss(weights, vectors):
            return jnp.square(two_blocks(x, weights, vectors).astype(jnp.float32)).mean()

        return jax.value_and_grad(loss, (0, 1))(weights, vectors)

    def arguments(i):
        keys = jax.random.split(jax.random.key(i), 5)
        weights = [0.03 * jax.random.normal(k, (3, 3, 256, 256), jnp.bfloat16) for k in keys[:4]]
        return jax.random.normal(keys[4], (128, 28, 28, 256), jnp.bfloat16), weights, [jnp.ones(256), jnp.zeros(256)]

    return _steps(step, arguments)


def resnet50() -> list[dict]:
    from .models import ResNet50

    return _train_steps(ResNet50, (128, 224, 224, 3), _images)


def transformers() -> list[dict]:
    from .transformers_flax import BertBase, ViTS16

    return [*_train_steps(ViTS16, (256, 224, 224, 3), _images), *_train_steps(BertBase, (64, 128), _tokens)]


def _images(key, shape):
    return jax.random.normal(key, shape, jnp.bfloat16)


def _tokens(key, shape):
    return jax.random.randint(key, shape, 0, 30522)


def _train_steps(network, shape, inputs) -> list[dict]:
    from .models import TrainState, make_train_step, random_variables

    model = network(jnp.bfloat16)
    variables = random_variables(model, jax.eval_shape(lambda: inputs(jax.random.key(0), (1, *shape[1:]))))
    state = jax.device_put(TrainState(variables["params"], variables.get("batch_stats", {}), variables["params"]))

    def arguments(i):
        keys = jax.random.split(jax.random.key(i))
        return state, inputs(keys[0], shape), jax.random.randint(keys[1], shape[:1], 0, 1000)

    return [dict(network=network.__name__, **row) for row in _steps(make_train_step(model, lambda loss: loss), arguments)]


def _steps(step, arguments) -> list[dict]:
    """A whole train step, fused by policy "measured": what a user gets, by the wall's clock; and its kernels by the profiler."""
    rows = []
    for peer in peers():
        with measure.peer(peer):
            run = step if peer == "xla" else jaxfuse.fuse(step)
            found = measure.timed(run, arguments, 3.0)
            kernels, by_name = measure.profiled(run, arguments, runs=3)
            row = dict(peer=peer, us=found.us, spread=found.spread, kernels_us=kernels.us)
            print(row, flush=True)
            rows.append(row | dict(kernels=dict(list(by_name.items())[:LONGEST])))
    return rows


SECTIONS = dict(ceilings=ceilings, correct=correct, micro=micro, convolutions=convolutions, graphs=graphs, blocks=blocks,
                resnet50=resnet50, transformers=transformers)  # fmt: skip


def document(results: dict, machine: dict, date: str) -> dict:
    return dict(date=date, machine=machine, predicted=dict(PREDICTED, programs=predictions()), **results)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--json", type=Path, help="where the result goes (default: benchmarks/results/gpu/DATE-DEVICE.json)")
    arguments = parser.parse_args(argv)
    if sentences := missing():
        print("\n".join(["nothing was measured:", *sentences]), file=sys.stderr)
        return 1
    date, machine, results = datetime.date.today().isoformat(), versions(), {}
    path = arguments.json or RESULTS / f"{date}-{machine['device'].lower().replace(' ', '-')}.json"
    for name in arguments.only:
        start = time.perf_counter()
        try:
            results[name] = SECTIONS[name]()
        except Exception as error:  # the other sections are worth having
            results[name] = dict(failed=f"{type(error).__name__}: {error}")
        path.write_text(json.dumps(document(results, machine, date), indent=1) + "\n")  # what there is, after every section
        print(f"{name}: {time.perf_counter() - start:.0f} s; {path}", flush=True)
    rows = [row for found in results.values() if isinstance(found, list) for row in found]
    bad = [row for row in rows if row.get("wrong") or not row.get("repeatable", True) or "failed" in row]
    print(*bad, sep="\n")
    return 1 if bad or any("failed" in found for found in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
