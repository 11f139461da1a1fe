"""Runs for MLflow, on the server or in the database that ``sinks.mlflow_uri`` names."""

from __future__ import annotations

from collections.abc import Mapping

from fourstroke.observability.sinks.feed import SinkSite

_TAG = "fourstroke.run"
# MLflow refuses longer values and larger batches.
_MOST_VALUE, _MOST_BATCH = 6000, 100


class MlflowSink:
    """One run of MLflow, gone on with when ours is resumed.

    Example:
        >>> open_sink(site).numbers(1, {"train/loss/loss": 0.5})  # doctest: +SKIP
    """

    def __init__(self, site: SinkSite) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient(site.config.mlflow_uri)
        experiment = self._client.get_experiment_by_name(site.config.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(site.config.project)
        known = self._client.search_runs([number], f"tags.`{_TAG}` = '{site.run}'", max_results=1)
        if known:
            self._run = known[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        self._run = self._client.create_run(number, run_name=site.run, tags={_TAG: site.run}).info.run_id
        params = [Param(key, str(value)[:_MOST_VALUE]) for key, value in _leaves(site.settings)]
        for start in range(0, len(params), _MOST_BATCH):
            self._client.log_batch(self._run, params=params[start : start + _MOST_BATCH])

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """See :class:`fourstroke.observability.sinks.Sink`."""
        from mlflow.entities import Metric
        from mlflow.utils.time import get_current_time_millis

        now_ms = get_current_time_millis()
        self._client.log_batch(self._run, metrics=[Metric(name, value, now_ms, step) for name, value in values.items()])

    def close(self, *, is_finished: bool) -> None:
        """See :class:`fourstroke.observability.sinks.Sink`."""
        self._client.set_terminated(self._run, status="FINISHED" if is_finished else "FAILED")


def _leaves(settings: Mapping[str, object], prefix: str = "") -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for key, value in settings.items():
        found += _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [(prefix + key, value)]
    return found


def open_sink(site: SinkSite) -> MlflowSink:
    """The sink of a run."""
    return MlflowSink(site)
