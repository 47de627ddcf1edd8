"""The page as a user has it: of train steps with hundreds of sites, under the pointer, and with measured times."""

import re

import jax
import jax.numpy as jnp
import pytest

import chromium
import jaxfuse
from benchmarks import pages
from benchmarks.browser import HEIGHT, picture, scrolled_to
from chromium import errors, shown

WIDTH = 1400


@pytest.mark.costly
@pytest.mark.parametrize("network", ["resnet50", "bert-base"])
def test_the_page_of_a_train_step(network, some_kernel, tmp_path):
    chromium.needed()
    report = pages.report(network)
    assert len(report.fused) + len(report.skipped) > 190 and {site.direction for site in report.fused} == {"forward", "backward"}
    report.save(tmp_path / "report.html")
    with chromium.opened(tmp_path / "report.html", WIDTH) as driver:
        assert shown(driver) == list(range(len(report.sites)))
        number = filtered(report, driver)
        clicked(report, driver, number)
        zoomed(driver)
        hovered(report, driver)
        timeline(report, driver)
        assert not errors(driver)


def filtered(report, driver) -> int:
    """By words, a pattern and a direction together; gives the number of the site that is left first."""
    number, wanted = max(enumerate(report.fused), key=lambda numbered: numbered[1].bytes_saved)
    module = wanted.module.rsplit("/", 1)[0]
    driver.find_element("id", "search").send_keys(f"{module}/")
    driver.find_element("css selector", f'#pattern option[value="{wanted.pattern}"]').click()
    driver.find_element("xpath", f'//*[@id="direction"]/option[.="{wanted.direction}"]').click()
    found = [i for i, site in enumerate(report.sites)
             if f"{module}/" in site.module and (site.pattern, site.direction) == (wanted.pattern, wanted.direction)]
    assert shown(driver) == found and 0 < len(found) < 10
    assert driver.find_element("id", "count").text == f"{len(found)} of {len(report.sites)} sites"
    return number


def clicked(report, driver, number: int) -> None:
    """Its row shows what is known of it and its lines, and its box in the graph, of the colour of what is fused."""
    site, detail = report.sites[number], driver.find_element("id", "detail")
    scrolled_to(driver, "sites").find_element("css selector", f'tr[data-site="{number}"]').click()
    for word in (site.pattern, site.kernel, site.source, site.module, str(list(site.shapes[0])).replace(" ", "")):
        assert word in detail.text
    line = (pages.ROOT / site.source.rpartition(":")[0]).read_text().splitlines()[int(site.source.rpartition(":")[2]) - 1]
    assert driver.find_element("css selector", "#detail pre .here").text.strip() == line.strip()
    scrolled_to(driver, "program")
    box = driver.find_element("css selector", "#graph g.chosen")
    shot = picture(driver)
    assert shot.size == (WIDTH, HEIGHT) and len(chromium.colours(shot)) > 100
    colour = chromium.colour(driver.find_element("css selector", ".legend i.fused"), "background-color")
    assert box.get_attribute("data-site") == str(number) and chromium.colours(shot.crop(chromium.place(driver, box)))[0] == colour
    assert len(chromium.colours(shot.crop(chromium.place(driver, detail)))) > 50  # there is text in it
    detail.find_element("css selector", ".close").click()
    assert not detail.is_displayed() and not driver.find_elements("css selector", "#graph g.chosen")


def zoomed(driver) -> None:
    """By the buttons, and by the wheel about the pointer; "Fit" shows all again."""
    def scale():
        return float(re.search(r"scale\((.*)\)", driver.find_element("css selector", "#graph svg > g").get_attribute("transform"))[1])

    driver.find_element("id", "fit").click()
    fitting = scale()
    for name, factor in (("in", 1.3), ("out", 1), ("out", 1 / 1.3)):
        driver.find_element("id", name).click()
        assert scale() == pytest.approx(factor * fitting)
    driver.find_element("id", "fit").click()
    box = driver.find_element("css selector", "#graph .box.closed")
    left, top, right, bottom = chromium.place(driver, box)
    wheel = dict(type="mouseWheel", x=(left + right) / 2, y=(top + bottom) / 2, deltaX=0, deltaY=-120, modifiers=2)  # Ctrl
    driver.execute_cdp_cmd("Input.dispatchMouseEvent", wheel)
    x0, y0, x1, y1 = chromium.place(driver, box)
    assert scale() > 1.2 * fitting and x1 - x0 == pytest.approx((right - left) * scale() / fitting, abs=2)
    assert (x0 + x1, y0 + y1) == pytest.approx((left + right, top + bottom), abs=4)
    driver.find_element("id", "fit").click()
    assert scale() == fitting


