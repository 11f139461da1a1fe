"""S14 (huggingface/trl#6789): top-p, top-k and min-p change the support of the sampled distribution.

With probabilities [0.5, 0.3, 0.15, 0.05] and top_p = 0.8 the engine samples token 0 with 0.5 / 0.8, the trainer says
0.5: the ratio is the kept mass, 0.8, at every token with no change of the policy. The trainer does not have the kept
set, so such sampling is refused for training, and a request has no place to say it.
"""

from __future__ import annotations

import math

import pytest

from fourstroke.config import RolloutConfig, load_config
from fourstroke.errors import ConfigError
from fourstroke.types import SampleRequest

KNOBS = ("top_p", "top_k", "min_p")


def test_what_the_refusal_prevents() -> None:
    probabilities, kept = [0.5, 0.3, 0.15, 0.05], [0.5, 0.3]
    engine_logprob, trainer_logprob = math.log(0.5 / sum(kept)), math.log(probabilities[0])

    assert math.exp(trainer_logprob - engine_logprob) == pytest.approx(0.8, abs=1e-15)


@pytest.mark.parametrize("knob", KNOBS)
@pytest.mark.parametrize("value", [0.8, 1, 1.0, 50, None])
@pytest.mark.parametrize("section", ["rollout", "engine"])
def test_the_knob_is_refused_in_a_file(knob: str, value: float | None, section: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({section: {knob: value}})

    assert str(caught.value) == (
        f"{section}.{knob} = {value!r} is refused: it changes the support of the sampled distribution, so that the "
        "importance ratio is wrong at every token; remove it and use temperature alone"
    )


@pytest.mark.parametrize("knob", KNOBS)
def test_the_knob_is_refused_on_the_command_line(knob: str) -> None:
    with pytest.raises(ConfigError, match="use temperature alone"):
        load_config({}, overrides=[f"rollout.{knob}=0.9"])


def test_neither_the_configuration_nor_a_request_has_a_place_for_it() -> None:
    assert not set(KNOBS) & set(RolloutConfig.model_fields)
    assert not set(KNOBS) & set(SampleRequest.__struct_fields__)
