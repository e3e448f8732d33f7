"""The command line of `serve.py`: settings from flags, variables and a file, merged; then the server.

A value is taken from the flag, else from `MINI_ENGINE_<FIELD>`, else from the file of `--config`, else from the field's
default. What `--help` looks like is in `cli_help.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, get_origin

from mini_engine import log
from mini_engine.cli_help import build_parser
from mini_engine.config import ConfigError, EngineConfig, field_types, flag_of
from mini_engine.config.sources import (
    CONFIG_ENV,
    Given,
    from_environment,
    from_file,
    read,
    suggestion,
    to_yaml,
    unknown_variables,
)
from mini_engine.config.vllm_flags import NO_EFFECT, NOT_SUPPORTED, no_effect_line

logger = logging.getLogger(__name__)
INTERRUPTED = 128 + signal.SIGINT  # the exit status of a shell's command that Ctrl-C has ended


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a command line and its surroundings ask for."""

    config: EngineConfig
    origins: dict[str, str]  # what gave each field that does not have its default, such as `--port`
    warnings: list[str]
    notes: list[str]  # on flags of vLLM that change nothing here
    print_config: bool = False


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> EngineConfig:
    """The configuration for these arguments; see `settle`."""
    return settle(argv, os.environ if environ is None else environ).config


def settle(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """The settings for these arguments and variables, and for the file that either of them names.

    Raises:
        ConfigError: naming what gave the value, the value and the remedy.
        SystemExit: for `--help` and `--version`.
    """
    args = parse_flags(argv)
    path = args.pop("config", environ.get(CONFIG_ENV) or None)
    print_config = args.pop("print_config", False)
    notes = [no_effect_line(flag, args.pop(flag)) for flag in NO_EFFECT if flag in args]
    given = {
        **(from_file(path, notes) if path is not None else {}),
        **from_environment(environ),
        **{name: Given(_from_flags(name, value), flag_of(name)) for name, value in args.items()},
    }
    config = EngineConfig(**{name: one.value for name, one in given.items()})
    config.validate()
    origins = {name: one.origin for name, one in given.items()}
    return Settings(config, origins, unknown_variables(environ), notes, print_config)


def parse_flags(argv: Sequence[str]) -> dict[str, Any]:
    """What the flags give, as typed: by field, by flag of `NO_EFFECT`, and under `config` and `print_config`.

    Raises:
        ConfigError: an unknown flag, or one without its value.
    """
    parser, args = build_parser(), _respelt(argv)
    known = [flag for action in parser._actions for flag in action.option_strings]
    for flag in (arg.partition("=")[0] for arg in args):
        if flag in NOT_SUPPORTED:
            raise ConfigError(f"{flag}: not supported: {NOT_SUPPORTED[flag]}")
        if flag.startswith("--") and flag not in known:
            raise ConfigError(f"unknown flag {flag}{suggestion(flag, known, '--') or '; --help lists them'}")
    namespace, unknown = parser.parse_known_args(args)
    if unknown:
        raise ConfigError(f"unexpected argument {unknown[0]!r}; --help shows what can be given")
    return vars(namespace)


def _from_flags(name: str, value: Any) -> Any:
    """The value of a field from what its flags give; objects from several flags are merged."""
    if get_origin(field_types()[name]) is dict:
        return functools.reduce(_merged, (read(name, text, flag_of(name)) for text in value))
    return read(name, value, flag_of(name))


def _merged(first: Any, then: Any) -> Any:
    """Two objects in one, all the way down; where they differ, the second counts."""
    if not (isinstance(first, dict) and isinstance(then, dict)):
        return then
    return {**first, **{key: _merged(first.get(key), value) for key, value in then.items()}}


def _respelt(argv: Sequence[str]) -> list[str]:
    """Flags as users of other engines type them: `--max_model_len` is `--max-model-len`, and a part of an object,
    `--media-io-kwargs.video.fps 2`, is `--media-io-kwargs={"video": {"fps": 2}}`."""
    respelt: list[str] = []
    rest = iter(argv)
    for arg in rest:
        name, equals, value = arg.partition("=")
        flag, *keys = name.split(".")
        flag = flag.replace("_", "-")
        if not arg.startswith("--"):
            respelt.append(arg)
        elif not keys:
            respelt.append(flag + equals + value)
        else:
            part = _json_or_text(value if equals else next(rest, ""))
            for key in reversed(keys):
                part = {key: part}
            respelt.append(f"{flag}={json.dumps(part)}")
    return respelt


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def serve(argv: Sequence[str] | None = None) -> int:
    """Run a server until it ends; returns its exit status: 0, 1 when something failed, 2 for unusable settings."""
    try:
        settings = settle(sys.argv[1:] if argv is None else argv, os.environ)
        if settings.print_config:
            for line in (*settings.warnings, *settings.notes):
                print(f"serve.py: {line}", file=sys.stderr)
            print(to_yaml(settings.config, settings.origins), end="")
            return 0
        # Nothing runs yet, so there is nothing to wait for: a KeyboardInterrupt would, for the files of a download that
        # are on their way. A process 1, as in a container, would not get a SIGTERM at all.
        for number, status in ((signal.SIGTERM, 0), (signal.SIGINT, INTERRUPTED)):
            signal.signal(number, lambda *_, status=status: os._exit(status))
        from mini_engine.launch import Supervisor

        log.setup("supervisor", log.LogSettings(settings.config.log_level, settings.config.log_format))
        for warning in settings.warnings:
            logger.warning("%s", warning)
        for note in settings.notes:
            logger.info("%s", note)
        return Supervisor(settings.config, settings.origins).run()
    except ConfigError as error:
        logging.shutdown()  # first the lines of the log that led to it
        print(f"serve.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
