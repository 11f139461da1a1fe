"""Writes the tables of the docs that come from the code: the keys of the configuration, the bundles, the metrics.

    python docs/generate.py          rewrite the tables in place
    python docs/generate.py --check  fail if one is out of date

A table stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import BaseModel

from fourstroke.config import BUNDLES, RunConfig
from fourstroke.observability import METRICS

DOCS = Path(__file__).parent


def _leaves(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Key, default and description of each leaf."""
    defaults = RunConfig().model_dump(mode="json")
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _leaves(field.annotation, f"{key}.")
        else:
            value = defaults
            for part in key.split("."):
                value = value[part]
            yield key, "null" if value is None else str(value), field.description or ""


def keys_table() -> str:
    """All keys of the configuration."""
    rows = [f"| `{key}` | `{default}` | {text} |" for key, default, text in _leaves(RunConfig)]
    return "\n".join(["| key | default | meaning |", "| --- | --- | --- |", *rows])


def bundles_table() -> str:
    """The algorithm bundles."""
    rows = []
    for bundle in BUNDLES.values():
        terms = ", ".join(f"`{key}={value}`" for key, value in bundle.terms.items())
        rows.append(f"| `{bundle.name}` | {bundle.purpose} | {terms} | {bundle.paper} |")
    return "\n".join(["| bundle | what it is for | terms | source |", "| --- | --- | --- | --- |", *rows])


def metrics_table() -> str:
    """The metrics with what they are counted over."""
    rows = []
    for metric in METRICS.values():
        cells = (metric.unit, metric.reducer.value, metric.population, metric.denominator or "-")
        rows.append(f"| `{metric.name}` | {' | '.join(cells)} |")
    head = ["| metric | unit | reduced by | population | divided by |", "| --- | --- | --- | --- | --- |"]
    return "\n".join([*head, *rows])


TABLES: dict[str, Callable[[], str]] = {"keys": keys_table, "bundles": bundles_table, "metrics": metrics_table}


def renewed(text: str) -> str:
    """The page with its generated tables made anew."""

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}\n{TABLES[match[2]]()}\n{match[3]}"

    return re.sub(r"(<!-- generated: (\w+) -->)\n.*?(<!-- end -->)", table, text, flags=re.DOTALL)


def main() -> int:
    """Renew or check every page."""
    is_check = "--check" in sys.argv[1:]
    stale = []
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text()
        if (new := renewed(text)) != text:
            stale.append(page.name)
            if not is_check:
                page.write_text(new)
    if is_check and stale:
        print(f"out of date: {', '.join(stale)}; run make docs")
        return 1
    print(f"pages written: {', '.join(stale) or 'none, all were up to date'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
