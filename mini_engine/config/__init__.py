"""The configuration: every option once, with its type, default, help, group and limits.

The command line, the environment variables, `--config`, `--help` and docs/config.md are made from these fields. The
values reach the processes inside `Init`. These files know nothing of models, sockets or torch.
"""

from __future__ import annotations

import dataclasses
from typing import get_type_hints

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
from mini_engine.config.options import ENV_PREFIX, ConfigError, Setting, flag_of, parse_options, plain_type

__all__ = [
    "BUNDLED_MODEL", "BUNDLED_NAME", "ENV_PREFIX", "IPC_GPU_GIB", "SLOTS_PART", "STAGING_SLOTS", "AttentionBackendName",
    "ConfigError", "EngineConfig", "Setting", "TensorIpc", "fields", "flag_of", "groups", "parse_options",
]  # fmt: skip


def fields() -> list[Setting]:
    """The settings in their order."""
    types = get_type_hints(EngineConfig)
    return [
        Setting(field.name, plain_type(types[field.name]), field.default, field.metadata["option"])
        for field in dataclasses.fields(EngineConfig)
    ]


def groups() -> dict[str, list[Setting]]:
    """The settings by group, in their order."""
    found: dict[str, list[Setting]] = {}
    for setting in fields():
        found.setdefault(setting.opt.group, []).append(setting)
    return found
