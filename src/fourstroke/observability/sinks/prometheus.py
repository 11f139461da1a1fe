"""The latest numbers for Prometheus to fetch, on this machine alone: its library asks nobody for a token."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fourstroke.observability.sinks.feed import SinkSite

if TYPE_CHECKING:
    from prometheus_client import Gauge


class PrometheusSink:
    """A gauge for each number, in a registry and behind a server of its own.

    Attributes:
        port: Where it is fetched from.

    Example:
        >>> open_sink(site).numbers(1, {"train/loss/loss": 0.5})  # doctest: +SKIP
    """

    def __init__(self, site: SinkSite) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._run = site.run
        self._server, self._thread = start_http_server(
            site.config.prometheus_port, addr="127.0.0.1", registry=self._registry
        )
        self.port = int(self._server.server_port)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """See :class:`fourstroke.observability.sinks.Sink`."""
        from prometheus_client import Gauge

        for name, value in {"step": float(step), **values}.items():
            if name not in self._gauges:
                self._gauges[name] = Gauge(_gauge_name(name), name, ["run"], registry=self._registry)
            self._gauges[name].labels(self._run).set(value)

    def close(self, *, is_finished: bool) -> None:
        """See :class:`fourstroke.observability.sinks.Sink`."""
        del is_finished
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _gauge_name(name: str) -> str:
    return "fourstroke_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)


def open_sink(site: SinkSite) -> PrometheusSink:
    """The sink of a run."""
    return PrometheusSink(site)
