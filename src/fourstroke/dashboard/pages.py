"""What each page says: from a run, and what the reader asked, to the values that its template writes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import urlencode

import numpy as np

from fourstroke.algorithms import OF_GROUP_SCORES, group_advantages
from fourstroke.dashboard.charts import Bar, LineChart, Series, bars, histogram, line_chart, number_text
from fourstroke.dashboard.query import Query
from fourstroke.dashboard.runs import Run, RunState
from fourstroke.dashboard.token_view import Colouring, legend_of, token_views
from fourstroke.dashboard.visible_text import text_part, visible
from fourstroke.errors import FourstrokeError
from fourstroke.evaluation import clustered_estimate
from fourstroke.observability import METRICS, EventKind, duration, unix_now
from fourstroke.store import EpisodeFilter, EpisodeOrder
from fourstroke.types import Episode, Group, Scored, StopReason

Page = dict[str, object]

EPISODES_PER_PAGE = 50
EVENTS_PER_PAGE = 200
STEPS_PER_PAGE = 50
TOKENS_PER_PAGE = 1000
# Characters of a message on the page of its episode, beside its siblings, and of one page of its whole text.
MESSAGE_CHARS, SIBLING_CHARS, TEXT_PAGE_CHARS = 4000, 1500, 20_000
_SCORE = "reward/grade/score_mean"
_NUM_BINS = 24
# Position in the URL of the prompt, which is no message of the episode.
PROMPT = -1


def overview_page(runs: Sequence[Run], refused: Sequence[str]) -> Page:
    """All runs, with what they came to; what cannot be read is said and keeps nothing else from showing."""
    lines, problems = [], list(refused)
    for run in runs:
        try:
            lines.append(_run_line(run))
        except FourstrokeError as error:
            problems.append(str(error))
    return {
        "runs": lines,
        "problems": [visible(problem) for problem in problems],
        "is_live": any(line["state"] == RunState.RUNNING.value for line in lines),
    }


def _run_line(run: Run) -> Page:
    last = run.metrics[-1] if run.metrics else {}
    return {
        "name": run.name,
        "state": run.state.value,
        "created": run.identity.created,
        "step": int(last.get("step", 0)),
        "num_steps": run.config.num_steps,
        "score": number_text(last[_SCORE]) if _SCORE in last else "-",
        "evaluations": [
            (
                report.name,
                number_text(report.estimate.mean),
                number_text(report.estimate.low),
                number_text(report.estimate.high),
            )
            for report in run.evaluations
        ],
        "audit": run.audit,
    }


def run_page(run: Run) -> Page:
    """One run: its state, balance, drops, evaluations and what it waits for."""
    audit, report, summary = run.audit, run.waits, run.summary
    return {
        "line": _run_line(run),
        "summary": summary,
        "duration": duration(summary.train_seconds) if summary else "",
        "reason": visible(summary.reason) if summary else "",
        "peak_gib": number_text(summary.peak_memory_bytes / 2**30) if summary else "",
        "audit": audit,
        "drops": _drops(audit.dropped_by_reason if audit else {}),
        "attempt_drops": _drops(audit.attempts_dropped_by_reason if audit else {}),
        "evaluations": run.evaluations,
        "number": number_text,
        "incarnations": [(one.number, one.from_step, visible(one.reason)) for one in run.incarnations],
        "waits": sorted(report.waits, key=lambda wait: -wait.waited_s)[:40] if report else [],
        "waits_age_s": max(0.0, unix_now() - report.written_unix) if report else 0.0,
        "visible": visible,
        "phase": visible(report.phase) if report else "",
        "config": run.config,
        "identity": run.identity,
    }


def _drops(counts: Mapping[str, int]) -> tuple[Bar, ...]:
    return bars(((visible(reason), count) for reason, count in sorted(counts.items())), kind="bad")


def curves_page(runs: Sequence[Run], chosen: Sequence[Run]) -> Page:
    """The metrics of the chosen runs over steps; scores and evaluations with their intervals."""
    charts = [_score_chart(chosen), _evaluation_chart(chosen)]
    charts += [_metric_chart(name, chosen) for name in METRICS if name != _SCORE]
    return {
        "names": [(run.name, run in chosen) for run in runs],
        "charts": [chart for chart in charts if any(line.pieces or line.marks for line in chart.lines)],
        "is_live": any(run.state is RunState.RUNNING for run in chosen),
    }


def _score_chart(runs: Sequence[Run]) -> LineChart:
    return line_chart(
        "score of the trained groups",
        [_score_series(run) for run in runs],
        unit="1",
        note="Mean over a step's groups of the group's mean score, over its scored members. Band: 95 % interval, "
        "clustered by group; none where a step has a single group.",
    )


def _score_series(run: Run) -> Series:
    points, band = [], []
    for step, groups in sorted(run.scores_by_step.items()):
        arrays = [np.array(scores) for scores in groups]
        points.append((float(step), float(np.mean([scores.mean() for scores in arrays]))))
        if len(arrays) > 1:
            estimate = clustered_estimate(arrays)
            band.append((float(step), estimate.low, estimate.high))
    return Series(label=run.name, points=tuple(points), band=tuple(band))


def _evaluation_chart(runs: Sequence[Run]) -> LineChart:
    return line_chart(
        "held-out score",
        [
            Series(
                label=run.name,
                points=tuple((float(report.version), report.estimate.mean) for report in run.evaluations),
                band=tuple(
                    (float(report.version), report.estimate.low, report.estimate.high) for report in run.evaluations
                ),
            )
            for run in runs
        ],
        unit="1",
        note="By weight version. Band: 95 % interval, clustered by task.",
    )


def _metric_chart(name: str, runs: Sequence[Run]) -> LineChart:
    metric = METRICS[name]
    over = (
        f", divided by {metric.denominator}" if metric.denominator and metric.denominator != metric.population else ""
    )
    return line_chart(
        name,
        [
            Series(
                label=run.name, points=tuple((record["step"], record[name]) for record in run.metrics if name in record)
            )
            for run in runs
        ],
        unit=metric.unit,
        note=f"{metric.reducer.value.capitalize()} of: {metric.population}{over}.",
    )


def episodes_page(run: Run, query: Query) -> Page:
    """The episodes that match the filters, a page of them."""
    chosen = EpisodeFilter(
        state=query.one_of("state", ("stored", "used", "dropped")),
        stop=query.one_of("stop", [stop.value for stop in StopReason]),
        verdict=query.one_of("verdict", ("scored", "unscored", "tamper")),
        task=query.text("task"),
        group=query.text("group"),
        reason=query.text("reason"),
        step=query.whole("step"),
        min_score=query.number("min_score"),
        max_score=query.number("max_score"),
        min_tokens=query.whole("min_tokens"),
        max_tokens=query.whole("max_tokens"),
    )
    order = EpisodeOrder(query.one_of("order", list(EpisodeOrder)) or EpisodeOrder.NEWEST)
    number = max(1, query.whole("page") or 1)
    page = run.index.page(chosen, order=order, offset=(number - 1) * EPISODES_PER_PAGE, limit=EPISODES_PER_PAGE)
    num_pages = max(1, math.ceil(page.num_matches / EPISODES_PER_PAGE))
    return {
        "chosen": query.given,
        "rows": page.rows,
        "num_matches": page.num_matches,
        "order": order.value,
        "orders": [one.value for one in EpisodeOrder],
        "stops": [stop.value for stop in StopReason],
        "pager": pager(query.given, number=number, num_pages=num_pages),
        "number": number_text,
        "visible": visible,
    }


def pager(given: Mapping[str, str], *, number: int, num_pages: int, name: str = "page") -> Page:
    """Links to the pages before and after, with everything else that was asked kept.

    Example:
        >>> pager({"a": "1"}, number=1, num_pages=3)["after"]
        '?a=1&page=2'
    """

    def link(to: int) -> str:
        return "?" + urlencode({**given, name: str(to)})

    return {
        "number": number,
        "num_pages": num_pages,
        "before": link(number - 1) if number > 1 else "",
        "after": link(number + 1) if number < num_pages else "",
    }


def _advantages(run: Run, group: Group) -> dict[int, float]:
    """Advantage of each scored member by the rule of the run; empty where it needs more than the group's scores."""
    algorithm = run.config.algorithm
    if algorithm.advantage not in OF_GROUP_SCORES or algorithm.overlong_share > 0:
        return {}
    scored = [member for member in group.members if isinstance(member.verdict, Scored)]
    values = group_advantages(group.scores_G, kind=algorithm.advantage)
    return {member.episode.member: float(value) for member, value in zip(scored, values, strict=True)}


