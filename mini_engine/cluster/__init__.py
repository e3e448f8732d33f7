"""Several hosts: Ray Serve runs an engine on each, behind fronts, one per host, and scales both by requests in flight.

`serve run mini_engine.cluster:build hosts=3 flags="MODEL -tp 2"`. Only this folder imports Ray, and of this folder
`routing` does not, nor does this file until `build` is called.
"""

import dataclasses
import shlex
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from mini_engine.config import ConfigError, EngineConfig
from mini_engine.launch.cli import parse

if TYPE_CHECKING:
    from ray.serve import Application

FRONT_REQUESTS = 10_000  # of a front, also those that wait for a host: `/health` must find room
HEALTH_MARGIN_SECONDS = 5.0  # beyond `--health-timeout`, for an engine to answer `/health`
OWN_FLAGS = ("host", "port", "uds", "root_path", "api_key", "ssl_keyfile", "ssl_certfile")  # not the engines' here
ENGINE = "mini_engine.launch"  # run on each host, with the id of the process that it is to end with, and flags


class Arguments(BaseModel, extra="forbid"):
    """What `build` takes, as `name=value` of `serve run` or `args` of a YAML."""

    flags: str = ""  # of serve.py, the model first
    hosts: int = 1
    min_hosts: int | None = None  # with `max_hosts`: scaled between the two; each is `hosts` unless given
    max_hosts: int | None = None
    gpus: int = 0  # of each host, which the engine uses
    api_key: str = ""  # that clients must send; none: no key is needed
    target_requests: float | None = None  # in flight per host, at which hosts are added; unset: `--max-num-seqs`
    upscale_delay_s: float = 30.0  # for which requests in flight must exceed the target
    downscale_delay_s: float = 600.0


def build(arguments: Arguments) -> "Application":
    """The application for `serve run` and for a YAML's `import_path`. Serve makes the arguments, as they are annotated.

    Raises:
        ConfigError: `flags` that serve.py would not take, or that are the cluster's to choose.
    """
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig

    from mini_engine.cluster.engine_replica import EngineReplica
    from mini_engine.cluster.front import Front

    flags = shlex.split(arguments.flags)
    config = parse(flags, environ={})
    for name in OWN_FLAGS:
        if getattr(config, name) != getattr(EngineConfig(), name):
            raise ConfigError(f"flags: --{name.replace('_', '-')} is for one engine; see docs/cluster.md#security")
    at_once = config.step_sequences("cpu", recurrent=False) * config.engines
    fewest = arguments.min_hosts or arguments.hosts
    scaling: dict[str, Any] = {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=fewest,
            initial_replicas=max(fewest, arguments.hosts),
            max_replicas=arguments.max_hosts or arguments.hosts,
            target_ongoing_requests=arguments.target_requests or at_once,
            upscale_delay_s=arguments.upscale_delay_s,
            downscale_delay_s=arguments.downscale_delay_s,
        ),
        "graceful_shutdown_timeout_s": config.shutdown_timeout,
    }
    router = RequestRouterConfig(request_router_class="mini_engine.cluster.router:HostAffineRouter")  # type: ignore[arg-type]
    engines = EngineReplica.options(  # type: ignore[attr-defined]
        max_ongoing_requests=4 * at_once,  # more than run: the engine's own queue knows priorities
        ray_actor_options={"num_cpus": 0, "num_gpus": arguments.gpus, "resources": {"engine": 1}},
        request_router_config=router,
        health_check_timeout_s=config.health_timeout + HEALTH_MARGIN_SECONDS,
        **scaling,
    )
    fronts = Front.options(  # type: ignore[attr-defined]
        max_ongoing_requests=FRONT_REQUESTS, max_replicas_per_node=1, ray_actor_options={"num_cpus": 0}, **scaling
    )
    flags += ["--data-parallel-size", str(config.engines)]  # which the limits above count with
    keys = [arguments.api_key] if arguments.api_key else []
    return fronts.bind(engines.bind(ENGINE, flags), dataclasses.replace(config, api_key=keys))
