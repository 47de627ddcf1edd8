"""python -m benchmarks.pages: the pictures of a report's page in docs/images/, of train steps of ResNet-50 and BERT-base.

The sites of ResNet-50 are measured, which takes some minutes of a machine for itself. Opens the pages in a headless Chromium, by
selenium.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from PIL import Image

import jaxfuse

from . import cost, models
from .browser import opened, picture, scrolled_to

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 1400
BLOCK, SITE = "ResNet50/Bottleneck_2", "bn+add+relu"  # shown open, chosen
Pictures = Iterator[tuple[str, Image.Image]]


def report(network: str, measure: bool = False) -> jaxfuse.FusionReport:
    """Of a train step at batch 8, with SGD and momentum; `measure` as `jaxfuse.explain` has it."""
    model, images = cost.NETWORKS[network]
    shapes = jax.eval_shape(model.init, jax.random.key(0), images)
    state = models.TrainState(shapes["params"], shapes.get("batch_stats", {}), shapes["params"])
    step, labels = models.make_train_step(model, lambda loss: loss), jax.ShapeDtypeStruct((8,), jnp.int32)
    return jaxfuse.explain(step, state, images, labels, measure=measure)


def resnet50(driver, found: jaxfuse.FusionReport) -> Pictures:
    """The whole from its beginning, a site chosen in the graph, the table of one block, and the memory."""
    yield "report.png", picture(driver)
    index = next(i for i, site in enumerate(found.sites) if site.pattern == SITE and BLOCK in site.module)
    driver.execute_script(f"document.querySelector('#rows tr[data-site=\"{index}\"]').click()")
    scrolled_to(driver, "program")
    yield "report-site.png", picture(driver)
    driver.find_element("css selector", "#detail .close").click()
    driver.find_element("id", "search").send_keys(BLOCK.split("/")[1] + "/")
    yield "report-sites.png", picture(scrolled_to(driver, "sites"))
    yield "report-memory.png", picture(scrolled_to(driver, "memory"))


def bert_base(driver, found: jaxfuse.FusionReport) -> Pictures:
    yield "report-bert.png", picture(driver)


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.pages", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="the folder (default: docs/images/)")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        for network, pictures, dark in (("resnet50", resnet50, False), ("bert-base", bert_base, True)):
            found, page = report(network, measure=network == "resnet50"), Path(folder) / f"{network}.html"
            found.save(page)
            print(f"{network}: {len(found.fused)} of {len(found.fused) + len(found.skipped)} sites fused")
            with opened(page, WIDTH, dark) as driver:
                for name, drawn in pictures(driver, found):
                    drawn.quantize(256).save(out / name, optimize=True)
                    print(f"{out / name} is written.")


if __name__ == "__main__":
    main()