def episode_page(run: Run, group: Group, *, incarnation: int, attempt: int, member: int, query: Query) -> Page:
    """One episode: its texts, verdict and tokens."""
    graded = group.members[member]
    episode = graded.episode
    row = run.index.members(group.id, incarnation=incarnation, attempt=attempt)[member]
    colouring = Colouring(query.one_of("colour", list(Colouring)) or Colouring.LOGPROB)
    number = max(1, query.whole("part") or 1)
    num_tokens = sum(len(span.ids) for span in episode.spans)
    num_parts = max(1, math.ceil(num_tokens / TOKENS_PER_PAGE))
    number = min(number, num_parts)
    first = (number - 1) * TOKENS_PER_PAGE
    advantage = _advantages(run, group).get(member) if row.state == "used" else None
    tokenizer = run.tokenizer()
    tokens = token_views(
        episode, first=first, count=TOKENS_PER_PAGE, tokenizer=tokenizer, advantage=advantage, colouring=colouring
    )
    return {
        "row": row,
        "episode": episode,
        "graded": graded,
        "has_text": tokenizer is not None,
        "prompt": text_part(prompt_text(run, episode), number=1, size=MESSAGE_CHARS),
        "messages": [
            (
                position,
                visible(message.role),
                text_part(message.content, number=1, size=MESSAGE_CHARS),
                message.tool_calls,
            )
            for position, message in enumerate(episode.messages)
        ],
        "advantage": None if advantage is None else number_text(advantage),
        "advantage_rule": run.config.algorithm.advantage,
        "tokens": tokens,
        "colouring": colouring.value,
        "colourings": [one.value for one in Colouring],
        "legend": legend_of(colouring, tokens),
        "is_table": query.one_of("view", ("table", "text")) == "table",
        "pager": pager(query.given, number=number, num_pages=num_parts, name="part"),
        "num_tokens": num_tokens,
        "num_members": len(group.members),
        "number": number_text,
        "visible": visible,
        **_verdict_of(graded.verdict),
    }


