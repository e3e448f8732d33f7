"""The configuration: every option once, with its type, default, help, group and limits.

The command line, the environment variables, `--config`, `--help` and docs/config.md are made from these fields. The
values reach the processes inside `Init`. These files know nothing of models, sockets or torch.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_type_hints

from mini_engine.config.media import IPC_GPU_GIB, LEAST_SLOT, SLOTS_PART, STAGING_SLOTS, MediaOptions, TensorIpc
from mini_engine.config.model import BUNDLED_MODEL, BUNDLED_NAME, AttentionBackendName, ModelOptions
from mini_engine.config.option import ConfigError, Option, check_range, flag_of, parse_options
from mini_engine.config.scheduling import SchedulingOptions
from mini_engine.config.server import ServerOptions

__all__ = [
    "BUNDLED_MODEL", "BUNDLED_NAME", "ENV_PREFIX", "IPC_GPU_GIB", "SLOTS_PART", "STAGING_SLOTS", "AttentionBackendName",
    "ConfigError", "EngineConfig", "Option", "TensorIpc", "env_of", "field_types", "fields", "flag_of",
    "parse_options",
]  # fmt: skip

ENV_PREFIX = "MINI_ENGINE_"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig(MediaOptions, SchedulingOptions, ServerOptions, ModelOptions):  # the last one's fields come first
    """All settings of a server. `validate` has passed for every instance that leaves `cli.settle`."""

    def validate(self) -> None:
        """Raises ConfigError for the first value that is out of range or does not fit the others."""
        kinds = field_types()
        for field in fields():
            check_range(field, kinds[field.name], getattr(self, field.name))
        for group in (ModelOptions, ServerOptions, MediaOptions):
            group.validate(self)
        if self.mm_processor_device == "cuda" and self.device == "cpu":
            raise ConfigError("--mm-processor-device: cuda needs workers on CUDA, not --device cpu; choose cpu")
        slots = self.api_server_count * self.data_parallel_size * STAGING_SLOTS
        least = SLOTS_PART * slots * LEAST_SLOT / (1 << 30)
        if self.mm_processor_device == "cuda" and (self.mm_ipc_gpu_memory_gb or IPC_GPU_GIB) < least:
            raise ConfigError(
                f"--mm-ipc-gpu-memory-gb: {slots} staging slots, {STAGING_SLOTS} from each of {self.api_server_count} "
                f"API server(s) to each of {self.data_parallel_size} engine(s), share a quarter of it; "
                f"set {math.ceil(least * 100) / 100:g} at least"
            )


def fields() -> list[dataclasses.Field[Any]]:
    """The fields of `EngineConfig`, each with an `Option` under `metadata["option"]`; a group's stand together."""
    return list(dataclasses.fields(EngineConfig))


def field_types() -> dict[str, Any]:
    """The resolved type of each field by name."""
    return get_type_hints(EngineConfig)


def env_of(name: str) -> str:
    """`max_num_seqs` -> `MINI_ENGINE_MAX_NUM_SEQS`."""
    return ENV_PREFIX + name.upper()
