"""Data parallel over processes, by jax.distributed: the same losses with 1, 2 and 4 of them. Then one is killed in the middle, and JAX
ends the job with an error. Here all are on this machine; on several, each starts the same program with the address of the first."""

import json
import os
import socket
import subprocess
import sys

COUNTS = (1, 2, 4)
BATCH = 32


def worker(address: str, count: int, rank: int, steps: int, dies: bool) -> None:
    """One process of the job: its part of every batch, and what is summed over all of them by JAX. `dies`: the last one does."""
    import jax

    jax.distributed.initialize(address, count, rank, heartbeat_timeout_seconds=10)
    import jax.numpy as jnp
    from common import batches, digits
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    import jaxfuse

    def loss_fn(params, images, labels):
        x = jax.lax.conv_general_dilated(images, params["w"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        logits = jax.nn.relu(x + params["b"]).mean((1, 2)) @ params["head"]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], -1).mean()

    @jaxfuse.fuse(policy="always")
    def step(params, images, labels):
        loss, gradients = jax.value_and_grad(loss_fn)(params, images, labels)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients), loss

    mesh = jax.make_mesh((jax.device_count(),), ("batch",), axis_types=(AxisType.Auto,))
    shared, whole = NamedSharding(mesh, PartitionSpec("batch")), NamedSharding(mesh, PartitionSpec())
    shapes = {"w": (5, 5, 1, 32), "b": (32,), "head": (32, 10)}
    params = {name: 0.2 * jax.random.normal(jax.random.key(i), shape) for i, (name, shape) in enumerate(shapes.items())}
    params = jax.tree.map(lambda p: jax.make_array_from_process_local_data(whole, p, p.shape), jax.device_get(params))
    mine = slice(rank * BATCH // count, (rank + 1) * BATCH // count)
    losses = []
    for i, batch in enumerate(batches(digits(), BATCH, steps)):
        if dies and rank == count - 1 and i == steps - 1:
            os._exit(1)  # as a machine that loses its power
        parts = [jax.make_array_from_process_local_data(shared, part[mine], part.shape) for part in batch]
        params, loss = step(params, *parts)
        losses.append(float(loss))
    report = jaxfuse.explain(step, params, *parts, policy="always") if count == 1 else None
    sites = [f"{site.pattern} ({site.direction})" for site in report.fused] if report else []
    print(json.dumps({"losses": losses, "sites": sites}))


def started(count: int, command: list[str], *arguments: str, cwd: str | None = None) -> list[subprocess.CompletedProcess]:
    """Runs `command address count rank arguments` in so many processes. Returns them when all have ended."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAXFUSE_RETAIN_MEMORY": "1"}
    processes = [subprocess.Popen([*command, address, str(count), str(rank), *arguments], cwd=cwd, env=environment,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for rank in range(count)]
    return [subprocess.CompletedProcess(p.args, p.wait(), out, err) for p in processes for out, err in [p.communicate(timeout=300)]]


def job(count: int, steps: int, dies: bool = False) -> list[subprocess.CompletedProcess]:
    """Trains with so many processes; with `dies` the last of them ends before the last step."""
    return started(count, [sys.executable, __file__, "--worker"], str(steps), str(int(dies)))


def main():
    if sys.argv[1:2] == ["--worker"]:
        address, *numbers = sys.argv[2:]
        return worker(address, *map(int, numbers))
    from common import arguments  # not in the workers, where JAX has to be started first

    steps, first = arguments(__doc__, steps=50).steps, None
    for count in COUNTS:
        done = job(count, steps)
        failed = [process for process in done if process.returncode]
        if failed:
            sys.exit(failed[0].stderr[-2000:])
        answer = json.loads(done[0].stdout.splitlines()[-1])
        first = first or answer
        apart = max(abs(a - b) for a, b in zip(answer["losses"], first["losses"]))
        print(f"{count} processes: losses {answer['losses'][0]:.6f} … {answer['losses'][-1]:.6f}, {apart:.1e} from those of one")
        if apart > 1e-5:
            sys.exit("the losses are NOT the same")
    print("fused: " + ", ".join(first["sites"]))
    survivor = job(2, steps, dies=True)[0]
    if survivor.returncode == 0:
        sys.exit("a process was killed, and the other one did NOT notice")
    error = next((line for line in survivor.stderr.splitlines() if line.startswith("jax.errors.")), None)
    if error is None:
        sys.exit(f"a process was killed, and the other one ended without an error of JAX's: {survivor.stderr[-2000:]}")
    print(f"one of 2 processes was killed; the other one ended with {error[:160]}")


if __name__ == "__main__":
    main()
