"""The command line of `serve.py`, made from the fields of `EngineConfig`.

A value is taken from the flag, else from `MINI_ENGINE_<FIELD>`, else from the field's default.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, Union, get_args, get_origin

from mini_engine.config import (
    ConfigError,
    EngineConfig,
    Option,
    env_of,
    field_types,
    fields,
    flag_of,
    from_environment,
)

IPC_SWITCH_ENV = "MINI_ENGINE_MULTIMODAL_TENSOR_IPC"
IPC_SWITCH = {"1": "torch_shm", "0": "direct_rpc"}

EXAMPLES = f"""examples:
  python serve.py                                        the bundled model on port 8000
  python serve.py Qwen/Qwen2.5-VL-3B-Instruct -tp 2      a hub model on two devices
  python serve.py --api-server-count 3 --media-io-kwargs '{{"video": {{"num_frames": 10}}}}'

Every flag can also be set by an environment variable, such as {env_of("max_num_seqs")} for {flag_of("max_num_seqs")}.
{IPC_SWITCH_ENV}=1 or 0 means --enable- or --disable-multimodal-tensor-ipc.
"""


class Parser(argparse.ArgumentParser):
    """Ends with one clear line instead of argparse's usage dump."""

    def error(self, message: str) -> Any:
        raise ConfigError(message)


