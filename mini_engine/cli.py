"""The command line of `serve.py`: settings from flags, variables and a file, merged; `--help`; then the server.

A value is taken from the flag, else from `MINI_ENGINE_<FIELD>`, else from the file of `--config`, else from the field's
default. The flags are made from the fields of `EngineConfig`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from mini_engine import log
from mini_engine.config import ConfigError, EngineConfig, Setting, fields, groups
from mini_engine.config.sources import (
    CONFIG_ENV,
    IPC_SWITCH_ENV,
    Given,
    from_environment,
    from_file,
    read,
    to_yaml,
    unknown,
    unknown_variables,
)

logger = logging.getLogger(__name__)
INTERRUPTED = 128 + signal.SIGINT  # the exit status of a shell's command that Ctrl-C has ended
COMMAND_FLAGS = ("-h", "--help", "--version", "--config", "--print-config")  # no settings of a server
EXAMPLES = f"""examples:
  python serve.py                                       the bundled model on port 8000
  python serve.py Qwen/Qwen2.5-VL-3B-Instruct -tp 2     a hub model on two devices
  python serve.py --api-server-count 3 --media-io-kwargs '{{"video": {{"num_frames": 10}}}}'
  python serve.py --max-num-seqs 8 --print-config > small.yaml
  python serve.py --config small.yaml

Underscores work as dashes. Each flag can also be set by an environment variable, such as MINI_ENGINE_MAX_NUM_SEQS
for --max-num-seqs; {IPC_SWITCH_ENV}=1 or 0 is --enable- or --disable-multimodal-tensor-ipc.
A flag overrides a variable, a variable overrides the file of --config ({CONFIG_ENV}).
"""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a command line and its surroundings ask for."""

    config: EngineConfig
    origins: dict[str, str]  # what gave each field that does not have its default, such as `--port`
    warnings: list[str]
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
    args = _parse_flags(argv)
    path = args.pop("config", environ.get(CONFIG_ENV) or None)
    print_config = args.pop("print_config", False)
    given = {
        **(from_file(path) if path is not None else {}),
        **from_environment(environ),
        **{one.name: Given(_from_flags(one, args[one.name]), one.flag) for one in fields() if one.name in args},
    }
    config = EngineConfig(**{name: one.value for name, one in given.items()})
    config.validate()
    origins = {name: one.origin for name, one in given.items()}
    return Settings(config, origins, unknown_variables(environ), print_config)


def all_flags() -> set[str]:
    """Every flag of `serve.py`."""
    return {flag for setting in fields() for flag in setting.flags} | {*COMMAND_FLAGS}


def _parse_flags(argv: Sequence[str]) -> dict[str, Any]:
    """What the flags give, as typed: by field, and under `config` and `print_config`."""
    args, known = _respelt(argv), all_flags()
    for flag in (arg.partition("=")[0] for arg in args):
        if flag.startswith("-") and not flag.lstrip("-")[:1].isdigit() and flag not in known:
            raise ConfigError(f"{flag}: {unknown(flag)}")
    namespace, rest = build_parser().parse_known_args(args)
    if rest:
        raise ConfigError(f"unexpected argument {rest[0]!r}; --help lists the flags")
    return vars(namespace)


def _from_flags(setting: Setting, value: Any) -> Any:
    """The value of a setting from what its flags give; objects from several flags are merged."""
    if setting.base is dict:
        return functools.reduce(_merged, (read(setting, text, setting.flag) for text in value))
    return read(setting, value, setting.flag)


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


# --- the parser, and its help -----------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Ends with one clear line instead of argparse's usage dump."""

    def error(self, message: str) -> Any:
        raise ConfigError(message.removeprefix("argument "))


class Help(argparse.Action):
    """`--help` shows everything, `--help WORD` the flags with that word in their names, help or group."""

    def __call__(self, parser: Any, _namespace: Any, values: Any, _flag: str | None = None) -> None:
        """See `argparse.Action`."""
        build_parser(values or "").print_help()
        parser.exit()


def build_parser(word: str = "") -> argparse.ArgumentParser:
    """The parser of `serve.py`, or with a `word` the part of it that `--help WORD` shows.

    Values are left as they are typed. A flag that is not given is missing in the result.
    """
    parser = Parser(
        prog="serve.py",
        usage="serve.py [MODEL] [--flag VALUE ...]",
        description=None if word else "Serve a vision-language model over an OpenAI-compatible endpoint.",
        epilog=None if word else EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
    )
    if not word:
        _add_command(parser.add_argument_group("Command"))
    wanted, found = _dashed(word), False
    for group, settings in groups().items():
        if shown := [one for one in settings if wanted in _dashed(" ".join((group, one.opt.help, *one.flags)))]:
            found, part = True, parser.add_argument_group(group)
            for setting in shown:
                _add_setting(part, setting)
    if not found:
        raise ConfigError(f"--help: no flag has {word!r} in its name, help or group")
    return parser


def _dashed(text: str) -> str:
    return text.replace("_", "-").lower()


def _add_command(group: Any) -> None:
    """What is no setting of a server: `COMMAND_FLAGS`."""
    text = "Show this, or the flags with a word in their names, help or group: --help cache."
    group.add_argument("-h", "--help", action=Help, nargs="?", metavar="WORD", help=text)
    version = f"mini-engine {importlib.metadata.version('mini-engine')}"
    group.add_argument("--version", action="version", version=version, help="Show the version.")
    group.add_argument("--config", metavar="FILE", help="YAML file with settings, such as `max-num-seqs: 8`.")
    text = "Show all settings and where each comes from, as a file for --config, and exit."
    group.add_argument("--print-config", action="store_true", default=argparse.SUPPRESS, help=text)


def _add_setting(group: Any, setting: Setting) -> None:
    opt, dest = setting.opt, setting.name
    text = f"{opt.help} (default: {setting.default_text})".replace("%", "%%")
    flags = [flag for flag in setting.flags if flag not in opt.twins]
    choices = "{" + ",".join(setting.choices) + "}" if setting.choices else None
    how: dict[str, Any] = {"metavar": opt.metavar or choices, "action": "store"}
    if opt.positional:
        group.add_argument(dest=dest, nargs="?", metavar=opt.metavar, help=text)
        text = f"The same as {opt.metavar}."
    if setting.type is bool:
        flags, how = flags[:1], {"action": argparse.BooleanOptionalAction}
    elif setting.base is list:
        how |= {"action": "extend", "nargs": "+"}
    elif setting.base is dict:
        how["action"] = "append"
    elif opt.bare is not None:
        how |= {"nargs": "?", "const": opt.bare}
    group.add_argument(*flags, dest=dest, help=text, **how)
    for twin, value in opt.twins.items():
        same = setting.flags[1] if value is False else f"{setting.flag} {value}"
        group.add_argument(twin, dest=dest, action="store_const", const=value, help=f"The same as {same}.")


# --- the command ------------------------------------------------------------------------------------------------------


def serve(argv: Sequence[str] | None = None) -> int:
    """Run a server until it ends; returns its exit status: 0, 1 when something failed, 2 for unusable settings."""
    try:
        settings = settle(sys.argv[1:] if argv is None else argv, os.environ)
        if settings.print_config:
            for line in settings.warnings:
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
        return Supervisor(settings.config).run()
    except ConfigError as error:
        logging.shutdown()  # first the lines of the log that led to it
        print(f"serve.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
