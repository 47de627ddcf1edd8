"""A headless Chromium that opens a file, by selenium."""

import contextlib
import io
import shutil
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

HEIGHT = 1000


@contextlib.contextmanager
def opened(path: Path, width: int, dark: bool = False) -> Iterator:
    """A driver that has opened the file in a window of this width, without a network."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = program()
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "host-resolver-rules=MAP * ~NOTFOUND"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [theme]})
    size = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        driver.get(f"file://{path}")
        yield driver
    finally:
        driver.quit()


def program() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def picture(shown) -> Image.Image:
    """Of the window, if this is a driver, or of an element."""
    png = shown.get_screenshot_as_png() if hasattr(shown, "get_screenshot_as_png") else shown.screenshot_as_png
    return Image.open(io.BytesIO(png)).convert("RGB")


def scrolled_to(driver, name: str):
    """The element of this id, at the top of the window below the page's header, without a soft motion."""
    driver.execute_script("document.getElementById(arguments[0]).scrollIntoView({behavior: 'instant'})", name)
    return driver.find_element("id", name)
