"""The command line of `serve.py`: settings from flags, variables and a file, made one; then the server.

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
from typing import Any

from mini_engine import log
from mini_engine.cli_help import build_parser
from mini_engine.config import ConfigError, EngineConfig
from mini_engine.config.elsewhere import ELSEWHERE, no_effect_line
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
from mini_engine.stdout import tell

logger = logging.getLogger(__name__)
INTERRUPTED = 128 + signal.SIGINT  # the exit status of a shell's command that Ctrl-C has ended
MAX_PARTS = 20  # of an object's name, as in --media-io-kwargs.video.fps, which has two


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
    path = args.pop("config", None)
    if path == "":  # as of a variable that is not set: the server would start without its settings
        raise ConfigError("--config: '' is not a file")
    path = path or environ.get(CONFIG_ENV)
    print_config = bool(args.pop("print_config", False))
    notes = [no_effect_line(use.origin, use.value) for use in args.pop("no_effect", [])]
    given = {
        **(from_file(path, notes) if path else {}),
        **from_environment(environ),
        **{name: _from_flags(name, uses) for name, uses in args.items()},
    }
    config = EngineConfig(**{name: one.value for name, one in given.items()})
    config.validate()
    origins = {name: one.origin for name, one in given.items()}
    return Settings(config, origins, unknown_variables(environ), notes, print_config)


def parse_flags(argv: Sequence[str]) -> dict[str, Any]:
    """What the flags give: by field a list of `Given`, with values as they were typed; `config` and `print_config`; and
    under `no_effect` a list of `Given` of those that change nothing.

    Raises:
        ConfigError: an unknown flag, or one without its value.
    """
    parser, args = build_parser(), _respelt(argv)
    known = [flag for action in parser._actions for flag in action.option_strings]
    for arg in args:  # first of all, since argparse takes an unknown flag for a value if there is a space in it
        _check_flag(arg.partition("=")[0], known)
    if "--help" in args[:-1] and (flag := args[args.index("--help") + 1]).startswith("--"):
        args = [f"--help={flag}"]
    namespace, unknown = parser.parse_known_args(args)
    for arg in unknown:
        raise ConfigError(f"unexpected argument {arg!r}; --help shows what can be given")
    return vars(namespace)


def _check_flag(flag: str, known: Sequence[str]) -> None:
    """Raises ConfigError if this looks like a flag and is none."""
    if flag in ELSEWHERE:
        raise ConfigError(f"{flag}: {ELSEWHERE[flag]}")
    if flag.startswith("--") and flag not in known:
        raise ConfigError(f"unknown flag {flag}{suggestion(flag, known, '--') or '; --help lists them'}")


def _from_flags(name: str, uses: list[Given]) -> Given:
    """The value of a field from all flags that set it: the last one, or for a list or an object all of them.

    Raises:
        ConfigError: a value cannot be used, or a flag and its twin disagree.
    """
    given = [read(name, use.value, use.origin) for use in uses]
    last = given[-1]
    if isinstance(last.value, list):
        return Given([item for one in given for item in one.value], last.origin)
    if isinstance(last.value, dict):
        return Given(functools.reduce(_merged, (one.value for one in given)), last.origin)
    opt = EngineConfig.__dataclass_fields__[name].metadata["option"]
    for one in given:
        differ = one.value != last.value
        if differ and (opt.positional or one.origin in opt.twins or last.origin in opt.twins):
            raise ConfigError(f"{one.origin} and {last.origin} ask for different things: keep one of them")
    return last


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
        if not arg.startswith("--"):
            respelt.append(arg)
        elif not keys:
            respelt.append(flag.replace("_", "-") + equals + value)
        else:
            part = _json_or_text(value if equals else next(rest, ""))
            if len(keys) > MAX_PARTS:
                raise ConfigError(f"{flag}: there are {len(keys)} dots; at most {MAX_PARTS} levels are read")
            for key in reversed(keys):
                part = {key: part}
            respelt.append(f"{flag.replace('_', '-')}={json.dumps(part)}")
    return respelt


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def serve(argv: Sequence[str] | None = None) -> int:
    """Run a server until it ends; returns its exit status: 0, 1 when something failed, 2 for settings of no use."""
    try:
        settings = settle(sys.argv[1:] if argv is None else argv, os.environ)
        if settings.print_config:
            for line in (*settings.warnings, *settings.notes):
                print(f"serve.py: {line}", file=sys.stderr)
            return 1 if tell(to_yaml(settings.config, settings.origins), end="") else 0
        # Nothing runs yet, so there is nothing to wait for: a KeyboardInterrupt would, for the files of a download that
        # are on their way. A process 1, as in a container, would not get a SIGTERM at all.
        for number, status in ((signal.SIGTERM, 0), (signal.SIGINT, INTERRUPTED)):
            signal.signal(number, lambda *_, status=status: os._exit(status))
        from mini_engine.launch import Supervisor

        supervisor = Supervisor(settings.config, settings.origins)
        log.setup("supervisor", supervisor.log)
        for warning in settings.warnings:
            logger.warning("%s", warning)
        for note in settings.notes:
            logger.info("%s", note)
        return supervisor.run()
    except ConfigError as error:
        print(f"serve.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
