"""Images and videos: where they come from, what they may cost, how they reach the workers."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Literal

from mini_engine.config.option import ConfigError, option, parse_bytes, parse_json_object, parse_limits
from mini_engine.decode_limits import MOST_FRAMES_KEPT, DecodeLimits

MediaCacheType = Literal["auto", "lru", "shm"]
TensorIpc = Literal["auto", "torch_shm", "direct_rpc"]
ProcessorDevice = Literal["cpu", "cuda"]

IPC_GPU_GIB = 4.0  # --mm-ipc-gpu-memory-gb where it is not given
SLOTS_PART = 4  # a quarter of that memory is for patches on their way
STAGING_SLOTS = 8  # messages on their way from an API server to an engine at once: a part of that quarter for each
LEAST_SLOT = 1 << 20  # bytes of a slot: less would hold the patches of small images only


@dataclasses.dataclass(frozen=True, kw_only=True)
class MediaOptions:
    """The options on media and the data plane."""

    limit_mm_per_prompt: dict[str, Any] = option(
        {}, 'Most items of each modality in one prompt, such as \'{"video": 1, "image": 4}\' or video=1,image=4.',
        "Media",
        parse=parse_limits, metavar="JSON", unset="no limit",
    )  # fmt: skip
    media_io_kwargs: dict[str, dict[str, Any]] = option(
        {}, 'How media are read, such as \'{"video": {"num_frames": 10}}\' or \'{"video": {"fps": 2}}\'.', "Media",
        parse=parse_json_object, metavar="JSON", unset="the model's own sampling",
    )  # fmt: skip
    mm_processor_kwargs: dict[str, Any] = option(
        {}, "Arguments for the model's Hugging Face processor, such as "
        '\'{"size": {"shortest_edge": 3136, "longest_edge": 50176}}\'.', "Media",
        parse=parse_json_object, metavar="JSON", unset="the model's own",
    )  # fmt: skip
    allow_partial_video: bool = option(
        False, "Answer about a video that is cut short or damaged from what can be read of it, with a warning; "
        "otherwise it is refused.", "Media",
    )  # fmt: skip

    allowed_local_media_path: str | None = option(
        None, "Directory below which `file://` media may be read.", "Media sources", metavar="DIRECTORY", unset="none"
    )
    allowed_media_domains: list[str] = option(
        [], "Hosts from which `http(s)://` media may be fetched. All addresses of a host name must be public, or in "
        "networks that are listed too, such as 10.0.0.0/8 or fd00::/8. An address, such as 127.0.0.1:8080, is allowed "
        "in URLs as it stands; a network is not.", "Media sources", metavar="HOST[:PORT]", unset="none",
    )  # fmt: skip
    allow_media_redirects: bool = option(
        False, "Follow redirects to other hosts of --allowed-media-domains.", "Media sources"
    )
    media_fetch_timeout: float = option(
        30.0, "Seconds within which an `http(s)://` item must be fetched.", "Media sources", minimum=0.1, maximum=3600
    )

    max_media_bytes: int = option(
        256 << 20, "Largest encoded image or video accepted.", "Media limits", parse=parse_bytes, minimum=1,
        maximum=(2 << 30) - 4096,  # what Linux writes at once
    )  # fmt: skip
    max_image_pixels: int = option(DecodeLimits.max_image_pixels, "Most pixels of an image.", "Media limits", minimum=1)
    max_frame_pixels: int = option(
        DecodeLimits.max_frame_pixels, "Most pixels of a video's frame.", "Media limits", minimum=1
    )
    max_video_seconds: float = option(
        DecodeLimits.max_video_seconds, "Longest video, in seconds.", "Media limits", minimum=0.1
    )
    max_video_frames: int = option(
        DecodeLimits.max_video_frames, "Most frames of a video file.", "Media limits", minimum=1
    )
    max_video_frames_kept: int = option(
        DecodeLimits.max_video_frames_kept, "Most frames that may be sampled from a video.", "Media limits",
        minimum=1, maximum=MOST_FRAMES_KEPT,
    )  # fmt: skip
    max_video_pixels_kept: int = option(
        DecodeLimits.max_video_pixels_kept, "Most pixels of all frames sampled from a video; larger frames are scaled "
        "down to fit.", "Media limits", minimum=1,
    )  # fmt: skip
    media_decode_timeout: float = option(
        DecodeLimits.media_decode_timeout, "Seconds within which an image or video must be decoded.", "Media limits",
        minimum=0.1, maximum=3600,
    )  # fmt: skip
    media_decoder_memory: int = option(
        DecodeLimits.media_decoder_memory, "Most memory that a decoder process may take for one image or video, beside "
        "itself, the encoded file and the frames that it keeps.", "Media limits", parse=parse_bytes, minimum=64 << 20,
    )  # fmt: skip

    maximum_concurrent_videos: int = option(
        64, "Most images and videos per API server admitted to decoding and processing at once; more wait in line.",
        "Admission", minimum=1,
    )  # fmt: skip
    max_num_queued_reqs: int = option(
        4096, "Most requests per API server that are not finished yet, whatever they wait for; "
        "one more is refused with 429.", "Admission", minimum=1,
    )  # fmt: skip
    max_inflight_media_gb: float = option(
        4.0, "Most encoded images and videos per API server, in GiB, that requests hold until an engine has taken "
        "them over; reserved before they are fetched, and never exceeded by downloads. Decoded frames count until they "
        "are processed. Bodies that are being received may have as much again. A request that finds no room is refused "
        "with 429.", "Admission",
        minimum=0.001,
    )  # fmt: skip
    max_request_bytes: int = option(
        1 << 30, "Longest body of a request; what it holds in `data:` URLs is 4/3 of its size.", "Admission",
        parse=parse_bytes, minimum=1,
    )  # fmt: skip

    mm_processor_cache_type: MediaCacheType = option(
        "auto", "Where processed media are kept for requests that bring them again: `shm` (in shared memory, once for "
        "all workers), `lru` (a copy in each worker), or `auto`: `shm` where the host allows it.",
        "Media cache and transport",
    )  # fmt: skip
    mm_processor_cache_gb: float | None = option(
        None, "Most memory for them, in GiB: of all API servers together (shm), or of each worker (lru); 0 turns it "
        "off.", "Media cache and transport", minimum=0, unset="4, or a quarter of the free memory where that is less",
    )  # fmt: skip
    mm_shm_cache_max_object_size_mb: int = option(
        128, "Largest item kept in shared memory, in MiB; a larger one is handed to the workers uncached.",
        "Media cache and transport", minimum=1,
    )  # fmt: skip
    mm_tensor_ipc: TensorIpc = option(
        "auto", "How media tensors that are not in the cache's shared memory reach the workers: `torch_shm` (shared "
        "memory), `direct_rpc` (copied through a socket), or `auto`: the first that passes its probe.",
        "Media cache and transport",
        twins={"--enable-multimodal-tensor-ipc": "torch_shm", "--disable-multimodal-tensor-ipc": "direct_rpc"},
    )  # fmt: skip
    mm_ipc_memory_bytes: int = option(
        1 << 30, "Most memory per API server for tensors on their way to the workers, by whichever transport, in "
        "pages of 64 KiB; a request that finds none waits.", "Media cache and transport", parse=parse_bytes,
        minimum=1 << 20,
    )  # fmt: skip

    mm_processor_device: ProcessorDevice = option(
        "cpu", "Where frames become patches: `cpu`, or `cuda`, from where they go to the workers without a way by the "
        "host.", "Media cache and transport",
    )  # fmt: skip
    mm_ipc_gpu_memory_gb: float | None = option(
        None, "Most memory of CUDA devices that all API servers together take for such patches, in GiB, taken off the "
        "KV cache with 1 GiB more for CUDA itself in each of them. Three quarters are for making the patches: an item "
        "that needs more is made on the CPU. A quarter is divided into slots for those on their way, eight for each "
        "API server and engine: a prompt whose patches find none idle, or are too large for one, goes by the host. "
        "Both are counted.",
        "Media cache and transport", unset="4, where the patches are made on CUDA", minimum=0.01,
    )  # fmt: skip

    def validate(self) -> None:
        """Raises ConfigError for the first value that names what does not exist."""
        if self.mm_processor_device == "cpu" and self.mm_ipc_gpu_memory_gb is not None:
            raise ConfigError("--mm-ipc-gpu-memory-gb is for --mm-processor-device cuda; leave it out, or set that")
        if self.mm_processor_device == "cuda" and self.mm_processor_cache_type == "shm":
            raise ConfigError(
                "--mm-processor-device cuda: patches on a device are not kept in shared memory; choose "
                "--mm-processor-cache-type lru or auto"
            )
        if self.mm_processor_device == "cuda" and self.mm_tensor_ipc == "direct_rpc":
            raise ConfigError(
                "--mm-processor-device cuda: direct_rpc carries no patches on a device; choose --mm-tensor-ipc auto"
            )
        for modality, limit in self.item_limits.items():
            if (modality, limit) == ("audio", 0):
                continue  # none is taken in any case
            if modality not in ("image", "video") or not isinstance(limit, int) or limit < 0:
                raise ConfigError(
                    f"--limit-mm-per-prompt: {modality!r}: {limit!r} is not one of image, video with a count >= 0"
                )
        for modality, kwargs in self.media_io_kwargs.items():
            if modality not in ("image", "video") or not isinstance(kwargs, dict):
                raise ConfigError(f"--media-io-kwargs: {modality!r} must be image or video, with a JSON object")
            if modality == "image" and kwargs:
                raise ConfigError("--media-io-kwargs: images take no arguments")
        if self.allowed_local_media_path is not None and not os.path.isdir(self.allowed_local_media_path):
            raise ConfigError(f"--allowed-local-media-path: {self.allowed_local_media_path} is not a directory")

    @property
    def item_limits(self) -> dict[str, int]:
        """Most items in one prompt, by modality; vLLM's `{"image": {"count": 4}}` is 4."""
        limits = self.limit_mm_per_prompt.items()
        counts = {name: one.get("count", ...) if isinstance(one, dict) else one for name, one in limits}
        return {name: count for name, count in counts.items() if count is not ...}
