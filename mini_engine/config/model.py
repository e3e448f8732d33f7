"""What is served, and where the workers run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from mini_engine.config.option import check_files, option

BUNDLED_MODEL = str(Path(__file__).parent.parent / "demo" / "weights")

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
AttentionBackendName = Literal["auto", "triton", "varlen", "sdpa"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The options on the model and its workers."""

    model: str = option(
        BUNDLED_MODEL, "Local directory or hub name of a model. Without it the bundled model is served.", "Model",
        positional=True, metavar="MODEL",
    )  # fmt: skip
    served_model_name: list[str] = option(
        [], "Names by which clients ask for the model; default: MODEL, or `mini-engine-demo` for the bundled one.",
        "Model", metavar="NAME",
    )  # fmt: skip
    revision: str | None = option(None, "Branch, tag or commit of a hub model.", "Model")
    trust_remote_code: bool = option(False, "Let the hub model's own processor code run.", "Model")
    chat_template: str | None = option(None, "File with a Jinja chat template to use instead of the model's.", "Model")
    generation_config: str = option(
        "auto", "Where sampling defaults come from: `auto` (the model's generation_config.json), `vllm` (none), "
        "or a directory that holds such a file.", "Model",
    )  # fmt: skip
    dtype: Dtype = option("auto", "Number format of weights and activations; `auto` takes the checkpoint's.", "Model")
    device: Device = option("auto", "Where the workers run; `auto` takes CUDA when there is a device.", "Model")
    attention_backend: AttentionBackendName = option(
        "auto", "What computes the decoder's attention: `triton` (this project's kernels), `varlen` (torch's varlen_attn, "
        "from torch 2.12 on), `sdpa` (torch's operators over gathered blocks), or `auto`: triton on CUDA, sdpa on the "
        "CPU.", "Model",
    )  # fmt: skip
    enforce_eager: bool = option(
        False, "Launch every operator of a decode step by itself; otherwise CUDA replays recorded graphs of such steps. "
        "No effect on the CPU.", "Model",
    )  # fmt: skip
    seed: int = option(0, "Seed of the server's own randomness.", "Model")
    max_model_len: int | None = option(
        None, "Longest prompt and output together, in tokens; default: what the model was made for.", "Model", minimum=1
    )

    tensor_parallel_size: int = option(
        1, "Worker processes that share each layer of the model.", "Parallelism", short="-tp", minimum=1
    )
    data_parallel_size: int = option(
        1, "Engines, each with its own copy of the model.", "Parallelism", short="-dp", minimum=1
    )
    collective_timeout: float = option(
        60.0,
        "Seconds after which a collective between workers is given up, or a request whose media do not reach "
        "them (30 at most).",
        "Parallelism",
        minimum=1,
    )

    def validate(self) -> None:
        """Raises ConfigError for a path that is not there."""
        check_files({"--chat-template": self.chat_template})

    @property
    def served_names(self) -> list[str]:
        """Names by which clients may ask for the model; the first is the one in responses."""
        default = "mini-engine-demo" if self.model == BUNDLED_MODEL else self.model
        return self.served_model_name or [default]
