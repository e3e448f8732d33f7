"""A directory whose files may be read, with what must not be."""

import os
from pathlib import Path


def make_root(base: Path, content: bytes) -> Path:
    """A directory with regular and special files and links that lead outside, to `secret`; its files have `content`."""
    root = base / "allowed"
    (root / "inner").mkdir(parents=True)
    for outside in ("secret", "allowed-too", "clip"):
        (base / outside).write_bytes(b"secret")
    for inside in ("clip", "inner/clip", "inner/ä ?#"):
        (root / inside).write_bytes(content)
    (root / "big").write_bytes(bytes(1001))
    (root / "empty").touch()
    for link, target in {"link": "clip", "out": "../secret", "up": "..", "loop": "loop"}.items():
        (root / link).symlink_to(target)
    os.mkfifo(root / "pipe")
    return root
