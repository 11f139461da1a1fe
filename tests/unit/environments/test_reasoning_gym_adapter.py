"""The reasoning-gym adapter: gold answers score 1, and scorers that would run a reply are refused."""

import ast
import asyncio
import importlib.metadata
import inspect
import sys
import textwrap
from typing import Any

import pytest

from fourstroke.environments import reasoning_gym, reasoning_gym_grader
from fourstroke.environments.reasoning_gym import MAX_REPLY_CHARACTERS, REFUSED
from fourstroke.errors import ConfigError, DataError
from fourstroke.types import Episode, Message, Scored, StopReason, Task, Timings

package = pytest.importorskip("reasoning_gym")


def episode_of(task: Task, reply: str) -> Episode:
    return Episode(
        id="g.0",
        group="g",
        member=0,
        task_id=task.id,
        attempt=0,
        spans=(),
        stop=StopReason.FINISHED,
        messages=(Message(role="assistant", content=reply),),
        timings=Timings(generate_s=0.0),
    )


def score(grader: Any, task: Task, reply: str) -> Scored:
    verdict = asyncio.run(grader.grade(task, episode_of(task, reply)))
    assert isinstance(verdict, Scored)
    return verdict


@pytest.mark.parametrize("name", ["chain_sum", "spell_backward", "number_sorting"])
def test_every_gold_answer_scores_one_and_a_wrong_reply_less(name: str) -> None:
    taskset = reasoning_gym(name=name, size=40, seed=3)
    grader = reasoning_gym_grader(name=name, size=40, seed=3)

    for task in (*taskset.train, *taskset.held_out):
        assert score(grader, task, f" {task.answer}\n").score == 1.0
        assert score(grader, task, "no idea").score < 0.5
        assert score(grader, task, " ").score == 0.0


def test_same_seed_gives_the_same_tasks_and_equal_questions_are_one() -> None:
    assert reasoning_gym(name="chain_sum", size=20).train == reasoning_gym(name="chain_sum", size=20).train
    arguments = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    taskset = reasoning_gym(name="chain_sum", size=400, arguments=arguments)
    texts = [task.prompt[0].content for task in (*taskset.train, *taskset.held_out)]
    assert len(texts) == len(set(texts)) < 400


def test_a_reply_beyond_the_bound_is_not_handed_to_the_scorer() -> None:
    grader = reasoning_gym_grader(name="chain_sum", size=20)
    task = reasoning_gym(name="chain_sum", size=20).train[0]

    assert score(grader, task, "0" * MAX_REPLY_CHARACTERS + task.answer).reason == "reply too long"


def test_a_task_of_another_taskset_is_an_error_and_not_a_score() -> None:
    grader = reasoning_gym_grader(name="chain_sum", size=2)
    task = Task(id="ffff", prompt=(), answer="1")

    with pytest.raises(DataError, match="ffff"):
        asyncio.run(grader.grade(task, episode_of(task, "1")))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_datasets_exist_and_are_refused_with_the_reason(name: str) -> None:
    assert name in package.factory.DATASETS
    with pytest.raises(ConfigError) as refusal:
        reasoning_gym(name=name, size=2)
    assert REFUSED[name] in str(refusal.value)


def test_no_allowed_scorer_hands_the_reply_to_an_evaluator() -> None:
    evaluators = {"eval", "exec", "compile", "parse_expr", "sympify", "parse_latex", "loads_pickle", "system"}
    caught = set()
    for name, (kind, _) in package.factory.DATASETS.items():
        source = textwrap.dedent(inspect.getsource(kind.score_answer))
        for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
            function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if function in evaluators and "answer" in ast.unparse(call) and "entry" not in ast.unparse(call):
                caught.add(name)

    assert caught == {name for name, reason in REFUSED.items() if "eval" in reason or "as code" in reason}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"name": "chain_sums", "size": 2}, "did you mean 'chain_sum'"),
        ({"name": "chain_sum", "size": 0}, "size = 0"),
        ({"name": "chain_sum", "size": 2, "arguments": {"min_trems": 2}}, "min_trems"),
        ({"name": "chain_sum", "size": 2, "arguments": {"min_terms": -1}}, "min_terms"),
        ({"name": "chain_sum", "size": 1}, "leaves none"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        reasoning_gym(**arguments)
    assert text in str(refusal.value)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"fourstroke\[reasoning\]"):
        reasoning_gym(name="chain_sum", size=2)


def test_a_version_that_was_not_audited_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "9.9.9")
    with pytest.raises(ConfigError, match=r"9\.9\.9"):
        reasoning_gym(name="chain_sum", size=2)
