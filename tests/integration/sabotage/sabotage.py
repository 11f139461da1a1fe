"""Kills a run at a named point from inside the process that is at it; the code under test knows nothing of this.

    test --environment--> guardian -> driver -> Ray -> actors -> vLLM's core, graders
                             each: sitecustomize -> arm: wrap one function when its module is imported
                                                     '-> its n-th call kills, and goes no further

Variables: ``SABOTAGE_POINT`` is ``name:n``; ``SABOTAGE_LOG`` is a file that gets a line for each kill;
``SABOTAGE_WITNESS`` is a file that gets the groups of each batch that the trainer reads, which is a second account
beside the ledger; ``SABOTAGE_TEAR`` is the number of a publication that loses a byte on its way. Calls are counted in
each process by itself.
"""

import functools
import importlib.abc
import inspect
import itertools
import json
import os
import signal
import sys
import threading
from pathlib import Path

# Name of a point: module, attribute there, and whether the call is made before the kill.
POINTS = {
    "open": ("fourstroke.store.ledger", "Ledger.open_incarnation", "after"),
    "evaluation": ("fourstroke.evaluation.evaluate", "_group", "before"),
    "admission": ("fourstroke.store.ledger", "Ledger.admit", "after"),
    "admission-before": ("fourstroke.store.ledger", "Ledger.admit", "before"),
    "attempt": ("fourstroke.store.ledger", "Ledger.begin_attempt", "after"),
    "rollout": ("fourstroke.engines.vllm_member", "Member.take", "before"),
    "grading": ("fourstroke.rewards.grading", "grade", "before"),
    "storing": ("fourstroke.store.payload", "PayloadWriter.append", "after"),
    "receipt-before": ("fourstroke.store.ledger", "Ledger.receive", "before"),
    "receipt": ("fourstroke.store.ledger", "Ledger.receive", "after"),
    "prepare": ("fourstroke.orchestration.actors", "read_rows", "after"),
    "backward": ("fourstroke.trainer.engine", "torch.Tensor.backward", "after"),
    "optimiser": ("fourstroke.trainer.optimiser", "torch.optim.AdamW.step", "after"),
    "publication": ("fourstroke.weights.publish", "Publisher._write", "after"),
    "verification": ("fourstroke.weights.receive", "tensor_digest", "after"),
    "loading": ("fourstroke.engines.vllm_worker", "reload_weights", "after"),
    "commit-before": ("fourstroke.store.ledger", "Ledger.mark_trained", "before"),
    "commit": ("fourstroke.store.ledger", "Ledger._leave_pending", "after"),
    "commit-after": ("fourstroke.store.ledger", "Ledger.mark_trained", "after"),
    "checkpoint": ("fourstroke.trainer.checkpoint", "_digest", "before"),
    "checkpoint-unnamed": ("fourstroke.trainer.checkpoint", "write_atomic", "after"),
    "checkpoint-named": ("fourstroke.trainer.checkpoint", "sync_folder", "before"),
    "retention": ("fourstroke.store.checkpoints", "sync_folder", "before"),
    "loaded": ("fourstroke.trainer.engine", "TorchTrainer.load", "after"),
    "export": ("fourstroke.trainer.model", "PolicyModel.export", "before"),
    "exported": ("fourstroke.trainer.model", "PolicyModel.export", "after"),
    "shutdown": ("fourstroke.engines.vllm", "VllmEngine.close", "before"),
    "shutdown-ray": ("fourstroke.orchestration.placement", "Cluster.stop", "before"),
    "summary": ("fourstroke.store.run_folder", "RunFolder.write_summary", "before"),
}
# Each wait of the train loop, in the driver: as it begins, and as it ends.
for _module, _owner, _verbs in (
    ("placement", "RayTrainer", ("prepare", "forward_backward", "optim_step", "publish", "save", "flush")),
    ("placement", "RayEngine", ("pause", "update_weights", "resume")),
    ("controller", "Controller", ("_finish_step", "_give_back")),
):
    for _verb in _verbs:
        for _when in ("before", "after"):
            POINTS[f"{_when}-{_verb.strip('_')}"] = (f"fourstroke.orchestration.{_module}", f"{_owner}.{_verb}", _when)


