"""Copies of a run's numbers for other tools: TensorBoard, Weights & Biases, MLflow, Prometheus.

The run folder is the truth. A sink is told only what the folder has: the record of a step, and events, of which it gets
counts and evaluations as numbers. No text of a model reaches it, no part of a run reads it, and its failure is said
once and stops nothing.
"""

from fourstroke.observability.sinks.feed import Sink, SinkFeed, SinkSite, check_sinks

__all__ = ["Sink", "SinkFeed", "SinkSite", "check_sinks"]