def _verdict_of(verdict: object) -> Page:
    if isinstance(verdict, Scored):
        components = [(visible(name), number_text(value)) for name, value in sorted(verdict.components.items())]
        return {"verdict": "scored", "score": number_text(verdict.score), "components": components}
    return {"verdict": type(verdict).__name__.lower(), "score": None, "components": []}


def prompt_text(run: Run, episode: Episode) -> str:
    """The prompt as the engine saw it, special tokens too; empty where its tokenizer is not on this machine."""
    tokenizer = run.tokenizer()
    if tokenizer is None or not episode.spans or episode.spans[0].is_sampled:
        return ""
    return tokenizer.text(episode.spans[0].ids.tolist())


def text_page(run: Run, group: Group, *, member: int, position: int, query: Query) -> Page:
    """The whole text of one message, or of the prompt, in pages."""
    episode = group.members[member].episode
    text = prompt_text(run, episode) if position == PROMPT else episode.messages[position].content
    part = text_part(text, number=query.whole("part") or 1, size=TEXT_PAGE_CHARS)
    return {
        "part": part,
        "role": "prompt" if position == PROMPT else visible(episode.messages[position].role),
        "episode": episode,
        "pager": pager(query.given, number=part.number, num_pages=part.num_parts, name="part"),
        "first": (part.number - 1) * TEXT_PAGE_CHARS + 1,
        "last": min(part.number * TEXT_PAGE_CHARS, part.num_chars),
    }


def group_page(run: Run, group: Group, *, incarnation: int, attempt: int) -> Page:
    """A group's members side by side."""
    rows = run.index.members(group.id, incarnation=incarnation, attempt=attempt)
    advantages = _advantages(run, group) if rows and rows[0].state == "used" else {}
    return {
        "group": group,
        "rows": rows,
        "prompt": text_part(prompt_text(run, group.members[0].episode), number=1, size=MESSAGE_CHARS)
        if group.members
        else None,
        "members": [
            {
                "row": row,
                "text": text_part(graded.episode.reply, number=1, size=SIBLING_CHARS),
                "reason": visible(row.reason),
                "advantage": number_text(advantages[row.member]) if row.member in advantages else "-",
                "score": number_text(row.score) if row.score is not None else "-",
            }
            for row, graded in zip(rows, group.members, strict=True)
        ],
        "advantage_rule": run.config.algorithm.advantage,
    }


