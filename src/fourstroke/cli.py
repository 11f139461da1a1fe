"""The command line. Each command reads its input, calls one function of a room, and prints; nothing is decided here.

    fourstroke train quickstart  ->  orchestration.training_run  ->  orchestration.controller

A user's mistake is printed as one sentence, with an exit status by kind. Heavy rooms are imported by the commands that
need them, so that ``--help`` and ``--dry-run`` load neither torch nor vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import psutil
import typer

import fourstroke
from fourstroke.config import RunConfig, dump_config, load_config, process_settings
from fourstroke.errors import ClusterDiedError, ConfigError, FourstrokeError, RunFolderError
from fourstroke.observability import PlainReporter, Reporter, describe_waits, make_reporter, printable, unix_now
from fourstroke.orchestration.guardian import Guard, guarded
from fourstroke.recipes import RECIPES
from fourstroke.types import StopReason

if TYPE_CHECKING:
    from fourstroke.orchestration.training_run import PreparedRun

app = typer.Typer(help="Reinforcement-learning post-training of language models.", no_args_is_help=True)
ledger_app = typer.Typer(help="Questions to a run's ledger.", no_args_is_help=True)
models_app = typer.Typer(help="Models that can be had by a short name.", no_args_is_help=True)
app.add_typer(ledger_app, name="ledger")
app.add_typer(models_app, name="models")

Source = Annotated[str, typer.Argument(help="A recipe's name or a YAML file.", show_default=False)]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key; may be given again.")]
# Within this time two signals are one.
_SAME_SIGNAL_S = 0.5
# Waits that ``why`` prints: a rollout has one for each request.
_MOST_WAITS = 20

# Characters of a reply that ``episodes`` prints; --json prints all.
_MOST_REPLY = 200

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def _config_of(source: str, sets: list[str] | None) -> RunConfig:
    recipe = RECIPES.get(source)
    if recipe is not None:
        return load_config(recipe(), overrides=sets or ())
    if not Path(source).exists():
        raise ConfigError(f"{source!r} is neither a recipe ({', '.join(RECIPES)}) nor a file; name one of them")
    return load_config(Path(source), overrides=sets or ())


@app.command()
def train(
    source: Source,
    sets: Sets = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Equal bit for bit, run after run and through kills.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print and write the resolved configuration.")
    ] = False,
) -> None:
    """Train a model, evaluated before and after; prints the run folder last."""
    config = _config_of(source, [*(sets or ()), *(["deterministic=true"] if deterministic else ())])
    if dry_run:
        _dry_run(config)
        return
    guard = guarded()
    from fourstroke.orchestration.training_run import prepare_run

    reporter = make_reporter(sys.stdout)
    reporter.note(f"preparing {config.name}: model {config.model.name}")
    _train_prepared(prepare_run(config, settings=process_settings()), reporter, guard)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="A run folder.", show_default=False)],
    sets: Sets = None,
) -> None:
    """Go on with a run that was stopped, killed or failed, from its newest checkpoint; prints the run folder last."""
    from fourstroke.store import RunFolder

    config = load_config(RunFolder.open(run).config_path, overrides=sets or ())
    guard = guarded()
    from fourstroke.orchestration.training_run import prepare_resume

    reporter = make_reporter(sys.stdout)
    reporter.note(f"resuming {run}")
    _train_prepared(prepare_resume(run, config, settings=process_settings()), reporter, guard)


def _train_prepared(prepared: PreparedRun, reporter: Reporter, guard: Guard) -> None:
    from fourstroke.orchestration.real_parts import RealParts
    from fourstroke.orchestration.training_run import TrainingRun, summary_lines

    parts, folder = RealParts(), prepared.folder
    lock = folder.share_lock(guard.pid)
    guard.watch(folder.path, lock_descriptor=lock, shared_files=parts.leftovers(prepared.settings))
    try:
        summary = _run_to_end(TrainingRun(prepared, reporter=reporter, makers=parts, root_pid=guard.pid).run())
        reporter.summary(summary_lines(summary, curves=prepared.folder.curves_path))
    finally:
        reporter.close()
        prepared.folder.close()
        print(f"{prepared.folder.path}/")


@app.command()
def why(
    run: Annotated[Path, typer.Argument(help="A run folder.", show_default=False)], as_json: AsJson = False
) -> None:
    """Print what each part of a run waits for now, the longest wait first."""
    from fourstroke.store import RunFolder, read_waits

    report = read_waits(RunFolder.open(run).waits_path)
    is_alive = psutil.pid_exists(report.pid)
    if as_json:
        print(json.dumps({"is_alive": is_alive, **msgspec.to_builtins(report)}))
        return
    age_s = max(0.0, unix_now() - report.written_unix)
    state = "runs" if is_alive else "is not running; this is what it last said"
    print(
        f"{printable(run.name)} (process {report.pid}) {state}: {report.phase}, step {report.step}, {age_s:.0f} s ago"
    )
    lines = describe_waits(report.waits)
    for line in lines[:_MOST_WAITS]:
        print(f"  {printable(line)}")
    if len(lines) > _MOST_WAITS:
        print(f"  and {len(lines) - _MOST_WAITS} that wait for less time; --json prints all")


def _dry_run(config: RunConfig) -> None:
    text = dump_config(config)
    path = Path(config.runs_dir) / f"{config.name}.dry-run.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(text, end="")
    print(f"written to {path}", file=sys.stderr)


@app.command("eval")
def evaluate_command(
    source: Annotated[str, typer.Argument(help="A run folder, a recipe's name or a YAML file.", show_default=False)],
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate on the held-out tasks: a run's trained model, or the model that a configuration names."""
    guarded()
    from fourstroke.orchestration.evaluation_run import EvaluationRun, evaluation_config
    from fourstroke.orchestration.real_parts import RealParts

    config = evaluation_config(Path(source), sets or ()) if Path(source).is_dir() else _config_of(source, sets)
    reporter = make_reporter(sys.stderr)
    try:
        evaluation = EvaluationRun(config, settings=process_settings(), reporter=reporter, makers=RealParts())
        report = _run_to_end(evaluation.run())
    finally:
        reporter.close()
    if as_json:
        print(msgspec.json.encode(report).decode())


