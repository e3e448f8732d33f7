"""The command line of `serve.py`: settings from flags, variables and a file, merged; `--help`; then the server.

A value is taken from the flag, else from `MINI_ENGINE_<FIELD>`, else from the file of `--config`, else from the field's
default. The flags are made from the fields of `EngineConfig`.
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

from mini_engine import log
from mini_engine.config import ConfigError, EngineConfig, Setting, fields, groups, sources
from mini_engine.config.sources import CONFIG_ENV, IPC_SWITCH_ENV, Given

INTERRUPTED = 128 + signal.SIGINT  # the exit status of a shell's command that Ctrl-C has ended
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
    """The result of a command line and its environment."""

    config: EngineConfig
    origins: dict[str, str]  # of each field that does not have its default, such as `--port`
    printed: str | None  # by `--print-config`


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> EngineConfig:
    """The configuration for these arguments; see `settle`."""
    return settle(argv, os.environ if environ is None else environ).config


def settle(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """The settings for these arguments and variables, and for the file that either of them names.

    Raises ConfigError: for each value that cannot be used, a line with its origin and the remedy; SystemExit: for
    `--help` and `--version`.
    """
    namespace, rest = build_parser().parse_known_args(list(_normalise(argv)))
    unknown = [arg.partition("=")[0] for arg in rest if arg.startswith("-")]
    args = vars(namespace)
    path = args.get("config", environ.get(CONFIG_ENV))
    errors = [f"{flag}: {sources.unknown(flag)}" for flag in unknown]
    if rest and not unknown:
        errors.append(f"{rest[0]}: no flag takes this value, and MODEL is {args['model']!r}; --help lists the flags")
    given = {} if path is None else sources.from_file(path, errors)
    given |= sources.from_environment(environ, errors)
    given |= {s.name: _from_flags(s, args[s.name], errors) for s in fields() if s.name in args}
    if errors:
        raise ConfigError("\n".join(errors))
    if "debug" in given and given["debug"].value:
        timeouts = {s.name: s.maximum for s in fields() if "timeout" in s.name and s.name != "shutdown_timeout"}
        for name, value in {**timeouts, "data_parallel_size": 1}.items():
            given.setdefault(name, Given(value, "--debug"))
    config = EngineConfig(**{name: value for name, (value, _) in given.items()})
    config.validate()
    if "changed_only" in args and "print_config" not in args:
        raise ConfigError("--changed-only needs --print-config")
    origins = {name: origin for name, (_, origin) in given.items()}
    printed = sources.to_yaml(config, origins, "changed_only" in args) if "print_config" in args else None
    return Settings(config, origins, printed)


def _from_flags(setting: Setting, value: Any, errors: list[str]) -> Given:
    """The value of what a setting's flags give; lists of several flags are joined, objects merged."""
    texts = value if setting.base in (list, dict) else [value]
    parts = [setting.read(text, setting.flag, errors) for text in texts]
    if setting.base is list:
        return Given([item for part in parts for item in part or ()], setting.flag)
    return Given(reduce(_merge, parts), setting.flag)


def _merge(first: Any, second: Any) -> Any:
    """Two objects in one, all the way down; where they differ, the second counts."""
    if not (isinstance(first, dict) and isinstance(second, dict)):
        return second
    return {**first, **{key: _merge(first.get(key), value) for key, value in second.items()}}


def _normalise(argv: Sequence[str]) -> Iterator[str]:
    """Flags as users of other engines type them: `--max_model_len` is `--max-model-len`, and a part of an object,
    `--media-io-kwargs.video.fps 2`, is `--media-io-kwargs={"video": {"fps": 2}}`."""
    args = iter(argv)
    for arg in args:
        name, equals, value = arg.partition("=")
        flag, *keys = name.split(".")
        if not arg.startswith("--"):
            yield arg
        elif not keys:
            yield flag.replace("_", "-") + equals + value
        else:
            part: Any = value if equals else next(args, "")
            with contextlib.suppress(ValueError):  # else it is a text
                part = json.loads(part)
            for key in reversed(keys):
                part = {key: part}
            compact = json.dumps(part, separators=(",", ":"))  # argparse takes an unknown flag with a space for MODEL
            yield f"{flag.replace('_', '-')}={compact}"


# --- the parser, and its help -----------------------------------------------------------------------------------------


class FlagParser(argparse.ArgumentParser):
    """Ends with one clear line instead of argparse's usage dump."""

    def error(self, message: str) -> Any:
        raise ConfigError(message.removeprefix("argument "))


class Help(argparse.Action):
    """`--help` shows everything, `--help WORD` the flags with that word in their names, help or group."""

    def __call__(self, parser: Any, _namespace: Any, values: Any, _flag: str | None = None) -> None:
        build_parser(values or "").print_help()
        parser.exit()


