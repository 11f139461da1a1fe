"""What a run shows of itself: metrics, events, memory, the terminal and the picture. Knows no run folder."""

from fourstroke.observability.clock import unix_now, utc_now
from fourstroke.observability.events import Event, EventKind
from fourstroke.observability.memory import MemorySampler, tree_pss_bytes
from fourstroke.observability.metrics import METRICS, Metric, MetricBook, Reducer
from fourstroke.observability.picture import draw_curves
from fourstroke.observability.processes import die_with_parent
from fourstroke.observability.terminal import LiveReporter, PlainReporter, Reporter, duration, make_reporter, printable

__all__ = [
    "METRICS",
    "Event",
    "EventKind",
    "LiveReporter",
    "MemorySampler",
    "Metric",
    "MetricBook",
    "PlainReporter",
    "Reducer",
    "Reporter",
    "die_with_parent",
    "draw_curves",
    "duration",
    "make_reporter",
    "printable",
    "tree_pss_bytes",
    "unix_now",
    "utc_now",
]