@ledger_app.command("audit")
def ledger_audit(
    run: Annotated[Path, typer.Argument(help="A run folder.", show_default=False)], as_json: AsJson = False
) -> None:
    """Print drawn, trained, dropped and pending, and whether they balance; exits with 1 if they do not."""
    from fourstroke.store import Ledger, RunFolder

    with contextlib.closing(Ledger(RunFolder.open(run).ledger_path, is_read_only=True)) as ledger:
        audit = ledger.audit()
    fields: dict[str, Any] = msgspec.to_builtins(audit)
    if as_json:
        print(json.dumps(fields))
    else:
        for name, value in fields.items():
            print(f"{name:<28}{printable(str(value))}")
    if not audit.balanced:
        raise typer.Exit(1)


@app.command()
def compare(
    run: Annotated[Path, typer.Argument(help="A run folder.", show_default=False)],
    other: Annotated[Path | None, typer.Argument(help="Another; without it: the run before and after.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare evaluations task by task: two runs, or one run before and after its training."""
    from fourstroke.evaluation import compare_runs
    from fourstroke.store import RunFolder

    comparisons = compare_runs(RunFolder.open(run), RunFolder.open(other) if other else None)
    if as_json:
        print(json.dumps([msgspec.to_builtins(comparison) for comparison in comparisons]))
        return
    for comparison in comparisons:
        for line in comparison.lines():
            print(printable(line))


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="A run folder.", show_default=False)], as_json: AsJson = False
) -> None:
    """Print the summary of a run that ended, as its end printed it."""
    from fourstroke.orchestration.training_run import summary_lines
    from fourstroke.store import RunFolder, read_summary

    folder = RunFolder.open(run)
    if not folder.summary_path.is_file():
        raise RunFolderError(f"{run} has not ended, so there is no summary; see fourstroke why {run}")
    summary = read_summary(folder.summary_path)
    if as_json:
        print(json.dumps(msgspec.to_builtins(summary)))
        return
    PlainReporter(sys.stdout).summary(summary_lines(summary, curves=folder.curves_path))


