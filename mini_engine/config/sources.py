"""Where settings come from: text of a flag or a variable, values of a file; and how `--print-config` writes them.

`from_file` reads what `to_yaml` writes. This file knows nothing of argparse.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, get_origin

import msgspec
import yaml

from mini_engine.config import ENV_PREFIX, ConfigError, EngineConfig, Option, env_of, field_types, fields, flag_of
from mini_engine.config.elsewhere import ELSEWHERE, NO_EFFECT, no_effect_line
from mini_engine.config.option import check_range, plain_type, values_of

CONFIG_ENV = env_of("config")
IPC_SWITCH_ENV = env_of("multimodal_tensor_ipc")
IPC_SWITCH = {"1": "torch_shm", "0": "direct_rpc"}
MAX_FILE_BYTES = 1 << 20  # of a file of settings
MAX_VALUES = 100_000
NOT_SETTINGS = (env_of("bench_"), env_of("test_"))  # for processes that measure and tests that look inside


@dataclasses.dataclass(frozen=True)
class Given:
    """A value for a field, and what gave it, such as `--port` or `serve.yaml line 3`."""

    value: Any
    origin: str


def suggestion(word: str, known: Collection[str], prefix: str = "") -> str:
    """`; did you mean X?` for the nearest of `known`, apart from the prefix of all; empty if none is near."""
    ends = {name.removeprefix(prefix): name for name in known}
    near = difflib.get_close_matches(word.removeprefix(prefix), ends, n=1, cutoff=0.7)
    return f"; did you mean {ends[near[0]]}?" if near else ""


def read(name: str, value: Any, origin: str) -> Given:
    """The value of the field `name`, from a text as flags and variables give it, or from a value as YAML gives it.

    Raises:
        ConfigError: it cannot be read as the field's type, or is out of its limits.
    """
    field, kind = EngineConfig.__dataclass_fields__[name], field_types()[name]
    opt: Option = field.metadata["option"]
    try:
        value = _from_text(value, kind, opt) if isinstance(value, str) else msgspec.convert(value, kind)
    except msgspec.ValidationError:
        alone = (
            f"; with {origin} alone, put MODEL before it" if opt.bare is not None and origin == flag_of(name) else ""
        )
        raise ConfigError(f"{origin}: {value!r} is not {values_of(opt, kind)}{alone}") from None
    except ValueError as error:
        raise ConfigError(f"{origin}: {error}") from None
    if get_origin(kind) is list:
        value = _joined(value)
    check_range(field, kind, value, origin)
    try:
        msgspec.msgpack.encode(value)  # as it will be sent to the processes
    except UnicodeEncodeError:
        raise ConfigError(f"{origin}: {value!r} is not UTF-8; write it so, in a UTF-8 locale") from None
    except OverflowError:
        raise ConfigError(
            f"{origin}: {value!r} holds a number that is out of range; the greatest is 2**64 - 1"
        ) from None
    except RecursionError:
        raise ConfigError(f"{origin}: the value has too many levels") from None
    return Given(value, origin)


def _from_text(text: str, kind: Any, opt: Option) -> Any:
    kind = plain_type(kind)
    if opt.parse is not None:
        return opt.parse(text)
    if get_origin(kind) is list:
        return [text] if text.startswith("[") else [part.strip() for part in text.split(",")]
    return msgspec.convert(text.strip().lower() if kind is bool else text, kind, strict=False)


def _joined(values: list[str]) -> list[str]:
    """The values of a list, of which some may be JSON lists themselves, as users of other engines type them."""
    items: list[str] = []
    for value in values:
        try:
            inner = json.loads(value) if value.startswith("[") else None
        except ValueError:
            inner = None  # an IPv6 address begins like this, too
        items += map(str, inner) if isinstance(inner, list) else [value]
    return items


def from_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    """What `MINI_ENGINE_<FIELD>` variables give, by field.

    Raises:
        ConfigError: a value cannot be used, or two variables disagree.
    """
    names = [field.name for field in fields() if env_of(field.name) in environ]
    given = {name: read(name, environ[env_of(name)], env_of(name)) for name in names}
    if (switch := environ.get(IPC_SWITCH_ENV)) is not None:
        if switch not in IPC_SWITCH:
            raise ConfigError(f"{IPC_SWITCH_ENV}: {switch!r} is not 1 or 0")
        named = given.setdefault("mm_tensor_ipc", Given(IPC_SWITCH[switch], IPC_SWITCH_ENV))
        if named.value != IPC_SWITCH[switch]:
            raise ConfigError(f"{named.origin} and {IPC_SWITCH_ENV} ask for different things: keep one of them")
    return given


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each variable that looks like a setting and is none.

    Not an error: Kubernetes sets some for every service, and a service may have this program's name.
    """
    known = {env_of(field.name) for field in fields()} | {CONFIG_ENV, IPC_SWITCH_ENV}
    return [
        f"{name} is not a setting of this server{suggestion(name, known, ENV_PREFIX)}"
        for name in sorted(environ)
        if name.startswith(ENV_PREFIX) and name not in known and not name.startswith(NOT_SETTINGS)
    ]


