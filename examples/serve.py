"""A network that is trained, frozen, written to a file, and served over HTTP from that file: PNG images in, labels out. Then clients
on this machine ask it and the unfused network, and their waiting is compared."""

import concurrent.futures
import http.client
import http.server
import io
import json
import tempfile
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from common import arguments, batches, console, digits, train
from linen_optax import MODEL, start, step
from PIL import Image
from rich.table import Table

import jaxfuse

jaxfuse.retain_memory()  # before the first computation

CLIENTS, MOST_BYTES = 4, 1 << 20


def logits(variables, images):
    return MODEL.apply(variables, images, False)


def trained(data, steps: int):
    """The variables after so many steps."""
    fused = jaxfuse.fuse(step, donate_argnums=0)
    (params, stats, _), _, _ = train("training", fused, start(data[0]), batches(data, 64, steps), steps)
    return {"params": params, "batch_stats": stats}


def saved_and_loaded(variables, image):
    """The network from its file, as a server would have it that knows nothing of the model."""
    frozen = jaxfuse.freeze(logits, variables)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.jaxfuse"
        frozen.save(path, image)
        loaded = jaxfuse.load(path)
        console.print(f"{len(frozen.folds(image))} convolutions took in their norms; {path.name} has {path.stat().st_size / 1e6:.1f} MB")
    return loaded


def handler_of(network):
    """Answers a POST of a PNG with {"label": …, "probability": …}; what is no image gets 400."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # header and body are two packets: the second would wait 40 ms for an answer to the first

        def do_POST(self):
            try:
                length = int(self.headers["Content-Length"])
                if not 0 < length <= MOST_BYTES:
                    raise ValueError(f"{length} bytes, expected 1 to {MOST_BYTES}")
                image = Image.open(io.BytesIO(self.rfile.read(length))).convert("L").resize((16, 16))
            except (TypeError, ValueError, OSError) as error:
                return self.answer(400, {"error": f"not a PNG image: {error}"})
            probabilities = np.asarray(jax.nn.softmax(network(np.asarray(image, np.float32)[None, :, :, None] / 255)))[0]
            self.answer(200, {"label": int(probabilities.argmax()), "probability": round(float(probabilities.max()), 4)})

        def answer(self, status, content):
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    return Handler


def asked(port: int, images: list[bytes]) -> list[tuple[float, int]]:
    """(seconds, label) of each image, asked one after the other over one connection."""
    connection, answers = http.client.HTTPConnection("127.0.0.1", port, timeout=60), []
    for image in images:
        begin = time.perf_counter()
        connection.request("POST", "/", image)
        label = json.loads(connection.getresponse().read())["label"]
        answers.append((time.perf_counter() - begin, label))
    connection.close()
    return answers


def under_load(network, images: list[bytes]) -> tuple[np.ndarray, list[int], float]:
    """(seconds of each answer, its label, seconds of all) with some clients at once."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler_of(network))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    asked(server.server_port, images[:1])  # compiles
    begin = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as clients:
        parts = list(clients.map(lambda i: asked(server.server_port, images[i::CLIENTS]), range(CLIENTS)))
    seconds = time.perf_counter() - begin
    server.shutdown()
    server.server_close()
    answers = [answer for group in zip(*parts) for answer in group]
    return np.array([waited for waited, _ in answers]), [label for _, label in answers], seconds


def png(image) -> bytes:
    out = io.BytesIO()
    Image.fromarray((255 * image[:, :, 0]).astype(np.uint8)).save(out, "PNG")
    return out.getvalue()


def main():
    given, data = arguments(__doc__), digits()
    variables = trained(data, given.steps)
    count = CLIENTS * min(given.steps, 100)
    images, labels = [png(image) for image in data[0][:count]], data[1][:count]
    plain = jax.jit(logits)
    networks = {"unfused": lambda x: plain(variables, x), "frozen": saved_and_loaded(variables, jnp.zeros((1, 16, 16, 1)))}
    table = Table("", "p50 ms", "p99 ms", "answers/s", "right")
    for name, network in networks.items():
        waited, answers, seconds = under_load(network, images)
        p50, p99 = (1e3 * np.percentile(waited, q) for q in (50, 99))
        table.add_row(name, f"{p50:.2f}", f"{p99:.2f}", f"{count / seconds:.0f}", f"{np.mean(np.array(answers) == labels):.1%}")
    console.print(f"{count} images asked for by {CLIENTS} clients at once")
    console.print(table)


if __name__ == "__main__":
    main()
