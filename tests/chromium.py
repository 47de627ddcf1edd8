"""A headless Chromium that opens a page, and what the tests read of it."""

import contextlib
import importlib.util
import re
import shutil

import pytest

from benchmarks import browser


def why_absent() -> str:
    """Why no page can be opened here; "" if it can. A package can be installed with pip, so its want is not the machine's."""
    if not importlib.util.find_spec("selenium"):
        return "the package selenium, of the extra test, is not installed"
    missing = [name for name, there in (("chromium", browser.program()), ("chromedriver", shutil.which("chromedriver"))) if not there]
    return f"this machine has no program {' and no program '.join(missing)}" if missing else ""


def needed() -> None:
    """Skips the test, naming what is missing, where no page can be opened."""
    if why := why_absent():
        pytest.skip(f"{why}: the page is not opened")


@contextlib.contextmanager
def opened(path, width: int, dark: bool = False):
    """A driver that has opened the file in a window of this width."""
    needed()
    with browser.opened(path, width, dark) as driver:
        yield driver


def errors(driver) -> list:
    """What the page has complained of. A Chromium without a network complains of itself, elsewhere."""
    return [entry for entry in driver.get_log("browser") if entry["source"] != "network"]


def shown(driver) -> list[int]:
    """The numbers of the sites in the table."""
    return [int(row.get_attribute("data-site")) for row in driver.find_elements("css selector", "#rows tbody tr")]


def press(driver, found) -> None:
    """A click that needs no place on the screen."""
    driver.execute_script("arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true}))", found)


def hover(driver, found) -> None:
    """Moves the pointer onto the middle of an element."""
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(driver).move_to_element(found).perform()


def place(driver, found) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of an element in the window, as Pillow cuts."""
    sides = driver.execute_script("const r = arguments[0].getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]", found)
    return tuple(map(round, sides))


def colour(found, name: str) -> tuple[int, ...]:
    """What a property of the page's style gives an element: red, green, blue."""
    return tuple(map(int, re.findall(r"\d+", found.value_of_css_property(name))[:3]))


def colours(picture) -> list[tuple[int, ...]]:
    """Those of a picture, the most frequent first."""
    return [colour for _, colour in sorted(picture.getcolors(picture.width * picture.height), reverse=True)]
