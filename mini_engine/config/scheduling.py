"""What a step computes, and what is kept of it."""

from __future__ import annotations

import dataclasses

from mini_engine.config.option import option, parse_bytes, parse_count

# Tokens in a step where no flag says, by kind of device: so many that a step of a large model is neither wasted on its
# fixed cost nor much longer than people want to wait for a token.
_STEP_TOKENS = {"cpu": 512, "cuda": 2048}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulingOptions:
    """The options on scheduling."""

    max_num_seqs: int = option(64, "Most sequences computed in one step.", "Scheduling", minimum=1)
    max_num_batched_tokens: int | None = option(
        None, "Most tokens computed in one step, media tokens in the vision tower among them; longer prompts are "
        "computed in chunks.", "Scheduling", parse=parse_count, minimum=1, unset="512 on the CPU, 2048 on CUDA",
    )  # fmt: skip
    long_prefill_token_threshold: int | None = option(
        None, "Most tokens of one prompt computed in one step while other prompts wait; 0: no such bound.",
        "Scheduling", minimum=0, unset="half of --max-num-batched-tokens",
    )  # fmt: skip
    max_num_encoder_input_tokens: int | None = option(
        None, "Most media tokens encoded in one step; a longer video is encoded over several steps.",
        "Scheduling", minimum=1, unset="--max-num-batched-tokens",
    )  # fmt: skip
    async_scheduling: bool = option(
        True, "Schedule and dispatch the next step while the workers run the present one.", "Scheduling"
    )

    enable_prefix_caching: bool = option(
        True, "Keep the KV blocks of finished requests, for prompts that begin alike.", "Caches of the workers"
    )
    block_size: int = option(16, "Tokens in one block of the KV cache.", "Caches of the workers", minimum=1)
    kv_cache_memory_bytes: int | None = option(
        None, "Size of each worker's KV cache. No more is taken than --max-num-seqs sequences of --max-model-len "
        "tokens fill.", "Caches of the workers", parse=parse_bytes, minimum=1,
        unset="1G on the CPU, --gpu-memory-utilization on CUDA",
    )  # fmt: skip
    gpu_memory_utilization: float = option(
        0.9, "Share of a CUDA device's memory that its workers may take for everything: weights, media, the largest "
        "step, and the KV cache, which gets what is left; no effect on the CPU.",
        "Caches of the workers", minimum=0.05, maximum=1.0,
    )  # fmt: skip
    num_gpu_blocks_override: int | None = option(
        None, "Number of KV-cache blocks, on any device, in place of the two before.", "Caches of the workers",
        minimum=1, unset="as many as the memory for them holds",
    )  # fmt: skip
    encoder_cache_tokens: int = option(
        65536, "Most media tokens whose embeddings the workers keep, for running requests and for those to come; "
        "also the most that one prompt may hold.", "Caches of the workers", minimum=1,
    )  # fmt: skip

    def step_tokens(self, device: str) -> int:
        """Most tokens computed in one step of workers on `device`, "cpu" or "cuda"."""
        return self.max_num_batched_tokens or _STEP_TOKENS[device]

    def step_media_tokens(self, device: str) -> int:
        """Most media tokens encoded in one step of workers on `device`, "cpu" or "cuda"."""
        return self.max_num_encoder_input_tokens or self.step_tokens(device)
