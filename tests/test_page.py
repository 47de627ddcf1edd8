"""The page of a report: it stands alone, shows text as text, and works in a browser."""

import json
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import chromium
import jaxfuse
from benchmarks.browser import picture, scrolled_to
from chromium import errors, shown
from jaxfuse.commands.demo.network import Residual
from jaxfuse.report import FusionReport, Site
from jaxfuse.report.page import _data, code


class SmallResNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(8, (3, 3))(x))
        for features, strides in ((8, 1), (16, 2)):
            x = Residual(features, strides)(x, True)
        return nn.Dense(10)(x.mean((1, 2)))


@pytest.fixture(scope="module")
def report():
    model, images, labels = SmallResNet(), jnp.ones((4, 32, 32, 3)), jnp.zeros(4, int)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)

    def train_step(params, statistics, images, labels):
        def loss(params):
            logits, _ = model.apply({"params": params, "batch_stats": statistics}, images, mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        gradient = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

    return jaxfuse.explain(train_step, variables["params"], variables["batch_stats"], images, labels, policy="always", measure=False)


@pytest.fixture(scope="module")
def page(report, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    report.save(path)
    return path


@pytest.fixture(scope="module")
def browser(page):
    with chromium.opened(page, 1400) as driver:
        yield driver


def test_the_page_stands_alone(page):
    text = page.read_text()
    assert not re.search('(src|href)="(?!data:|#)', text)
    assert "@import" not in text and "url(" not in text.split("<script")[0]
    assert "default-src 'none'" in text and len(text) < 400_000
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)


def test_it_has_the_lines_of_the_code(report):
    found = _data(report.rows, report.program)["code"]
    (name,) = [name for name in found if name.endswith("test_page.py")]
    assert any("nn.Conv(8, (3, 3))" in line for line in found[name].values())
    assert code({"missing.py:3", "unknown"}, "/") == {}


def hostile(x):
    # </script><script>document.title = "taken"</script><img src=x onerror="document.title = 'taken'">
    with jax.named_scope("</script><b>scope</b>"):
        return jnp.dot(x, x)  # <!-- </script>


hostile.__qualname__ = "</title><script>document.title = 'taken'</script>"


def hostile_report() -> FusionReport:
    report = jaxfuse.explain(hostile, jnp.ones((8, 8)))
    row = Site("<i>pattern</i>", "forward", (), (), "</script>:1", reason="</script><script>document.title = 'taken'</script> & <b>")
    return FusionReport(report.fused, (*report.skipped, row), (), report.program)


def test_text_of_the_program_is_text(tmp_path):
    hostile_report().save(tmp_path / "hostile.html")
    text = (tmp_path / "hostile.html").read_text()
    assert text.count("<script") == 2 and text.count("</script>") == 2 and "<img" not in text and "<b>scope" not in text
    assert "taken" in text  # its code is shown
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    assert any("</script><script>document.title" in line for lines in data["code"].values() for line in lines.values())


def test_text_of_the_program_is_text_in_a_browser(tmp_path):
    hostile_report().save(tmp_path / "hostile.html")
    with chromium.opened(tmp_path / "hostile.html", 1000) as driver:
        for row in driver.find_elements("css selector", "#rows tbody tr"):
            driver.execute_script("arguments[0].click()", row)
        assert driver.title.startswith("</title><script>") and not driver.find_elements("css selector", "main img, main i.x, main td b")
        assert not errors(driver)


def test_a_report_without_a_program_has_a_page(tmp_path):
    FusionReport((Site("conv", "forward", ((1, 2),), ("float32",), "a.py:1", "native"),), ()).save(tmp_path / "r.html")
    with chromium.opened(tmp_path / "r.html", 1000) as driver:
        assert not driver.find_element("id", "program").is_displayed()
        driver.find_element("css selector", "#rows tbody tr").click()
        assert "native" in driver.find_element("id", "detail").text and not errors(driver)


def test_the_table_filters_and_sorts(browser, report):
    everything = list(range(len(report.sites)))
    assert shown(browser) == everything
    search = browser.find_element("id", "search")
    search.send_keys("residual_1 conv")
    texts = [f"{site.pattern} {site.module} {site.kernel}{site.reason}".lower() for site in report.sites]
    found = [i for i, text in enumerate(texts) if "residual_1" in text and "conv" in text]
    assert shown(browser) == found and 0 < len(found) < len(everything)
    assert browser.find_element("id", "count").text == f"{len(found)} of {len(everything)} sites"
    search.clear()
    search.send_keys(" ")
    assert shown(browser) == everything
    browser.find_element("css selector", "#direction option:nth-child(3)").click()
    assert shown(browser) == [i for i in everything if report.sites[i].direction == "backward"]
    browser.find_element("css selector", "#direction option:nth-child(1)").click()
    saved = next(head for head in browser.find_elements("css selector", "#rows th") if head.text == "saved")
    saved.click()
    sizes = [report.sites[i].bytes_saved for i in shown(browser)]
    assert sizes == sorted(sizes, reverse=True) and saved.text == "saved ↓"
    button = browser.find_element("css selector", '#states [data-state="fused"]')
    button.click()
    assert not set(shown(browser)) & set(range(len(report.fused)))
    button.click()
    assert not errors(browser)


def test_a_site_is_clicked_in_the_table_and_in_the_graph(browser, report):
    number = next(i for i, site in enumerate(report.sites) if "Residual_1" in site.module and site.direction == "forward")
    site, detail = report.sites[number], browser.find_element("id", "detail")
    browser.execute_script("arguments[0].click()", browser.find_element("css selector", f'tr[data-site="{number}"]'))
    assert detail.is_displayed()
    for word in (site.pattern, site.kernel or site.reason, site.source, site.module, str(list(site.shapes[0])).replace(" ", "")):
        assert word in detail.text
    assert browser.find_element("css selector", "#detail pre .here").text
    box = browser.find_element("css selector", f'#graph g[data-site="{number}"]')
    assert "chosen" in box.get_attribute("class")
    detail.find_element("css selector", ".close").click()
    assert not detail.is_displayed()
    scrolled_to(browser, "program")
    browser.find_element("css selector", f'#graph g[data-site="{number}"]').click()
    assert detail.is_displayed() and site.pattern in detail.text and not errors(browser)
    box = browser.find_element("css selector", f'#graph g[data-site="{number}"]')
    colour = chromium.colour(browser.find_element("css selector", f".legend i.{'fused' if site.kernel else 'skipped'}"), "background-color")
    assert chromium.colours(picture(browser).crop(chromium.place(browser, box)))[0] == colour
    browser.find_element("css selector", "body").send_keys("\ue00c")  # Escape
    assert not detail.is_displayed()


def test_boxes_open_and_close(browser, report):
    def names(kind):
        return [box.get_attribute("data-box") for box in browser.find_elements("css selector", f"#graph .box.{kind}")]

    def sites():
        return {int(box.get_attribute("data-site")) for box in browser.find_elements("css selector", "#graph .box[data-site]")}

    everything = set(range(len(report.fused) + len(report.skipped)))
    browser.find_element("id", "more").click()
    assert sites() == everything
    chromium.press(browser, browser.find_element("css selector", "#graph .box.group:not(.closed)"))  # the forward pass
    assert sites() < everything
    browser.find_element("id", "less").click()
    assert sites() <= everything  # all, where few boxes show them
    closed = names("group.closed")
    box = next(box for box in browser.find_elements("css selector", "#graph .box.group.closed"))
    name = box.get_attribute("data-box")
    chromium.press(browser, box)
    assert names("group.closed").count(name) == closed.count(name) - 1 and sites() <= everything
    chromium.press(browser, next(box for box in browser.find_elements("css selector", "#graph .box.group:not(.closed)")
                                 if box.get_attribute("data-box") == name))
    assert names("group.closed") == closed and not errors(browser)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [700, 1400])
