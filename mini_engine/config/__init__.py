"""The configuration: every option once, with its type, default, help, group and limits.

The command line, the environment variables, `--config`, `--help` and docs/config.md are made from these fields. The
values reach the processes inside `Init`. These files know nothing of models, sockets or torch.
"""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

from mini_engine.config.engine_config import (
    BUNDLED_MODEL,
    BUNDLED_NAME,
    IPC_GPU_GIB,
    SLOTS_PART,
    STAGING_SLOTS,
    AttentionBackendName,
    EngineConfig,
    TensorIpc,
)
from mini_engine.config.options import ConfigError, Option, flag_of, parse_options

__all__ = [
    "BUNDLED_MODEL", "BUNDLED_NAME", "ENV_PREFIX", "IPC_GPU_GIB", "SLOTS_PART", "STAGING_SLOTS", "AttentionBackendName",
    "ConfigError", "EngineConfig", "Option", "TensorIpc", "env_of", "field_types", "fields", "flag_of",
    "parse_options",
]  # fmt: skip

ENV_PREFIX = "MINI_ENGINE_"


def fields() -> list[dataclasses.Field[Any]]:
    """The fields of `EngineConfig`, each with an `Option` under `metadata["option"]`; a group's stand together."""
    return list(dataclasses.fields(EngineConfig))


def field_types() -> dict[str, Any]:
    """The resolved type of each field by name."""
    return get_type_hints(EngineConfig)


def env_of(name: str) -> str:
    """`max_num_seqs` -> `MINI_ENGINE_MAX_NUM_SEQS`."""
    return ENV_PREFIX + name.upper()
