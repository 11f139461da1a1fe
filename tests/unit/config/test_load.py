"""From text to a checked configuration: what is filled in, what is refused, and that each refusal names its mend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourstroke.config import BUNDLES, RunConfig, dump_config, load_config
from fourstroke.errors import ConfigError


def refusal(data: dict[str, Any], *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(data, overrides=overrides)
    return str(caught.value)


# --- unknown keys ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"num_step": 3}, "num_step is not a known key; did you mean num_steps?"),
        (
            {"rollout": {"group_sise": 4}},
            "rollout.group_sise is not a known key; did you mean rollout.group_size?",
        ),
        ({"trainer": {"lr": 1e-5}}, "trainer.lr is not a known key; keys there are "),
        (
            {"algorithm": {"name": "grpo", "clip_hi": 0.2}},
            "algorithm.clip_hi is not a known key; did you mean algorithm.clip_high?",
        ),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(data: dict[str, Any], sentence: str) -> None:
    assert refusal(data).startswith(sentence)


def test_an_unknown_key_in_an_override_is_refused() -> None:
    assert refusal({}, "engine.max_model_length=64") == (
        "engine.max_model_length is not a known key; did you mean engine.max_model_len?"
    )


def test_each_thing_that_is_wrong_has_its_own_line() -> None:
    lines = refusal({"num_step": 3, "seed": -1}).splitlines()

    assert len(lines) == 2
    assert any(line.startswith("seed = -1 is refused: ") for line in lines)


# --- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "1.e-6", "1.0e-06", "+1e-6", "0.000001", ".1e-5"])
def test_scientific_notation_in_a_file_is_a_number(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"trainer:\n  learning_rate: {text}\n")

    assert load_config(file).trainer.learning_rate == 1e-6


def test_scientific_notation_in_an_override_is_a_number() -> None:
    assert load_config({}, overrides=["trainer.learning_rate=2e-5"]).trainer.learning_rate == 2e-5


@pytest.mark.parametrize("text", ["1e-6x", "fast", "[1e-6]", "null"])
def test_what_is_not_a_number_is_refused_with_its_value(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"trainer:\n  learning_rate: {text}\n")

    with pytest.raises(ConfigError, match=r"^trainer\.learning_rate = .* is refused: .*; change it to that$"):
        load_config(file)


@pytest.mark.parametrize("text", [".inf", "-.inf", ".nan", "0", "-1e-6"])
def test_a_learning_rate_is_finite_and_above_zero(text: str) -> None:
    assert refusal({}, f"trainer.learning_rate={text}").startswith("trainer.learning_rate = ")


# --- combinations that make no run ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "key", "mend"),
    [
        (["rollout.group_size=1"], "rollout.group_size = 1", "set it to 2 or more"),
        (["rollout.group_size=4", "rollout.min_scored=5"], "rollout.min_scored = 5", "lower it"),
        (["rollout.min_scored=1"], "rollout.min_scored = 1", "set it to 2 or more"),
        (["rollout.max_tokens=64", "engine.max_model_len=64"], "rollout.max_tokens = 64", "raise the latter"),
        (["trainer.microbatch_tokens=1023"], "trainer.microbatch_tokens = 1023", "raise it to at least that"),
        (["rollout.groups_per_step=2", "algorithm.updates_per_step=3"], "algorithm.updates_per_step = 3", "lower it"),
        (["evaluation.samples_per_task=4", "evaluation.pass_at=[1, 8]"], "k = 8", "raise n or drop that k"),
        (["evaluation.pass_at=[0]"], "k below 1", "drop it"),
        (["sinks.use=[mlflow]"], "sinks.mlflow_uri is null", "set it to a tracking server"),
    ],
)
def test_impossible_sizes_are_refused_in_one_sentence(overrides: list[str], key: str, mend: str) -> None:
    sentence, *further = refusal({}, *overrides).splitlines()

    assert key in sentence
    assert mend in sentence
    assert len(further) == overrides.count("rollout.group_size=1")  # which min_scored cannot fit either


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.group_size=2"],
        ["rollout.group_size=4", "rollout.min_scored=4"],
        ["rollout.max_tokens=63", "engine.max_model_len=64"],
        ["trainer.microbatch_tokens=1024"],
        ["rollout.groups_per_step=3", "algorithm.updates_per_step=3"],
        ["evaluation.samples_per_task=8", "evaluation.pass_at=[1, 8]"],
    ],
)
def test_sizes_at_the_bound_pass(overrides: list[str]) -> None:
    load_config({}, overrides=overrides)


@pytest.mark.parametrize("key", ["num_steps", "rollout.groups_per_step", "rollout.max_tokens", "engine.max_num_seqs"])
def test_no_count_may_be_zero(key: str) -> None:
    assert refusal({}, f"{key}=0").startswith(f"{key} = 0 is refused: ")


def test_a_run_name_stays_in_its_folder() -> None:
    assert refusal({}, "name=../escape").startswith("name = '../escape' does not have the form ")


# --- bundles --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(BUNDLES))
def test_a_bundle_fills_in_its_terms(name: str) -> None:
    algorithm = load_config({"algorithm": {"name": name}}).algorithm

    assert {term: getattr(algorithm, term) for term in BUNDLES[name].terms} == BUNDLES[name].terms


def test_a_bundle_may_be_named_alone() -> None:
    assert load_config({"algorithm": "dr_grpo"}).algorithm.aggregation == "constant"


def test_a_term_beside_the_name_stays() -> None:
    algorithm = load_config({"algorithm": {"name": "grpo", "clip_high": 0.4}}).algorithm

    assert (algorithm.clip_low, algorithm.clip_high) == (0.2, 0.4)


def test_a_term_set_after_the_name_stays() -> None:
    overrides = ["algorithm.name=dr_grpo", "algorithm.clip_high=0.4"]

    algorithm = load_config({}, overrides=overrides).algorithm

    assert (algorithm.advantage, algorithm.clip_high) == ("group_centred", 0.4)


def test_another_name_drops_the_old_bundles_terms() -> None:
    algorithm = load_config(RunConfig(), overrides=["algorithm.name=dr_grpo"]).algorithm

    assert (algorithm.advantage, algorithm.aggregation, algorithm.clip_high) == ("group_centred", "constant", 0.2)


@pytest.mark.parametrize("name", BUNDLES)
def test_every_bundle_passes_the_checks_and_reads_back_equal(name: str, tmp_path: Path) -> None:
    config = load_config({"algorithm": name})

    (tmp_path / "config.yaml").write_text(dump_config(config))

    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        ({"name": "dppo", "clip_low": 0.5}, "algorithm.clip_low = 0.5 is not read by dppo, but by grpo, dr_grpo"),
        ({"name": "grpo", "gate_positive": 2.0}, "algorithm.gate_positive = 2.0 is not read by grpo, but by sapo"),
        ({"name": "gmpo", "dual_clip": 3.0}, "algorithm.dual_clip = 3.0 is not read by gmpo"),
        ({"name": "gmpo", "clip_low": 1.0}, "lower it"),
        ({"name": "dppo", "correction": "token"}, "would count twice in dppo"),
        ({"name": "dro", "correction": "sequence"}, "set it to 'none'"),
        ({"name": "grpo", "rejection_high": 2.0}, "not read while algorithm.rejection = 'none'"),
        ({"name": "grpo", "rejection": "token"}, "rejects nothing without rejection_low or rejection_high"),
        ({"name": "dapo", "mask_truncated": True}, "choose one of them"),
        ({"name": "gdpo", "overlong_share": 0.2}, "let the grader give the length as a component"),
        ({"name": "pass_at_k", "pass_k": 8}, "algorithm.pass_k = 8 leaves no other subset"),
    ],
)
def test_terms_that_do_not_go_together_are_refused(algorithm: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal({"algorithm": algorithm})


def test_only_an_estimator_with_peers_needs_groups() -> None:
    rollout = {"group_size": 1, "min_scored": 1}

    assert load_config({"algorithm": "reinforce_pp", "rollout": rollout}).rollout.group_size == 1
    assert "no peers" in refusal({"algorithm": "rloo", "rollout": rollout})


def test_an_unknown_bundle_is_refused_with_those_that_there_are() -> None:
    assert "bundles are grpo, dr_grpo" in refusal({"algorithm": {"name": "grpoo"}})


# --- files and overrides --------------------------------------------------------------------------------------------


def test_an_empty_file_is_the_default_run(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("# nothing\n")

    assert load_config(file) == RunConfig()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [("- 1\n- 2\n", "holds a list at its top; write keys and values"), ("a: [1", "is not valid YAML: ")],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: str, sentence: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(content)

    with pytest.raises(ConfigError) as caught:
        load_config(file)

    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a file; name a recipe or a YAML file"):
        load_config(tmp_path / "none.yaml")


def test_yaml_builds_plain_data_alone(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("name: !!python/object/apply:os.getcwd []\n")

    with pytest.raises(ConfigError, match="is not valid YAML"):
        load_config(file)


@pytest.mark.parametrize("override", ["num_steps", "=3", ""])
def test_an_override_without_key_or_value_is_refused(override: str) -> None:
    assert refusal({}, override).endswith("write --set key=value")


def test_overrides_apply_in_order_and_leave_their_input_alone() -> None:
    data = {"rollout": {"group_size": 4}}

    config = load_config(data, overrides=["rollout.group_size=6", "rollout.group_size=8", "rollout.max_tokens=5"])

    assert (config.rollout.group_size, config.rollout.max_tokens) == (8, 5)
    assert data == {"rollout": {"group_size": 4}}


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().num_steps = 3  # type: ignore[misc]


# --- there and back -------------------------------------------------------------------------------------------------

_numbers = st.floats(min_value=1e-12, max_value=0.99, allow_nan=False)
_plain = st.one_of(st.integers(-(2**40), 2**40), st.text(max_size=8), st.booleans(), st.none(), _numbers)


@given(
    data=st.fixed_dictionaries(
        {
            "name": st.from_regex(r"[a-z0-9][a-z0-9._-]{0,8}", fullmatch=True),
            "runs_dir": st.text(min_size=1, max_size=8),
            "seed": st.integers(0, 2**31 - 1),
            "num_steps": st.integers(1, 10**9),
            "tasks": st.fixed_dictionaries({"arguments": st.dictionaries(st.text(max_size=5), _plain, max_size=3)}),
            "algorithm": st.fixed_dictionaries(
                {"name": st.sampled_from(["grpo", "dr_grpo", "dapo", "rloo"])},
                optional={"clip_low": _numbers, "dual_clip": st.none() | st.floats(1.01, 10)},
            ),
            "trainer": st.fixed_dictionaries({"learning_rate": _numbers, "epsilon": _numbers}),
            "evaluation": st.fixed_dictionaries({"pass_at": st.lists(st.integers(1, 4), max_size=3)}),
        }
    )
)
def test_what_was_resolved_reads_back_equal(data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    config = load_config(data)
    file = tmp_path_factory.mktemp("round") / "run.yaml"

    file.write_text(dump_config(config))

    assert load_config(file) == config


def test_a_text_that_looks_like_a_number_reads_back_as_a_text(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(RunConfig(runs_dir="0E0")))

    assert load_config(path).runs_dir == "0E0"
