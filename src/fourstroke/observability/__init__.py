"""What a run shows of itself: metrics, events, memory, the terminal and the picture. Knows no run folder."""

from fourstroke.observability.clock import monotonic_s, unix_now, utc_now
from fourstroke.observability.events import Event, EventKind
from fourstroke.observability.memory import MemorySampler, tree_pss_bytes
from fourstroke.observability.metrics import METRICS, Metric, MetricBook, Reducer
from fourstroke.observability.picture import draw_curves
from fourstroke.observability.processes import die_with_parent, give_back_heap
from fourstroke.observability.terminal import LiveReporter, PlainReporter, Reporter, duration, make_reporter, printable
from fourstroke.observability.waits import Waits, WaitsReport, describe_waits

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
    "Waits",
    "WaitsReport",
    "describe_waits",
    "die_with_parent",
    "draw_curves",
    "duration",
    "give_back_heap",
    "make_reporter",
    "monotonic_s",
    "printable",
    "tree_pss_bytes",
    "unix_now",
    "utc_now",
]
