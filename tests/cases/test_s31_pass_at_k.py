"""S31: pass@k is the unbiased estimate, not a bootstrap of maxima; k above n is an error at start-up."""

import pytest

from fourstroke.config import load_config
from fourstroke.errors import ConfigError, DataError
from fourstroke.evaluation import pass_at_k


@pytest.mark.parametrize(
    ("n", "correct", "k", "right"),
    [(8, 1, 8, 1.0), (8, 2, 4, 0.785714), (5, 1, 5, 1.0), (8, 1, 1, 0.125), (8, 0, 1, 0.0), (8, 0, 8, 0.0)],
)
def test_numbers_of_the_case(n: int, correct: int, k: int, right: float) -> None:
    assert pass_at_k(n, correct, k) == pytest.approx(right, abs=5e-7)


def test_the_bootstrap_would_differ() -> None:
    bootstrap = 1 - (1 - 1 / 8) ** 8

    assert bootstrap == pytest.approx(0.656391, abs=1e-6)  # the wrong system's figure for n=8, c=1, k=8
    assert pass_at_k(8, 1, 8) == 1.0


def test_k_above_n_is_an_error_and_at_start_up() -> None:
    with pytest.raises(DataError, match="pass@9"):
        pass_at_k(8, 1, 9)
    with pytest.raises(ConfigError, match="pass_at"):
        load_config({"evaluation": {"samples_per_task": 8, "pass_at": [9]}})
