"""The configuration: every option once, with its type, default, help, group and limits.

The command line, the environment variables, `--config`, `--help` and docs/config.md are made from these fields. The
values reach the processes inside `Init`. These files know nothing of models, sockets or torch.
"""

from mini_engine.config.engine_config import BUNDLED_MODEL, BUNDLED_NAME, IPC_GPU_GIB, SLOTS_PART, STAGING_SLOTS
from mini_engine.config.engine_config import ENCODER_TOKENS, AttentionBackendName, TensorIpc
from mini_engine.config.engine_config import MOST_FRAMES_KEPT, EngineConfig, fields, groups
from mini_engine.config.model_files import read_json_object
from mini_engine.config.options import ENV_PREFIX, ConfigError, Setting, flag_of
