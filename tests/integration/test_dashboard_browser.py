"""The dashboard in real Chromium, served by the real command: opened, clicked, read, typed at; a silent console."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from fourstroke.testing.recorded_run import RecordedRun, record_run

pytest.importorskip("playwright", reason="missing: playwright")
from playwright.sync_api import expect, sync_playwright

# Debian's headless shell first: a tenth of the memory of the whole browser.
CHROMIUM = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="missing: Chromium"),
]

HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked=1'>",
    "</pre></main><h1>out</h1><svg onload='window.hacked=1'>",
    "a\x00b\x1b[31m \u202eright to left\u2066 \ufffd\ud7ff",
    "long " * 2_000_000,
)
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    record_run(folder, RecordedRun(name="first", num_steps=12))
    record_run(folder, RecordedRun(name="second", num_steps=12, seed=1))
    record_run(folder, RecordedRun(name="hostile", num_steps=1, groups_per_step=1, replies=HOSTILE))
    return {path.name.partition("-")[2]: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def address(runs, tmp_path_factory):
    """Where the real command serves; it must end cleanly when it is interrupted."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fourstroke.cli", "dashboard", str(next(iter(runs.values())).parent), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "FOURSTROKE_CACHE": str(tmp_path_factory.mktemp("cache")),
        },
    )
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 0
    process.stdout.close()


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM)
        yield started
        started.close()


@pytest.fixture(params=[("light", DESK), ("dark", DESK), ("light", PHONE), ("dark", PHONE)], ids=str)
def looks(request):
    return request.param


@pytest.fixture
def page(browser, address, looks):
    """A page that fails its test if anything is said on the console, or asked of another host."""
    scheme, viewport = looks
    context = browser.new_context(color_scheme=scheme, viewport=viewport, base_url=address)
    opened, said = context.new_page(), []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("request", lambda request: said.append(request.url) if not request.url.startswith(address) else None)
    yield opened
    context.close()
    assert said == []


def _fits(page):
    """Nothing sticks out to the side, whatever the width."""
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_every_page_is_reached_by_clicks_and_read(page, runs):
    name = runs["first"].name
    page.goto("/")
    expect(page.get_by_role("heading", name="Runs")).to_be_visible()
    page.get_by_role("link", name=name).click()
    expect(page.get_by_role("heading", level=1)).to_contain_text(name)
    expect(page.get_by_role("table", name=re.compile("Ledger"))).to_contain_text("draws")
    expect(page.get_by_text("too_few_scored")).to_be_visible()
    for tab, said in (
        ("Curves", "score of the trained groups"),
        ("Timeline", "Seconds of each step"),
        ("Distributions", "Sampled tokens of an episode"),
        ("Weights", "Publications that landed"),
        ("Episodes", "192 episodes"),
    ):
        link = page.get_by_label("This run").get_by_role("link", name=tab)
        link.click()
        expect(page.get_by_role("main")).to_contain_text(said)
        expect(page.get_by_label("This run").locator("[aria-current=page]")).to_have_text(tab)
        _fits(page)
    page.locator("tbody a").first.click()
    expect(page.get_by_role("heading", name="Verdict")).to_be_visible()
    expect(page.locator(".token").first).to_be_visible()
    _fits(page)
    page.get_by_role("link", name="Group of 4").click()
    expect(page.get_by_role("article")).to_have_count(4)
    _fits(page)


def test_the_colours_are_those_that_the_reader_prefers(page, looks):
    page.goto("/")

    back = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    text = page.evaluate("getComputedStyle(document.body).color")
    lightness = [sum(map(int, re.findall(r"\d+", colour))) / 3 for colour in (back, text)]

    assert (
        (lightness[0] > 200 and lightness[1] < 60)
        if looks[0] == "light"
        else (lightness[0] < 60 and lightness[1] > 200)
    )


def test_filters_answer_as_they_are_typed(page, runs):
    page.goto(f"/runs/{runs['first'].name}/episodes")
    page.get_by_label("Verdict").select_option("tamper")
    expect(page.get_by_role("status")).to_have_text("8 episodes")
    page.get_by_label("Step", exact=True).fill("2")
    expect(page.get_by_role("status")).to_have_text("1 episode")
    assert "verdict=tamper" in page.url
    assert "step=2" in page.url
    page.reload()
    expect(page.get_by_role("status")).to_have_text("1 episode")
    expect(page.get_by_label("Verdict")).to_have_value("tamper")
    page.get_by_role("link", name="Clear").click()
    expect(page.get_by_role("status")).to_have_text("192 episodes")


def test_runs_are_compared(page, runs):
    page.goto("/")
    for run in ("first", "second"):
        page.get_by_label(f"Compare {runs[run].name}").check()
    page.get_by_role("button", name="Compare").click()
    expect(page.locator("figure").first.locator("polyline")).to_have_count(2)
    page.get_by_role("checkbox", name=runs["second"].name).uncheck()
    expect(page.locator("figure").first.locator("polyline")).to_have_count(1)
    _fits(page)


def test_tokens_change_their_colour_and_become_a_table(page, runs):
    page.goto(f"/runs/{runs['first'].name}/groups/e0000-i000000/0/0/0")
    expect(page.locator("#token-results .token.p0").first).to_be_visible()
    page.get_by_label("Coloured by").select_option("mask reason")
    expect(page.locator("p.tokens .mask-prompt").first).to_be_visible()
    page.get_by_label("Shown as").select_option("table")
    expect(page.get_by_role("columnheader", name="log-probability")).to_be_visible()
    _fits(page)


@pytest.mark.parametrize("looks", [("light", DESK), ("dark", PHONE)], indirect=True, ids=str)
def test_a_keyboard_is_enough(page, runs):
    page.goto("/")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("main")).to_be_focused()
    link = page.get_by_role("link", name=runs["first"].name)
    for _ in range(12):
        page.keyboard.press("Tab")
        if link.evaluate("link => link === document.activeElement"):
            break
    outline = link.evaluate("link => getComputedStyle(link).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_contain_text(runs["first"].name)


@pytest.mark.parametrize("looks", [("light", DESK), ("dark", PHONE)], indirect=True, ids=str)
def test_hostile_text_runs_nothing_and_breaks_nothing(page, runs):
    place = f"/runs/{runs['hostile'].name}/groups/e0000-i000000/0/0"
    for address in (place, *(f"{place}/{n}" for n in range(4)), *(f"{place}/{n}/text/0" for n in range(4))):
        page.goto(address)
        expect(page.get_by_role("heading", level=1)).to_have_count(1)
        assert page.evaluate("window.hacked") is None
        _fits(page)
    expect(page.get_by_text("of 10,000,000")).to_be_visible()
    page.get_by_role("link", name="After").first.click()
    expect(page.get_by_text("Page 2 of 500").first).to_be_visible()


@pytest.mark.parametrize("looks", [("light", DESK)], indirect=True, ids=str)
def test_a_run_that_goes_on_is_looked_at_again(page, runs):
    """A new run shows by itself, since the page of a run under way asks again."""
    path = record_run(runs["first"].parent, RecordedRun(name="live", num_steps=3, is_ended=False, pid=os.getpid()))
    page.goto(f"/runs/{path.name}/timeline")
    expect(page.get_by_role("main")).to_contain_text("rollout")
    expect(page.locator("table.steps tbody tr")).to_have_count(3)

    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step":4,"time/step_s":9.0,"time/train_s":4.0}\n')

    expect(page.locator("table.steps tbody tr")).to_have_count(4, timeout=20_000)
    shutil.rmtree(path)
