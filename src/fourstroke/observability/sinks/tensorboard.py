"""Scalars for TensorBoard, in ``<run>/sinks/tensorboard``: ``tensorboard --logdir runs`` shows all runs."""

from __future__ import annotations

from collections.abc import Mapping

from fourstroke.observability.sinks.feed import SinkSite


class TensorBoardSink:
    """Writes one event file.

    Example:
        >>> open_sink(site).numbers(1, {"train/loss/loss": 0.5})  # doctest: +SKIP
    """

    def __init__(self, site: SinkSite) -> None:
        from tensorboard import summary

        self._writer = summary.Writer(str(site.folder / "tensorboard"))

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """See :class:`fourstroke.observability.sinks.Sink`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, *, is_finished: bool) -> None:
        """See :class:`fourstroke.observability.sinks.Sink`."""
        del is_finished
        self._writer.close()


def open_sink(site: SinkSite) -> TensorBoardSink:
    """The sink of a run."""
    return TensorBoardSink(site)
