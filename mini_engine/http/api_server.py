"""An API server's process: load, prove the transports, say ready, serve, stop. What it serves is in `app.py`."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import torch
import uvloop
import zmq.asyncio

from mini_engine import metrics
from mini_engine.config import ConfigError, EngineConfig
from mini_engine.engine_client import transport_probe
from mini_engine.engine_client.engines import EngineClient, send_now
from mini_engine.engine_client.media_store_client import CacheAccess
from mini_engine.failpoints import reach_failpoint
from mini_engine.http.app import create_app
from mini_engine.http.connections import HttpServer
from mini_engine.http.context import AppContext, ModelAssets
from mini_engine.http.routes.operations import log_stats
from mini_engine.launch.child import Child
from mini_engine.media.decode.decoder_pool import DecoderPool
from mini_engine.media.loader import MediaLoader, start_thread_pool
from mini_engine.media.processor import MediaProcessor
from mini_engine.media.settings import MediaSettingsResolver
from mini_engine.media.sources.policy import MediaPolicy
from mini_engine.messages import ControlReply, ControlRequest, Drain, EngineLimits, Init, PeerGone, Serving, Start
from mini_engine.model.config import ModelConfig
from mini_engine.prompt.detokenizer import Vocabulary
from mini_engine.prompt.pooling_prompts import FLAGS, Task
from mini_engine.prompt.renderer import ChatRenderer
from mini_engine.prompt.sampling_params import SamplingDefaults
from mini_engine.protocol.api_errors import ApiError, shutting_down
from mini_engine.transport.arena import WritableMemory
from mini_engine.transport.codec import decode
from mini_engine.transport.tensor_ipc import TensorIpcSender

logger = logging.getLogger(__name__)

WORK_THREADS = min(32, (os.cpu_count() or 1) + 4)  # as asyncio's own
# So long a thread keeps the interpreter while the event loop waits for it, which happens tens of times in a request.
SWITCH_SECONDS = 0.001  # Python's own 5 ms add up, for each such thread


def run(child: Child, decoders: DecoderPool) -> None:
    """Load and serve, until the supervisor asks for the end. Raises ConfigError: see `load`."""
    init = child.spec.init
    config = init.config
    metrics.engine_restarts.set(init.restarts)
    sizes = config.api_server_count, config.engines, config.tensor_parallel_size
    metrics.parallel_config_info.labels(*sizes).set(1)
    assets = load(init, int(child.spec.index), decoders)
    gc.freeze()  # half a million objects of torch and transformers, which stay: no collector need walk them
    gc.enable()
    sys.setswitchinterval(SWITCH_SECONDS)
    uvloop.run(_main(child, init, assets))


def load(init: Init, index: int, decoders: DecoderPool) -> ModelAssets:
    """Load processor, tokenizer and chat template for API server `index`; a few seconds, most of them imports. Raises
    ConfigError: a setting that the model cannot be served with."""
    reach_failpoint("loading-api")
    # The media threads are the parallelism; torch's own beside them would only take turns with them.
    torch.set_num_threads(1)
    config = init.config
    device = transport_probe.processor_device(config, index)
    if device is not None:
        transport_probe.limit_memory(config, device)
    try:
        processor = MediaProcessor(init.model_dir, trust_remote_code=config.trust_remote_code, device=device)
        model_dir = Path(init.model_dir)
        settings = MediaSettingsResolver(processor, model_dir, config)
        template = Path(config.chat_template).read_text(encoding="utf-8") if config.chat_template else None
        renderer = ChatRenderer(processor.hf_processor, template, config.tool_call_parser, config.reasoning_parser)
        vocabulary = Vocabulary(processor.hf_processor.tokenizer)
        model = ModelConfig.from_dir(init.model_dir)
        vision = model.vision
        processor.check_sizes(vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size)
        task = Task.of(config, model_dir, model.text.hidden_size, model.text.vocab_size, renderer.tokenizer)
    except (OSError, ValueError, ApiError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    defaults = SamplingDefaults.load(init.model_dir, config.generation_config)
    if index == 0 and task.kind != "generate":
        logger.info("no text generation: this server runs as with %s", FLAGS[task.kind])
    media = MediaLoader(processor, media_policy(config), decoders, decoders.max_busy, config.allow_partial_video)
    return ModelAssets(renderer, vocabulary, model.text.vocab_size, settings, media, defaults, task)


def media_policy(config: EngineConfig) -> MediaPolicy:
    """Where media may come from. Raises ConfigError."""
    root = config.allowed_local_media_path
    try:
        path = None if root is None else Path(root)
        return MediaPolicy(path, config.max_media_bytes, config.allowed_media_domains, config.media_fetch_timeout)
    except ValueError as error:
        raise ConfigError(f"--allowed-media-domains: {error}") from None


async def _main(child: Child, init: Init, assets: ModelAssets) -> None:
    asyncio.get_running_loop().set_default_executor(start_thread_pool(WORK_THREADS, "work"))
    arena = transport_probe.make_arena(init.config)
    make_slots = transport_probe.staging_slots(init.config, int(child.spec.index), len(init.cores))
    queues, media = [], "media that do not fit the cache" if init.media_cache.kind == "shm" else "media"
    for engine in range(len(init.cores)):
        queues.append(TensorIpcSender(child.encoder, [rank for rank in init.ranks if rank.engine == engine], arena))
        reason = await transport_probe.choose(engine, init.config.mm_tensor_ipc, queues[-1], make_slots)
        if child.spec.index == "0":
            logger.info("%s reach engine %d by %s: %s", media, engine, queues[-1].placement, reason)
    # The same context, so the same I/O thread, seen through asyncio.
    context = zmq.asyncio.Context(shadow=child.context)
    stores: list[WritableMemory | None] = [*map(WritableMemory, child.spec.media_stores)] or [None] * len(init.cores)
    capacity, max_bytes = init.media_cache.nbytes, init.config.mm_shm_cache_max_object_size_mb << 20
    caches = [CacheAccess(capacity, store, max_bytes) for store in stores]
    engines = EngineClient(context, child.encoder, init.cores, queues, caches)
    await assets.media_loader.decoders.start()
    child.ready()
    link = SupervisorLink(child, engines)
    background = [asyncio.create_task(link.run()), asyncio.create_task(engines.run())]
    if child.spec.index == "0" and not init.config.disable_log_stats:
        background.append(asyncio.create_task(log_stats(engines)))
    serving = asyncio.create_task(_serve(child, init.config, assets, link))
    try:
        # The background tasks have no end of their own: one that is done has failed.
        done, _ = await asyncio.wait([serving, *background], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (serving, *background):
            task.cancel()
        await asyncio.gather(serving, *background, return_exceptions=True)
        assets.media_loader.close()
        engines.close()
        arena.close_memory()
        link.socket.close()


async def _serve(child: Child, config: EngineConfig, assets: ModelAssets, link: SupervisorLink) -> None:
    limits = await link.started
    context = AppContext(assets, config, link.engines, limits, child.spec.incarnation)
    cache = limits.block_size, limits.num_blocks, config.enable_prefix_caching, config.gpu_memory_utilization
    for engine in range(config.engines):
        metrics.cache_config_info.labels(engine, *cache).set(1)
    assets.renderer.max_tokens = limits.max_model_len
    # Decoded frames are only counted, against later requests: what is admitted is decoded in any case, by a bounded
    # number of decoders.
    assets.media_loader.decoders.count_decoded = context.media_bytes.count
    app = create_app(context)
    server = HttpServer(app, config, link.report_serving)

    def stop() -> None:
        link.engines.stop(shutting_down())
        server.should_exit = True

    async def drain() -> None:
        await link.draining.wait()
        await app.state.requests.drain()
        server.should_exit = True

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, stop)  # see ChildProcess.terminate
    assert child.spec.listen_fd is not None, "an API server is started with a socket"
    draining = asyncio.create_task(drain())
    try:
        await server.serve(sockets=[socket.socket(fileno=child.spec.listen_fd)])
    finally:
        draining.cancel()
        context.text_threads.shutdown(wait=False, cancel_futures=True)


class SupervisorLink:
    """The supervisor's messages while this process runs, and the replies."""

    def __init__(self, child: Child, engines: EngineClient):
        self.socket = zmq.asyncio.Socket.from_socket(child.supervisor)
        self.started: asyncio.Future[EngineLimits] = asyncio.get_running_loop().create_future()
        self.draining = asyncio.Event()
        self._encoder = child.encoder
        self.engines = engines

    async def run(self) -> None:
        """Handle messages until cancelled."""
        while True:
            match decode(await self.socket.recv()).body:
                case Start(limits=limits):
                    self.started.set_result(limits)
                case Drain():
                    self.engines.drain()
                    self.draining.set()
                case PeerGone(sender=sender):
                    self.engines.peer_gone(sender)
                case ControlRequest(number=number):
                    send_now(self.socket, self._encoder.encode(ControlReply(number)))

    def report_serving(self) -> None:
        send_now(self.socket, self._encoder.encode(Serving()))