def from_file(path: str, notes: list[str]) -> dict[str, Given]:
    """What a YAML file gives, by field: flags without their dashes in front, or fields' names, each with its value.

    Lines on those that change nothing are appended to `notes`.

    Raises:
        ConfigError: it cannot be read, or a setting in it is unknown, stands there twice, or has a value of no use.
    """
    given: dict[str, Given] = {}
    seen: set[str] = set()
    known = [field.name for field in fields()]
    for key, value, where in _items(path):
        name = key.replace("-", "_")
        if flag_of(name) in NO_EFFECT:
            notes.append(no_effect_line(flag_of(name), value))
            continue
        if name not in known:
            raise ConfigError(f"{where}: {key!r} is not a setting{_remedy(name, known)}")
        if name in seen:
            raise ConfigError(f"{where}: {key!r} stands there for the second time; keep one of them")
        seen.add(name)
        if value is not None:
            given[name] = Given(read(name, value, f"{where}: {key}").value, where)
    return given


def _remedy(name: str, known: Collection[str]) -> str:
    """What to do about a key of a file that is no setting."""
    if (flag := flag_of(name)) in ELSEWHERE:
        return f"; {ELSEWHERE[flag]}"
    first, dot, _ = name.partition(".")
    if dot and first in known:
        return f"; the parts of {flag_of(first)[2:]} are written below it, one level each"
    return suggestion(name, known).replace("_", "-") or "; --help lists them"


def _items(path: str) -> Iterator[tuple[str, Any, str]]:
    """(key, value, place) of each entry of a YAML mapping, also of a key that stands there twice."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ConfigError(f"--config: {path} is longer than {MAX_FILE_BYTES} bytes; give a file of settings")
        loader = yaml.SafeLoader(text.decode())
        root = loader.get_single_node()
        if root is None:
            return
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"--config: {path} holds no settings, one a line, such as `port: 8000`")
        if _size(root, {}) > MAX_VALUES:
            raise ConfigError(f"--config: {path} holds more than {MAX_VALUES} values once its aliases are written out")
        for key, value in root.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{path} line {key.start_mark.line + 1}: a key must be the name of a setting")
            yield key.value, loader.construct_object(value, deep=True), f"{path} line {key.start_mark.line + 1}"
    except OSError as error:
        raise ConfigError(f"--config: {path} cannot be read: {error.strerror}") from None
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"--config: {path} has too many levels") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:  # a value unlike its tag, as in !!int x
        raise ConfigError(f"--config: {path} is not YAML: {' '.join(str(error).split())}") from None


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values a node holds with its aliases written out; one that holds itself counts as far as it is known."""
    if id(node) not in known:
        known[id(node)] = 1
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        inner = [one for part in parts for one in (part if isinstance(part, tuple) else (part,))]
        known[id(node)] = 1 + sum(_size(one, known) for one in inner)
    return known[id(node)]


def to_yaml(config: EngineConfig, origins: Mapping[str, str]) -> str:
    """All settings by group, each with its origin: a file for `--config`, but for what is secret."""
    lines: list[str] = []
    group = ""
    for field in fields():
        opt: Option = field.metadata["option"]
        if opt.group != group:
            group = opt.group
            lines += ["", f"# {group}"]
        value, key = getattr(config, field.name), flag_of(field.name)[2:]
        text = yaml.safe_dump([value], default_flow_style=True, allow_unicode=True, width=float("inf"))[1:-2]
        line = f"# {key}: not shown" if opt.secret and value else f"{key}: {text}"
        default = f"default: {opt.unset}" if opt.unset else "default"
        lines.append(f"{line}  # {origins.get(field.name, default)}")
    return "\n".join(lines[1:]) + "\n"
