"""The run folder: layout, schema, ledger, payload, readers. The only room that touches SQLite."""

from fourstroke.store.episodes import (
    EpisodeFilter,
    EpisodeIndex,
    EpisodeOrder,
    EpisodePage,
    EpisodeRow,
    ledger_files,
    read_reference,
)
from fourstroke.store.files import stamp, write_atomic, writing
from fourstroke.store.ledger import LOST, Audit, Incarnation, Ledger, PendingDraw
from fourstroke.store.payload import PayloadWriter, read_payload
from fourstroke.store.readers import read_events, read_metrics, read_summary, read_waits
from fourstroke.store.run_folder import RunFolder, RunIdentity
from fourstroke.store.search import FoundEpisode, read_group, search_episodes
from fourstroke.store.summary import RunStatus, Summary

__all__ = [
    "LOST",
    "Audit",
    "EpisodeFilter",
    "EpisodeIndex",
    "EpisodeOrder",
    "EpisodePage",
    "EpisodeRow",
    "FoundEpisode",
    "Incarnation",
    "Ledger",
    "PayloadWriter",
    "PendingDraw",
    "RunFolder",
    "RunIdentity",
    "RunStatus",
    "Summary",
    "ledger_files",
    "read_events",
    "read_group",
    "read_metrics",
    "read_payload",
    "read_reference",
    "read_summary",
    "read_waits",
    "search_episodes",
    "stamp",
    "write_atomic",
    "writing",
]