def build_parser(word: str = "") -> argparse.ArgumentParser:
    """The parser of `serve.py`, or with a `word` the part of it that `--help WORD` shows.

    Values are left as they are typed. A flag that is not given is missing in the result.
    """
    parser = FlagParser(
        prog="serve.py",
        usage="serve.py [MODEL] [--flag VALUE ...]",
        description="Serve a vision-language model over an OpenAI-compatible endpoint.",
        epilog=None if word else EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
    )
    if not word:
        _add_command(parser.add_argument_group("Command"))
    for group, settings in groups().items():
        part = parser.add_argument_group(group)
        for setting in settings:
            text = " ".join((group, setting.help, *setting.flags))
            if word.replace("_", "-").lower() in text.replace("_", "-").lower():
                _add_setting(part, setting)
    return parser


def _add_command(group: Any) -> None:
    """The flags that are no setting of a server."""
    text = "Show this, or the flags with a word in their names, help or group: --help cache."
    group.add_argument("-h", "--help", action=Help, nargs="?", metavar="WORD", help=text)
    version = f"mini-engine {importlib.metadata.version('mini-engine')}"
    group.add_argument("--version", action="version", version=version, help="Show the version.")
    group.add_argument("--config", metavar="FILE", help="YAML file with settings, such as `max-num-seqs: 8`.")
    text = "Show all settings and where each comes from, as a file for --config, and exit."
    group.add_argument("--print-config", action="store_true", default=argparse.SUPPRESS, help=text)
    text = "With --print-config: only the settings that differ from their defaults."
    group.add_argument("--changed-only", action="store_true", default=argparse.SUPPRESS, help=text)


def _add_setting(group: Any, setting: Setting) -> None:
    text = f"{setting.help} (default: {setting.default_text})".replace("%", "%%")
    flags = [flag for flag in setting.flags if flag not in setting.twins]
    choices = "{" + ",".join(setting.choices) + "}" if setting.choices else None
    options: dict[str, Any] = {"metavar": setting.metavar or choices, "action": "store"}
    if setting.positional:
        group.add_argument(dest=setting.name, nargs="?", metavar=setting.metavar, help=text)
        text = f"The same as {setting.metavar}."
    if setting.type is bool:
        flags, options = flags[:1], {"action": argparse.BooleanOptionalAction}
    elif setting.base is list:
        options |= {"action": "extend", "nargs": "+"}
    elif setting.base is dict:
        options["action"] = "append"
    elif setting.bare is not None:
        options |= {"nargs": "?", "const": setting.bare}
    group.add_argument(*flags, dest=setting.name, help=text, **options)
    for twin, value in setting.twins.items():
        text = "The same as " + (setting.flags[1] if value is False else f"{setting.flag} {value}") + "."
        group.add_argument(twin, dest=setting.name, action="store_const", const=value, help=text)


# --- the command ------------------------------------------------------------------------------------------------------


def serve() -> int:
    """Run a server until it ends; returns its exit status: 0, 1 when something failed, 2 for unusable settings."""
    # Nothing runs yet, so there is nothing to wait for: a KeyboardInterrupt would wait for the files of a download.
    # Process 1, as in a container, would not get a SIGTERM at all.
    for number, status in ((signal.SIGTERM, 0), (signal.SIGINT, INTERRUPTED)):
        signal.signal(number, lambda *_, status=status: os._exit(status))
    # For errors about other settings; one of --config counts once all are read.
    in_flags = "--log-format json" in " ".join(_normalise(sys.argv[1:])).replace("=", " ")
    log_format = "json" if in_flags else os.environ.get("MINI_ENGINE_LOG_FORMAT", "text")
    for warning in sources.unknown_variables(os.environ):
        _report(logging.WARNING, warning, log_format)
    try:
        settings = settle(sys.argv[1:], os.environ)
        log_format = settings.config.log_format
        if settings.printed is not None:
            print(settings.printed, end="")
            return 0
        from mini_engine.launch.process_setup import use_one_arena
        from mini_engine.launch.supervisor import run_server

        use_one_arena()
        log.setup("supervisor", settings.config.log_level, settings.config.log_format)
        return run_server(settings.config)
    except ConfigError as error:
        logging.shutdown()  # first the lines of the log that led to it
        for line in str(error).splitlines():
            _report(logging.ERROR, line, log_format)
        return 2


def _report(level: int, text: str, log_format: str) -> None:
    """Write a line about settings, whether the log has been set up or not."""
    record = logging.LogRecord(__name__, level, __file__, 0, "%s", (text,), None)
    line = log.JsonFormatter("supervisor").format(record) if log_format == "json" else f"serve.py: {text}"
    print(line, file=sys.stderr)
