"""The dashboard over 100,000 episodes, in real Chromium: the slowest page to load, and the slowest filter to answer.

    python benchmarks/dashboard.py [NUM_EPISODES]

The run is generated, then served by the real command. ``page_ms`` is the slowest of all pages, from the request to the
load event; the first look at the episodes, which builds their index, is among them and is told apart too.
``filter_ms`` is the slowest filter, from the input event (the pause after typing included) to the new rows in the page.
"""

from __future__ import annotations

import itertools
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright
from report import report

from fourstroke.testing.recorded_run import RecordedRun, record_run

CLAIM = "dashboard: over 100,000 episodes a page loads in 1 s and a filter answers in 0.3 s"
GROUP_SIZE, GROUPS_PER_STEP = 8, 25
NUM_REPEATS = 5
PAGE_LIMIT_MS, FILTER_LIMIT_MS = 1000, 300
FILTERS = (
    ("verdict", "tamper"),
    ("verdict", "scored"),
    ("stop", "length"),
    ("order", "lowest score"),
    ("order", "longest"),
    ("min_score", "0.5"),
    ("step", "77"),
    ("reason", "another"),
    ("task", "task0017"),
)
# Sets a field as a hand would, and says when the rows have been replaced.
_ANSWER = """async ([name, value]) => {
    const field = document.querySelector(`form.filters [name=${name}]`);
    const replaced = new Promise((done) => {
        const observer = new MutationObserver(() => { observer.disconnect(); done(); });
        observer.observe(document.querySelector("main"), { childList: true });
    });
    const start = performance.now();
    field.value = value;
    field.dispatchEvent(new Event("input", { bubbles: true }));
    await replaced;
    return performance.now() - start;
}"""


def load_ms(page: Page, path: str) -> float:
    """Milliseconds from the request to the load event."""
    page.goto(path, wait_until="load")
    return float(page.evaluate("performance.getEntriesByType('navigation')[0].duration"))


def measure(page: Page, name: str) -> dict[str, object]:
    """All pages, the first time and again, and all filters."""
    run = f"/runs/{name}"
    group = f"{run}/groups/e0000-i000012/0/0"
    first = load_ms(page, f"{run}/episodes")
    paths = ("/", run, f"/curves?run={name}", f"{run}/episodes", f"{run}/episodes?page=1000", group, f"{group}/0")
    paths += tuple(f"{run}/{tab}" for tab in ("timeline", "distributions", "weights"))
    pages = {path.replace(name, "RUN"): [load_ms(page, path) for _ in range(NUM_REPEATS)] for path in paths}
    filters: dict[str, list[float]] = {}
    for (field, value), _ in itertools.product(FILTERS, range(NUM_REPEATS)):
        page.goto(f"{run}/episodes")
        filters.setdefault(f"{field}={value}", []).append(float(page.evaluate(_ANSWER, [field, value])))
    page_ms = {path: max(times) for path, times in pages.items()}
    filter_ms = {one: max(times) for one, times in filters.items()}
    return {
        "first_look_ms": first,
        "page_ms": max(first, *page_ms.values()),
        "filter_ms": max(filter_ms.values()),
        "pages_median_ms": {path: statistics.median(times) for path, times in pages.items()},
        "filters_median_ms": {one: statistics.median(times) for one, times in filters.items()},
    }


def main() -> None:
    """Generate, serve, measure and judge."""
    num_episodes = int(sys.argv[1]) if sys.argv[1:] else 100_000
    chromium = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium"))))
    num_steps = -(-num_episodes // (GROUP_SIZE * GROUPS_PER_STEP))
    recorded = RecordedRun(num_steps=num_steps, groups_per_step=GROUPS_PER_STEP, group_size=GROUP_SIZE)
    with tempfile.TemporaryDirectory() as folder:
        path = record_run(Path(folder), recorded)
        command = [sys.executable, "-m", "fourstroke.cli", "dashboard", folder, "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            with sync_playwright() as driver:
                browser = driver.chromium.launch(executable_path=chromium)
                figures = measure(browser.new_context(base_url=address).new_page(), path.name)
                browser.close()
            process.send_signal(signal.SIGINT)
    holds = {
        "page": float(str(figures["page_ms"])) <= PAGE_LIMIT_MS,
        "filter": float(str(figures["filter_ms"])) <= FILTER_LIMIT_MS,
    }
    report(
        CLAIM, {"num_episodes": num_steps * GROUPS_PER_STEP * GROUP_SIZE, **figures, "holds": holds}, into="dashboard"
    )


if __name__ == "__main__":
    main()
