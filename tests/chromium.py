"""A headless Chromium that opens a file, by selenium."""

import contextlib
import importlib.util
import shutil

import pytest


def why_absent() -> str:
    """What is missing here to open a page; "" if nothing is."""
    missing = [name for name, there in (
        ("package selenium", importlib.util.find_spec("selenium")),
        ("program chromium", _browser()),
        ("program chromedriver", shutil.which("chromedriver")),
    ) if not there]
    return " and no ".join(missing)


@contextlib.contextmanager
def opened(path, width: int, dark: bool = False):
    """A driver that has opened the file in a window of this width; skips the test, naming what is missing, where it cannot."""
    if missing := why_absent():
        pytest.skip(f"this machine has no {missing}: the page is not opened")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = _browser()
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "host-resolver-rules=MAP * ~NOTFOUND"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [theme]})
    size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        driver.get(f"file://{path}")
        yield driver
    finally:
        driver.quit()


def _browser() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
