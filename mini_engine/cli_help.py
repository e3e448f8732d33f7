"""The flags of `serve.py` as argparse has them, made from the fields of `EngineConfig`, and what `--help` shows."""

from __future__ import annotations

import argparse
import importlib.metadata
import textwrap
from typing import Any, get_origin

from mini_engine.config import ConfigError, Option, env_of, field_types, fields
from mini_engine.config.options import choices_of, default_of, flag_of, flags_of, parse_bytes, plain_type
from mini_engine.config.sources import CONFIG_ENV, IPC_SWITCH_ENV, suggestion
from mini_engine.config.vllm_flags import NO_EFFECT

EXAMPLES = f"""examples:
  python serve.py                                       the bundled model on port 8000
  python serve.py Qwen/Qwen2.5-VL-3B-Instruct -tp 2     a hub model on two devices
  python serve.py --api-server-count 3 --media-io-kwargs '{{"video": {{"num_frames": 10}}}}'
  python serve.py --max-num-seqs 8 --print-config > small.yaml
  python serve.py --config small.yaml

Underscores work as dashes. Each flag can also be set by an environment variable, such as {env_of("max_num_seqs")}
for {flag_of("max_num_seqs")}; {IPC_SWITCH_ENV}=1 or 0 is --enable- or --disable-multimodal-tensor-ipc.
A flag counts before a variable, a variable before the file of --config ({CONFIG_ENV}), and that before the default.
"""


class Parser(argparse.ArgumentParser):
    """Ends with one clear line instead of argparse's usage dump."""

    def error(self, message: str) -> Any:
        raise ConfigError(message.removeprefix("argument "))


class Layout(argparse.RawDescriptionHelpFormatter):
    """Help in which no flag is broken at its dashes."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


class Help(argparse.Action):
    """`--help` shows everything, `--help WORD` the flags with that word in their names, help or group."""

    def __call__(
        self, parser: argparse.ArgumentParser, _namespace: argparse.Namespace, values: Any, _flag: str | None = None
    ) -> None:
        """See `argparse.Action`."""
        build_parser(values).print_help()
        parser.exit()


def build_parser(word: str | None = None) -> argparse.ArgumentParser:
    """The parser of `serve.py`, or with a `word` the part of it that `--help WORD` shows.

    Values are left as they are typed. No flag has a default here: one that is not given is missing in the result.

    Raises:
        ConfigError: no flag or group has that word.
    """
    parser = Parser(
        prog="serve.py",
        usage="serve.py [MODEL] [--flag VALUE ...]",
        description=None if word else "Serve a vision-language model over an OpenAI-compatible endpoint.",
        epilog=None if word else EXAMPLES,
        formatter_class=Layout,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
    )
    kinds, groups = field_types(), {}
    if not word or _matches(word, "Command", "--help", "--version", "--config", "--print-config"):
        groups["Command"] = parser.add_argument_group("Command")
        _add_command(groups["Command"])
    for field in fields():
        opt: Option = field.metadata["option"]
        if word and not _matches(word, opt.group, opt.help, *flags_of(field, kinds[field.name]), *opt.twins):
            continue
        if opt.group not in groups:
            groups[opt.group] = parser.add_argument_group(opt.group)
        _add_field(groups[opt.group], field, opt, kinds[field.name])
    for flag, (values, _) in NO_EFFECT.items():
        action = "store_true" if values is None else "store"
        parser.add_argument(flag, dest=flag, action=action, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    if not groups:
        known = sorted({field.metadata["option"].group for field in fields()})
        near = suggestion(word or "", known)
        raise ConfigError(f"--help: no flag or group has {word!r} in its text{near or '; groups: ' + ', '.join(known)}")
    return parser


def _matches(word: str, *texts: str) -> bool:
    wanted = word.replace("_", "-").lower()
    return any(wanted in text.replace("_", "-").lower() for text in texts)


def _add_command(group: argparse._ArgumentGroup) -> None:
    """What is no setting of a server."""
    group.add_argument(
        "-h", "--help", action=Help, nargs="?", metavar="WORD",
        help="Show this, or the flags with a word in their names, help or group: --help cache.",
    )  # fmt: skip
    version = f"mini-engine {importlib.metadata.version('mini-engine')}"
    group.add_argument("--version", action="version", version=version, help="Show the version.")
    group.add_argument("--config", metavar="FILE", help="YAML file with settings, such as `max-num-seqs: 8`.")
    group.add_argument(
        "--print-config", action="store_true", default=argparse.SUPPRESS,
        help="Show all settings and where each comes from, as a file for --config, and end.",
    )  # fmt: skip


def _add_field(group: argparse._ArgumentGroup, field: Any, opt: Option, kind: Any) -> None:
    text = f"{opt.help} (default: {default_of(field)})".replace("%", "%%")
    flags = flags_of(field, kind)
    how: dict[str, Any] = {"metavar": _metavar(field.name, opt, kind), "action": "store"}
    if opt.positional:
        group.add_argument(dest=field.name, nargs="?", metavar=opt.metavar, help=text)
        text = f"The same as {opt.metavar}."
    if kind is bool:
        flags, how = flags[:1], {"action": argparse.BooleanOptionalAction}
    elif get_origin(kind) is list:
        how |= {"action": "extend", "nargs": "+"}
    elif get_origin(kind) is dict:
        how["action"] = "append"
    elif opt.bare is not None:
        how |= {"nargs": "?", "const": opt.bare}
    group.add_argument(*flags, dest=field.name, help=text, **how)
    for twin, value in opt.twins.items():
        same = ("" if value else "no-") + flags[0][2:] if kind is bool else f"{flags[0][2:]} {value}"
        group.add_argument(twin, dest=field.name, action="store_const", const=value, help=f"The same as --{same}.")


def _metavar(name: str, opt: Option, kind: Any) -> str:
    """What stands for the value of a flag."""
    if opt.metavar or choices_of(kind):
        return opt.metavar or "{" + ",".join(choices_of(kind)) + "}"
    if opt.parse is parse_bytes:
        return "SIZE"
    if name.endswith(("timeout", "seconds")):
        return "SECONDS"
    return {int: "N", float: "X"}.get(plain_type(kind)) or name.rpartition("_")[2].upper()