def hovered(report, driver) -> None:
    """A fused site says its kernel, one that is left its reason, a module how many equations it has."""
    tip = driver.find_element("id", "tip")
    for name in ("less", "out"):  # so that all of it is seen
        driver.find_element("id", name).click()
    for state in ("fused", "skipped", "group.closed"):
        box = driver.find_element("css selector", f"#graph .box.{state}")
        chromium.hover(driver, box)
        assert tip.is_displayed()
        if state == "group.closed":
            assert tip.text.startswith(box.get_attribute("data-box")) and "equation" in tip.text
        else:
            site = report.sites[int(box.get_attribute("data-site"))]
            words = (site.pattern, site.direction, site.kernel or site.reason, *site.operands.split(), site.source)
            assert [word for word in words if word not in tip.text] == []
    chromium.hover(driver, driver.find_element("css selector", "#program h2"))
    assert not tip.is_displayed()


def timeline(report, driver) -> None:
    """Both curves are as high as their peaks; the pointer is told the bytes where it is, and a click shows the equation."""
    memory = report.program.memory
    area = scrolled_to(driver, "memory").find_element("css selector", "#timeline svg")
    heights = {}
    for name in ("before", "after"):
        path = area.find_element("css selector", f"path.{name}").get_attribute("d")
        points = [tuple(map(float, point)) for point in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)]
        assert len(points) > 1000
        heights[name] = float(area.find_element("css selector", ".grid").get_attribute("y1")) - min(y for _, y in points)
    before, after = max(memory.before), max(memory.after)
    assert after < before and heights["after"] / heights["before"] == pytest.approx(after / before, rel=0.005)
    assert [text.text for text in area.find_elements("css selector", "text")][-3:] == ["forward", "backward", "update"]
    strokes = {chromium.colour(area.find_element("css selector", f"path.{name}"), "stroke") for name in heights}
    assert len(strokes) == 2 and strokes <= set(chromium.colours(picture(driver).crop(chromium.place(driver, area))))
    chromium.hover(driver, area)
    said = driver.find_element("id", "tip").text
    at = [str(i) for i, e in enumerate(report.program.equations) if said.startswith(f"{e.primitive} · {e.source}\n")
          and said.endswith(f"as written {size(memory.before[i])} · fused {size(memory.after[i])}")]
    assert at
    area.click()
    assert {*re.findall(r"· equation (\d+)", driver.find_element("id", "detail").text)} & {*at}


def size(number: float) -> str:
    """As the page writes bytes."""
    power = min(3, len(str(int(number))) // 3 - (len(str(int(number))) % 3 == 0))
    number /= 1000**power
    return f"{number:.{int(power > 0 and number < 100)}f} {('B', 'KB', 'MB', 'GB')[power]}"


def loss(x, w, b, head):
    x = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.log_softmax(jax.nn.relu(x + b).mean((1, 2)) @ head).sum()


def milliseconds(time: float | None) -> str:
    """As the page writes them."""
    return "–" if time is None else f"{time:.{0 if time >= 100 else 2 if time >= 1 else 3}f}"


def test_measured_times_are_shown(tmp_path):
    arguments = jnp.ones((2, 16, 16, 8)), jnp.ones((3, 3, 8, 16)), jnp.zeros(16), jnp.zeros((16, 10))
    report = jaxfuse.explain(jax.grad(loss, (0, 1, 2, 3)), *arguments, policy="always", measure=True)
    assert all(site.times for site in report.sites) and any(site.times.unfused for site in report.sites)
    report.save(tmp_path / "report.html")
    with chromium.opened(tmp_path / "report.html", WIDTH) as driver:
        heads = driver.find_elements("css selector", "#rows th")
        assert [head.text for head in heads[-2:]] == ["ms unfused", "ms fused"]
        rows = driver.find_elements("css selector", "#rows tbody tr")
        for site, row in zip(report.sites, rows, strict=True):
            cells = [cell.text for cell in row.find_elements("css selector", "td")[-2:]]
            assert cells == [milliseconds(site.times.unfused), milliseconds(site.times.fused)]
        heads[-2].click()
        times = [report.sites[i].times.unfused or -1 for i in shown(driver)]
        assert times == sorted(times, reverse=True) and "each site's own program" in driver.find_element("id", "measured").text
        number = shown(driver)[0]
        driver.find_element("css selector", f'tr[data-site="{number}"]').click()
        assert f"unfused\n{milliseconds(times[0])} ms alone" in driver.find_element("id", "detail").text
        assert not errors(driver)
