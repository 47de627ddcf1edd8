"""python -m benchmarks.pages: the pictures of a report's page in docs/images/, of train steps of ResNet-50 and BERT-base.

Opens the pages in a headless Chromium, by selenium.
"""

import argparse
import contextlib
import io
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from PIL import Image

import jaxfuse

from . import cost, models

ROOT = Path(__file__).resolve().parent.parent
WIDTH, HEIGHT = 1400, 1000
BLOCK, SITE = "ResNet50/Bottleneck_2", "bn+add+relu"  # shown open, chosen


def report(network: str) -> jaxfuse.FusionReport:
    """Of a train step at batch 8, with SGD and momentum."""
    model, images = cost.NETWORKS[network]
    shapes = jax.eval_shape(model.init, jax.random.key(0), images)
    state = models.TrainState(shapes["params"], shapes.get("batch_stats", {}), shapes["params"])
    return jaxfuse.explain(models.make_train_step(model, lambda loss: loss), state, images, jax.ShapeDtypeStruct((8,), jnp.int32))


@contextlib.contextmanager
def browser(dark: bool) -> Iterator:
    """A driver whose window has the size of a picture."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "host-resolver-rules=MAP * ~NOTFOUND"):
        options.add_argument(f"--{argument}")
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [theme]})
    size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        yield driver
    finally:
        driver.quit()


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.pages", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="the folder (default: docs/images/)")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        for network, name, dark in (("resnet50", "report.png", False), ("bert-base", "report-bert.png", True)):
            found, page = report(network), Path(folder) / f"{network}.html"
            found.save(page)
            with browser(dark) as driver:
                driver.get(f"file://{page}")
                if network == "resnet50":
                    index = next(i for i, site in enumerate(found.sites) if site.pattern == SITE and BLOCK in site.module)
                    driver.execute_script(f"document.querySelector('#rows tr[data-site=\"{index}\"]').click()")
                picture = Image.open(io.BytesIO(driver.get_screenshot_as_png()))
            picture.convert("RGB").quantize(256).save(out / name, optimize=True)
            print(f"{out / name}: {len(found.fused)} of {len(found.fused) + len(found.skipped)} sites fused")


if __name__ == "__main__":
    main()