def test_nothing_is_wider_than_the_window(page, width, dark):
    with chromium.opened(page, width, dark) as driver:
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        theme = driver.execute_script("return document.documentElement.dataset.theme")
        assert theme == ("dark" if dark else "light")
        driver.find_element("id", "theme").click()
        assert driver.execute_script("return document.documentElement.dataset.theme") != theme
        assert overlaps(driver) == [] and not errors(driver)


def overlaps(driver) -> list:
    """Boxes of the graph that lie side by side and cover each other."""
    return driver.execute_script("""
        const found = [], visit = parent => {
          const boxes = [...parent.children].filter(child => child.classList.contains('box'));
          const places = boxes.map(box => box.firstElementChild.getBoundingClientRect());
          places.forEach((a, i) => places.slice(i + 1).forEach((b, j) => {
            const x = Math.min(a.right, b.right) - Math.max(a.left, b.left), y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
            if (x > 1 && y > 1) found.push([boxes[i].dataset.box, boxes[i + j + 1].dataset.box]);
          }));
          boxes.forEach(visit);
        };
        visit(document.querySelector('#graph svg > g'));
        return found;""")


def test_a_thousand_rows_are_filtered(report, tmp_path):
    many = FusionReport(report.fused * 40, report.skipped * 40, report.unfused_steps * 40, report.program)
    many.save(tmp_path / "many.html")
    with chromium.opened(tmp_path / "many.html", 1400) as driver:
        assert shown(driver) == list(range(40 * len(report.sites))) and len(shown(driver)) > 1000
        driver.find_element("id", "search").send_keys("residual_0")
        found = [i for i, site in enumerate(many.sites) if "Residual_0" in site.module]
        assert shown(driver) == found and 0 < len(found) < len(many.sites) and not errors(driver)
