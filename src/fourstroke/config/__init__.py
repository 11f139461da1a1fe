"""What a run is: frozen sections, every cross-check, and the algorithm bundles as data.

Loads without torch and without Ray (a test holds it), resolves once, and writes down what it resolved. The only room
that reads environment variables.
"""

from fourstroke.config.bundles import BUNDLES, Bundle
from fourstroke.config.load import dump_config, load_config
from fourstroke.config.process import ProcessSettings, process_settings
from fourstroke.config.references import Reference, resolve_reference
from fourstroke.config.schema import (
    AlgorithmConfig,
    CheckpointConfig,
    DeadlinesConfig,
    EngineConfig,
    EvaluationConfig,
    GraderConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    SinksConfig,
    SupervisionConfig,
    TaskConfig,
    TrainerConfig,
)

__all__ = [
    "BUNDLES",
    "AlgorithmConfig",
    "Bundle",
    "CheckpointConfig",
    "DeadlinesConfig",
    "EngineConfig",
    "EvaluationConfig",
    "GraderConfig",
    "ModelConfig",
    "ProcessSettings",
    "Reference",
    "RolloutConfig",
    "RunConfig",
    "SinksConfig",
    "SupervisionConfig",
    "TaskConfig",
    "TrainerConfig",
    "dump_config",
    "load_config",
    "process_settings",
    "resolve_reference",
]