def build_parser() -> argparse.ArgumentParser:
    """The parser of `serve.py`; no flag has a default here, so that a missing one is told from a given one."""
    parser = Parser(
        prog="serve.py",
        description="Serve a vision-language model over an OpenAI-compatible endpoint.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    kinds = field_types()
    for field in fields():
        opt: Option = field.metadata["option"]
        group = groups.setdefault(opt.group, parser.add_argument_group(opt.group))
        _add_flag(group, field.name, opt, kinds[field.name], EngineConfig.__dataclass_fields__[field.name])
    ipc = groups["Data plane"]
    ipc.add_argument("--enable-multimodal-tensor-ipc", dest="mm_tensor_ipc_switch", action="append_const", const="1",
                     help="The same as --mm-tensor-ipc torch_shm.")  # fmt: skip
    ipc.add_argument("--disable-multimodal-tensor-ipc", dest="mm_tensor_ipc_switch", action="append_const", const="0",
                     help="The same as --mm-tensor-ipc direct_rpc.")  # fmt: skip
    return parser


def _add_flag(group: argparse._ArgumentGroup, name: str, opt: Option, kind: Any, field: Any) -> None:
    text = f"{opt.help}{_default_text(opt, field)}".replace("%", "%%")
    if opt.positional:
        group.add_argument(name, nargs="?", metavar=opt.metavar, help=text)
    elif kind is bool:
        group.add_argument(flag_of(name), action=argparse.BooleanOptionalAction, help=text)
    elif get_origin(kind) is list:
        group.add_argument(flag_of(name), nargs="+", action="extend", metavar=opt.metavar, help=text)
    else:
        flags = [flag_of(name), *([opt.short] if opt.short else [])]
        choices = "{" + ",".join(literal_choices(kind)) + "}" if literal_choices(kind) else None
        metavar = opt.metavar or choices or name.rsplit("_", 1)[-1].upper()
        nargs: dict[str, Any] = {} if opt.bare is None else {"nargs": "?", "const": opt.bare}
        group.add_argument(*flags, dest=name, metavar=metavar, help=text, **nargs)


def _default_text(opt: Option, field: Any) -> str:
    if opt.positional or not isinstance(field.default, (str, int, float)) or isinstance(field.default, bool):
        return ""
    return f" (default: {field.default})"


def literal_choices(kind: Any) -> tuple[str, ...]:
    """The values of a `Literal` type; empty for any other."""
    args = get_args(kind)
    return args if args and all(isinstance(arg, str) for arg in args) else ()


def convert(name: str, text: str, kind: Any, opt: Option) -> Any:
    """The text of a flag or an environment variable as the field's type.

    Raises:
        ConfigError: it cannot be read as that type.
    """
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(arg for arg in get_args(kind) if arg is not type(None))
    readers: dict[Any, Callable[[str], Any]] = {int: int, float: float, bool: _read_bool}
    read = opt.parse or readers.get(kind, str)
    if get_origin(kind) is list:
        read = lambda value: [value] if value.startswith("[") else [part.strip() for part in value.split(",")]  # noqa: E731
    try:
        return read(text)
    except ValueError as error:
        detail = str(error) if opt.parse or kind is bool else f"{text!r} is not of the type {kind.__name__}"
        raise ConfigError(f"{flag_of(name)}: {detail}") from None


def _joined(values: Sequence[str]) -> list[str]:
    """The values of a list, of which some may be JSON lists themselves, as users of other engines type them."""
    items: list[str] = []
    for value in values:
        try:
            inner = json.loads(value) if value.startswith("[") else None
        except ValueError:
            inner = None  # an IPv6 address begins like this, too
        items += map(str, inner) if isinstance(inner, list) else [value]
    return items


def _read_bool(text: str) -> bool:
    values = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in values:
        raise ValueError(f"{text!r} is not one of 1, 0, true, false, yes, no")
    return values[text.lower()]


def tensor_ipc_choice(named: str | None, switches: Sequence[str], where: str) -> str | None:
    """The one transport that a set of equivalent settings asks for; None when none of them is set.

    Raises:
        ConfigError: two of them disagree.
    """
    for switch in switches:
        if switch not in IPC_SWITCH:
            raise ConfigError(f"{IPC_SWITCH_ENV}: {switch!r} is not 1 or 0")
    asked = {IPC_SWITCH[switch] for switch in switches} | ({named} if named is not None else set())
    if len(asked) > 1:
        raise ConfigError(f"{where} ask for different transports, {' and '.join(sorted(asked))}: keep one of them")
    return asked.pop() if asked else None


def parse(argv: Sequence[str], environ: dict[str, str] | None = None) -> EngineConfig:
    """The configuration for these arguments.

    Raises:
        ConfigError: naming the flag, the value and the remedy.
        SystemExit: for `--help`.
    """
    environ = dict(os.environ) if environ is None else environ
    given = vars(build_parser().parse_args(_dashes(argv)))
    from_env = from_environment(environ)
    flag_ipc = tensor_ipc_choice(
        given.pop("mm_tensor_ipc", None), given.pop("mm_tensor_ipc_switch", []),
        "--mm-tensor-ipc, --enable- and --disable-multimodal-tensor-ipc",
    )  # fmt: skip
    env_ipc = tensor_ipc_choice(
        from_env.pop("mm_tensor_ipc", None), [environ[IPC_SWITCH_ENV]] if IPC_SWITCH_ENV in environ else [],
        f"{env_of('mm_tensor_ipc')} and {IPC_SWITCH_ENV}",
    )  # fmt: skip
    kinds = field_types()
    values: dict[str, Any] = {}
    for field in fields():
        raw = given.get(field.name, from_env.get(field.name))
        if raw is not None:
            opt = field.metadata["option"]
            value = convert(field.name, raw, kinds[field.name], opt) if isinstance(raw, str) else raw
            values[field.name] = _joined(value) if get_origin(kinds[field.name]) is list else value
    if flag_ipc or env_ipc:
        values["mm_tensor_ipc"] = flag_ipc or env_ipc
    config = EngineConfig(**values)
    config.validate()
    return config


def _dashes(argv: Sequence[str]) -> list[str]:
    """`--max_model_len` is `--max-model-len`, as users of other engines type it."""
    result = []
    for arg in argv:
        name, equals, value = arg.partition("=")
        result.append(name.replace("_", "-") + equals + value if arg.startswith("--") else arg)
    return result


def serve(argv: Sequence[str] | None = None) -> int:
    """Run the server until it is stopped; returns the exit status."""
    try:
        config = parse(sys.argv[1:] if argv is None else argv)
        from mini_engine.launch import Supervisor

        return Supervisor(config).run()
    except ConfigError as error:
        print(f"serve.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # nothing has been started yet
        return 130