_ACTIVITIES = (
    ("rollout", "time/rollout_s"),
    ("train", "time/train_s"),
    ("publish", "time/publish_s"),
    ("wait", "time/wait_s"),
)


def timeline_page(run: Run, query: Query) -> Page:
    """Where each step's seconds went, what happened and when, and what each part waits for now."""
    records = run.metrics
    num_pages = max(1, math.ceil(len(records) / STEPS_PER_PAGE))
    number = min(max(1, query.whole("page") or num_pages), num_pages)
    shown = records[(number - 1) * STEPS_PER_PAGE : number * STEPS_PER_PAGE]
    kind = query.one_of("kind", [one.value for one in EventKind])
    events = [event for event in run.events if not kind or event.kind.value == kind]
    report = run.waits
    return {
        "steps": _step_lines(shown),
        "pager": pager(query.given, number=number, num_pages=num_pages),
        "events": [
            (
                duration(event.time_s),
                event.kind.value.replace("_", " "),
                [(visible(name), visible(str(value))) for name, value in event.fields.items()],
            )
            for event in reversed(events[-EVENTS_PER_PAGE:])
        ],
        "num_events": len(events),
        "kind": kind,
        "kinds": sorted({event.kind.value for event in run.events}),
        "waits": sorted(report.waits, key=lambda wait: (wait.part, -wait.waited_s))[:200] if report else [],
        "visible": visible,
    }


def _step_lines(records: Sequence[Mapping[str, float]]) -> list[Page]:
    longest = max((record[name] for record in records for _, name in _ACTIVITIES if name in record), default=0.0)
    return [
        {
            "step": int(record["step"]),
            "total": f"{record['time/step_s']:.2f}" if "time/step_s" in record else "-",
            "bars": [
                (word, f"{record[name]:.2f} s", 100 * record[name] / longest if longest > 0 else 0.0)
                for word, name in _ACTIVITIES
                if name in record
            ],
        }
        for record in records
    ]


def distributions_page(run: Run) -> Page:
    """Histograms of lengths and of staleness."""
    lengths = run.index.lengths()
    ended = Counter({stop: 0 for _, stop, _ in lengths})
    for _, stop, count in lengths:
        ended[stop] += count
    by_length: Counter[int] = Counter()
    for num_tokens, _, count in lengths:
        by_length[num_tokens] += count
    cut = sum(count for _, stop, count in lengths if stop == StopReason.LENGTH.value)
    lags = run.audit.lags if run.audit else {}
    return {
        "lengths": bars(histogram(sorted(by_length.items()), num_bins=_NUM_BINS)),
        "num_cut": cut,
        "num_episodes": sum(by_length.values()),
        "ends": bars(sorted(ended.items())),
        "draw_lags": bars(_by_number(lags)),
        "token_lags": bars(_by_number(run.index.token_lags())),
        "staleness": run.config.rollout.staleness,
    }


def _by_number(counts: Mapping[int, int]) -> Iterable[tuple[str, int]]:
    return ((str(number), count) for number, count in sorted(counts.items()))


def weights_page(run: Run) -> Page:
    """Publications with their digests, and what the canary read after each."""
    by_step = {int(record["step"]): record for record in run.metrics}
    rising = {event.fields.get("step"): event for event in run.events if event.kind is EventKind.CANARY_RISING}
    landed = [event for event in run.events if event.kind is EventKind.WEIGHTS_LANDED]
    canary = "weights/canary/difference"
    return {
        "publications": [
            {
                "step": event.fields["step"],
                "version": str(event.fields["version"]).partition("-")[0],
                "digest": str(event.fields["version"]).partition("-")[2],
                "time": duration(event.time_s),
                "canary": _canary_text(by_step.get(int(event.fields["step"]), {}).get(canary)),
                "is_rising": event.fields["step"] in rising,
            }
            for event in reversed(landed)
        ],
        "chart": _metric_chart(canary, [run]),
    }


def _canary_text(value: float | None) -> str:
    return "-" if value is None else number_text(value)