def arm():
    """Wrap what the variables ask for, once it is imported."""
    # The first process of a tree is the one that becomes the guardian.
    os.environ.setdefault("SABOTAGE_ROOT", str(os.getpid()))
    wanted = []
    if "SABOTAGE_POINT" in os.environ:
        name, _, number = os.environ["SABOTAGE_POINT"].partition(":")
        module, path, when = POINTS[name]
        wanted.append((module, path, functools.partial(_deadly, at=int(number), when=when)))
    if "SABOTAGE_WITNESS" in os.environ:
        wanted.append(("fourstroke.orchestration.actors", "read_rows", _witnessed))
    if "SABOTAGE_TEAR" in os.environ:
        wanted.append(("fourstroke.weights.publish", "Publisher.publish", _torn))
    if wanted:
        sys.meta_path.insert(0, _Finder(wanted))


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps attributes of a module as soon as its code has run, so that whoever imports from it gets the wrapped."""

    def __init__(self, wanted):
        self._wanted = wanted

    def find_spec(self, fullname, path=None, target=None):
        changes = [(attribute, wrap) for module, attribute, wrap in self._wanted if module == fullname]
        if not changes:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(spec for finder in others if (spec := finder.find_spec(fullname, path, target)) is not None)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            for attribute, wrap in changes:
                *owners, name = attribute.split(".")
                owner = functools.reduce(getattr, owners, module)
                setattr(owner, name, wrap(getattr(owner, name)))

        spec.loader.exec_module = exec_module
        return spec


def _deadly(function, *, at, when):
    calls = itertools.count(1)

    def passes(moment):
        # The count goes up before the call; after it the same number is looked at again.
        return moment == when and next(calls) == at

    @functools.wraps(function)
    def plain(*arguments, **keywords):
        if passes("before"):
            kill_driver()
        result = function(*arguments, **keywords)
        if passes("after"):
            kill_driver()
        return result

    @functools.wraps(function)
    async def asynchronous(*arguments, **keywords):
        if passes("before"):
            kill_driver()
        result = await function(*arguments, **keywords)
        if passes("after"):
            kill_driver()
        return result

    return asynchronous if inspect.iscoroutinefunction(function) else plain


def _witnessed(function):
    @functools.wraps(function)
    def reading(batch, payload_dir):
        with Path(os.environ["SABOTAGE_WITNESS"]).open("a") as file:
            file.write(json.dumps({"step": batch.step, "groups": sorted(batch.references)}) + "\n")
        return function(batch, payload_dir)

    return reading


def _torn(function):
    @functools.wraps(function)
    def publishing(self, number, *arguments, **keywords):
        publication = function(self, number, *arguments, **keywords)
        if number == int(os.environ["SABOTAGE_TEAR"]):
            with Path(publication.path).open("r+b") as file:
                (first,) = file.read(1)
                file.seek(0)
                file.write(bytes([first ^ 1]))
        return publication

    return publishing


def kill_driver():
    """Kill the driver of this process's run, and stand still until the guardian has killed this process too."""
    with Path(os.environ["SABOTAGE_LOG"]).open("a") as file:
        file.write(os.environ["SABOTAGE_POINT"] + "\n")
    os.kill(driver_of(int(os.environ["SABOTAGE_ROOT"])), signal.SIGKILL)
    threading.Event().wait()


def driver_of(guardian):
    """Process id of the driver: of the guardian's children the one that was forked from it, not started anew."""
    import psutil

    root = psutil.Process(guardian)
    (driver,) = [child.pid for child in root.children() if child.cmdline() == root.cmdline()]
    return driver
