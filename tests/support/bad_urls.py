"""URLs and paths that are refused: where `media.test` is the only host, or below the directory of `make_root`."""

import os
from pathlib import Path

from mini_engine.protocol.parts import MAX_URL_CHARACTERS

HTTP_URLS = r"""
http://other.test/ http://sub.media.test/ http://media.test.other.test/ http://media.test:65536/ http://user@media.test/
http://media.test@other.test/ http://other.test#@media.test/ http://other.test\@media.test/ http://media.test\.other.test/
http://media.test%2eother.test/ http://127.0.0.1/ http://[::1/ http:///media.test/ http:media.test/ http:// http://127.1/
http://2130706433/ http://0x7f.1/ http://media.test./ http://media..test/ http://me%64ia.test/ ws://media.test/""".split()
HTTP_URLS += ["http://med\tia.test/", "http://media.test/a\r\nHost: other.test", "http://media.test/a b"]
HTTP_URLS += ["http://\ud800/", "http://media.test/\ud800", "http://" + "\ufdfa" * 10000, "http://me\u00addia.test/"]
HTTP_URLS += ["http://media.test/" + "x" * MAX_URL_CHARACTERS]
PATHS = r"""
/../secret /%2e%2e/secret /%2e%2e%2fsecret /%252e%252e/secret /..%5csecret /..\secret /./../secret //../../secret -too
/%c0%ae%c0%ae/secret /inner/../../secret /../allowed-too /out /up/secret /up/allowed/../secret /clip%00 /%00 /loop /pipe
/inner / /missing /clip/x""".split()
PATHS += ["", "/" + "x" * 5000]


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