@app.command()
def episodes(  # noqa: PLR0913 - each is an option of the command
    run: Annotated[Path, typer.Argument(help="A run folder.", show_default=False)],
    *,
    step: Annotated[int | None, typer.Option(help="Training step that used it.")] = None,
    min_score: Annotated[float | None, typer.Option(help="Least score.")] = None,
    max_score: Annotated[float | None, typer.Option(help="Largest score.")] = None,
    stop: Annotated[StopReason | None, typer.Option(help="Why it ended.")] = None,
    unscored: Annotated[bool, typer.Option("--unscored", help="Only those whose grading failed.")] = False,
    task: Annotated[str, typer.Option(help="Beginning of the task's id.")] = "",
    text: Annotated[str, typer.Option(help="What the reply holds, in letters of any case.")] = "",
    limit: Annotated[int, typer.Option(min=1, help="Most episodes to print.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List a run's episodes, the newest first."""
    from fourstroke.store import EpisodeFilter, RunFolder, search_episodes

    chosen = EpisodeFilter(
        step=step,
        min_score=min_score,
        max_score=max_score,
        stop=stop.value if stop else "",
        verdict="unscored" if unscored else "",
        task=task,
    )
    found, has_more = search_episodes(RunFolder.open(run), chosen, text=text, limit=limit)
    if as_json:
        print(json.dumps({"episodes": msgspec.to_builtins(found), "has_more": has_more}))
        return
    for episode in found:
        row = episode.row
        score = row.verdict if row.score is None else f"{row.score:.3f}"
        used = f"step {row.step}" if row.step is not None else row.dropped_for or row.state
        print(printable(f"{row.key}.{row.member}  {used}  {score}  {row.stop}  {row.num_tokens} tokens  {row.task_id}"))
        print(f"  {printable(episode.problem or episode.reply, most=_MOST_REPLY)}")
        if row.reason:
            print(f"  {printable(row.reason, most=_MOST_REPLY)}")
    if has_more or not found:
        print(f"there are more; --limit {2 * limit} prints them" if has_more else "no episode matches")


@models_app.command("list")
def models_list(as_json: AsJson = False) -> None:
    """Print the catalogue."""
    from fourstroke.trainer.catalogue import CATALOGUE

    if as_json:
        print(json.dumps([msgspec.to_builtins(model) for model in CATALOGUE.values()]))
        return
    for model in CATALOGUE.values():
        print(f"{model.name}  {model.num_parameters / 1e6:.1f}M parameters  {model.licence}")


@models_app.command("get")
def models_get(name: Annotated[str, typer.Argument(help="Catalogue name, Hugging Face id or folder.")]) -> None:
    """Make a model ready to use, check its digest, and print its folder."""
    from fourstroke.trainer.catalogue import verify_model

    print(verify_model(name, cache_dir=process_settings().cache_dir))


@app.command()
def dashboard(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run folders, or folders that hold some; without one: runs.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; one that is not loopback needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8765,
    token_file: Annotated[
        Path | None, typer.Option(help="File that holds the token that readers must give.", show_default=False)
    ] = None,
) -> None:
    """Show runs as a local web page, live while they train; prints its address and serves until Ctrl-C."""
    from fourstroke.dashboard.serve import serve

    say = functools.partial(print, flush=True)
    serve(runs or [Path("runs")], host=host, port=port, token_file=token_file, say=say)


@app.command()
def version() -> None:
    """Print the version."""
    print(fourstroke.__version__)


def _run_to_end(main: Any) -> Any:
    """Run a coroutine; Ctrl-C or SIGTERM cancels it cleanly, a second one ends this process and so all of the run."""

    async def guarded_main() -> Any:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(main)
        first_s = math.inf

        def stop(number: int) -> None:
            nonlocal first_s
            # A signal to the whole group comes twice, once by way of the guardian.
            if loop.time() > first_s + _SAME_SIGNAL_S:
                # To die of it lets the guardian see, and say how to go on.
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            if first_s == math.inf:
                first_s = loop.time()
                print("stopping; once more to kill", file=sys.stderr)
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, stop, number)
        return await task

    return asyncio.run(guarded_main())


def main() -> None:
    """Entry point of the ``fourstroke`` command."""
    for stream in (sys.stdout, sys.stderr):
        # What the terminal's encoding has no letter for is shown as an escape, and never ends a run.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except FourstrokeError as error:
        for line in str(error).splitlines():
            print(f"error: {printable(line)}", file=sys.stderr)
        if isinstance(error, ClusterDiedError):
            # At exit Ray would wait for what is gone; the guardian ends what is left.
            sys.stderr.flush()
            sys.stdout.flush()
            os._exit(error.exit_code)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
