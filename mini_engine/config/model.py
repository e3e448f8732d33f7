"""What is served, and by which processes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from mini_engine.config.option import ConfigError, check_files, option, parse_length

BUNDLED_NAME = "mini-engine-demo"  # what clients call it
BUNDLED_MODEL = str(Path(__file__).parent.parent / "demo" / "weights")

Backend = Literal["auto", "gloo", "nccl", "shm"]
Device = Literal["auto", "cpu", "cuda"]
AttentionBackendName = Literal["auto", "triton", "sdpa"]
Dtype = Literal["auto", "float32", "float", "bfloat16", "float16", "half"]
EncoderMode = Literal["weights", "data"]
LoadFormat = Literal["auto", "safetensors", "dummy"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The options on the model and its processes."""

    model: str = option(
        BUNDLED_MODEL, "Local directory or hub name of a model.", "Model", unset="the bundled model",
        positional=True, metavar="MODEL",
    )  # fmt: skip
    served_model_name: list[str] = option(
        [], "Names by which clients ask for the model.", "Model", metavar="NAME",
        unset="MODEL, or mini-engine-demo for the bundled one",
    )  # fmt: skip
    revision: str | None = option(None, "Branch, tag or commit of a hub model.", "Model", unset="the hub's main branch")
    trust_remote_code: bool = option(False, "Let the hub model's own processor code run.", "Model")
    chat_template: str | None = option(
        None,
        "File with a Jinja chat template to use instead of the model's.",
        "Model",
        unset="the model's",
        metavar="FILE",
    )
    generation_config: str = option(
        "auto", "Where the defaults of temperature, top_p, top_k, min_p, repetition_penalty and max_tokens come from: "
        "`auto` (the model's generation_config.json), `vllm` (none), or a directory that holds such a file.",
        "Model", metavar="SOURCE",
    )  # fmt: skip
    dtype: Dtype = option(
        "auto", "Number format of weights and activations; `auto` takes the checkpoint's, `float` is float32 and "
        "`half` float16.", "Model",
    )  # fmt: skip
    load_format: LoadFormat = option(
        "auto", "Where weights come from: `safetensors` files, `auto` the same, or `dummy`: random ones, of a model "
        "that needs no more than its config, tokenizer and processor files.", "Model",
    )  # fmt: skip
    device: Device = option("auto", "Where the workers run; `auto` takes CUDA when there is a device.", "Model")
    attention_backend: AttentionBackendName = option(
        "auto", "What computes the decoder's attention: `triton` (this project's kernels), `sdpa` (torch's operators "
        "over gathered blocks), or `auto`: triton on CUDA, sdpa on the CPU.", "Model",
    )  # fmt: skip
    enforce_eager: bool = option(False, "Run decode steps without CUDA graphs.", "Model")
    seed: int = option(0, "Seed of the server's own randomness.", "Model")
    max_model_len: int | None = option(
        None, "Longest prompt and output together, in tokens; `auto` is the default.", "Model", parse=parse_length,
        minimum=1, unset="what the model was made for, or less if the KV cache holds less",
    )  # fmt: skip
    allow_long_max_model_len: bool = option(
        False, "Let --max-model-len be more than the model was made for; what it says then may be nonsense.", "Model"
    )

    tensor_parallel_size: int = option(
        1, "Worker processes that share each layer of the model.", "Processes", short="-tp", minimum=1
    )
    mm_encoder_tp_mode: EncoderMode = option(
        "weights", "What those workers do with the vision tower: `weights` shares out each of its layers too, `data` "
        "keeps it whole on each of them and shares out the images and frames.", "Processes",
    )  # fmt: skip
    distributed_backend: Backend = option(
        "auto", "What carries tensors between those workers: `nccl`; `shm`, memory that they share; `gloo`; or `auto`: "
        "NCCL on CUDA and shared memory on the CPU. With `gloo` asked for, workers may share CUDA devices, which is "
        "slow and meant for tests.", "Processes",
    )  # fmt: skip
    data_parallel_size: int = option(
        1, "Engines, each with its own copy of the model.", "Processes", short="-dp", minimum=1, maximum=64
    )
    api_server_count: int = option(
        1, "Number of API-server processes.", "Processes", short="-asc", minimum=1, maximum=64
    )
    collective_timeout: float = option(
        60.0, "Seconds after which a collective between workers is given up, an engine or API server that gives no "
        "sign of life is killed, or a request is given up whose media do not reach the workers (30 at most).",
        "Processes", minimum=1, maximum=86400,
    )  # fmt: skip
    startup_timeout: float = option(
        600.0,
        "Seconds within which all processes must be ready, or the start fails.",
        "Processes",
        minimum=1,
        maximum=86400,
    )
    health_timeout: float = option(
        10.0, "Seconds within which all workers must answer a ping, or end a running step, for `/health` to be 200.",
        "Processes", minimum=0.1, maximum=3600,
    )  # fmt: skip
    shutdown_timeout: float = option(
        30.0, "Seconds that running requests may take to end after SIGTERM; 0 ends them at once, as SIGINT does.",
        "Processes", minimum=0, maximum=86400,
    )  # fmt: skip

    restart_engine: int = option(
        0, "Times in a row that all engines are started anew after one has died, behind the same sockets; at 0 the "
        "server ends. The flag alone is 3.", "Processes", minimum=0, bare="3", metavar="MAX",
    )  # fmt: skip

    def validate(self) -> None:
        """Raises ConfigError for a path that is not there, or a name that nobody can ask for."""
        check_files({"--chat-template": self.chat_template})
        if self.device == "cpu" and self.distributed_backend == "nccl":
            raise ConfigError("--distributed-backend: nccl needs CUDA devices, not --device cpu; use shm or auto")
        if not all(self.served_model_name):
            raise ConfigError("--served-model-name: a name must not be empty; leave the flag out for the default")

    @property
    def served_names(self) -> list[str]:
        """Names by which clients may ask for the model; the first is the one in responses."""
        default = BUNDLED_NAME if self.model == BUNDLED_MODEL else self.model
        return self.served_model_name or [default]

    def sequence_tokens(self, made_for: int) -> int:
        """Most tokens of prompt and output of a model that was made for `made_for`, unless the KV cache holds less."""
        return self.max_model_len or made_for
