"""The settings in a model's folder: files that are JSON objects."""

import json
from pathlib import Path
from typing import Any

from mini_engine.config.options import ConfigError


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a file. Raises ConfigError: the file is damaged; OSError."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}; download it again") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is not a JSON object; download it again")
    return values
