"""The cache of the Hugging Face hub on this machine."""

import shutil
from pathlib import Path

from mini_engine.config import BUNDLED_MODEL

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def put_in_cache(cache: Path, name: str, revision: str = "main") -> Path:
    """The bundled model as the hub's cache holds a download."""
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / revision).write_text(COMMIT)
    return Path(shutil.copytree(BUNDLED_MODEL, folder / "snapshots" / COMMIT))
