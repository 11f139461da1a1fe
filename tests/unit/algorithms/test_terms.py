"""The names in ``config`` and here are the same; rows are skipped only where nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import get_args

import pytest

from fourstroke.algorithms import BUNDLE_TERMS, corrections, losses, needs_gradient, terms, terms_of
from fourstroke.algorithms.advantages import ADVANTAGES
from fourstroke.algorithms.aggregation import AGGREGATIONS
from fourstroke.config import BUNDLES, AlgorithmConfig
from fourstroke.errors import ConfigError
from fourstroke.types import RowRecord

GRPO = AlgorithmConfig.model_validate({"name": "grpo"})


def test_bundles_have_the_same_names() -> None:
    assert list(BUNDLE_TERMS) == list(BUNDLES)
    assert {term.name for bundle in BUNDLE_TERMS.values() for term in bundle} <= set(losses.LOSSES) == set(terms.TERMS)


@pytest.mark.parametrize(
    ("field", "table"),
    [("advantage", ADVANTAGES), ("aggregation", AGGREGATIONS), ("correction", corrections.CORRECTIONS)],
)
def test_choices_have_the_same_names(field: str, table: dict[str, object]) -> None:
    assert set(get_args(AlgorithmConfig.model_fields[field].annotation)) == set(table)


def test_unknown_bundle_is_refused_with_the_names() -> None:
    config = GRPO.model_copy(update={"name": "mine"})
    with pytest.raises(ConfigError, match=r"algorithm.name = 'mine' is no bundle; choose one of grpo, dr_grpo, "):
        terms_of(config)


def row(num_loss_tokens: int, advantage: float) -> RowRecord:
    return RowRecord(
        group="g",
        member=0,
        row=0,
        num_tokens=3,
        num_loss_tokens=num_loss_tokens,
        num_shared_tokens=0,
        advantage=advantage,
        weight=0.1,
    )


ROWS = [
    row(2, 0.0),
    row(2, -1.0),
    row(0, 5.0),  # no loss token, so its advantage is none
    row(0, 0.0),
    row(2, float("nan")),  # not a number: must reach the check of the loss
]


def test_rows_with_zero_advantage_may_be_skipped() -> None:
    assert needs_gradient(ROWS, config=GRPO) == (1, 4)


@pytest.mark.parametrize("terms_of_bundle", [{"name": "grpo", "entropy_coefficient": 0.01}, {"name": "dro"}])
def test_rows_are_not_skipped_where_a_term_gives_gradient_without_advantage(terms_of_bundle: dict[str, object]) -> None:
    assert needs_gradient(ROWS, config=AlgorithmConfig.model_validate(terms_of_bundle)) == (0, 1, 4)


def test_the_controllers_part_loads_without_torch() -> None:
    code = "import sys, fourstroke.algorithms; sys.exit('torch' in sys.modules)"
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == 0
