"""Runs for Weights & Biases, by default offline, in ``<run>/sinks/wandb``: ``wandb sync`` uploads them.

The library decides about keys and hosts by its own settings. It gets neither code, nor the machine's figures, nor what
the terminal shows.
"""

from __future__ import annotations

from collections.abc import Mapping

from fourstroke.observability.sinks.feed import SinkSite

_STEP = "step"


class WandbSink:
    """One run of Weights & Biases, gone on with when ours is resumed.

    Example:
        >>> open_sink(site).numbers(1, {"train/loss/loss": 0.5})  # doctest: +SKIP
    """

    def __init__(self, site: SinkSite) -> None:
        import wandb

        folder = site.folder / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            silent=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        self._run = wandb.init(
            project=site.config.project,
            dir=folder,
            id=site.run,
            name=site.run,
            config=dict(site.settings),
            mode=site.config.wandb_mode,
            # Offline there is nothing to ask whether the run is known: `wandb sync` joins its parts by the id.
            resume="allow" if site.config.wandb_mode == "online" else None,
            settings=settings,
        )
        # A step of ours may come again, which its own count of steps does not allow.
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """See :class:`fourstroke.observability.sinks.Sink`."""
        self._run.log({_STEP: step, **values})

    def close(self, *, is_finished: bool) -> None:
        """See :class:`fourstroke.observability.sinks.Sink`."""
        self._run.finish(exit_code=0 if is_finished else 1)


def open_sink(site: SinkSite) -> WandbSink:
    """The sink of a run."""
    return WandbSink(site)
