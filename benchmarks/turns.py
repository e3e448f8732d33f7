"""TTFT of the next turn of a conversation whose images are all sent again: as data, by URL, or by name.

    python -m benchmarks.turns [flags of serve.py]

The images are PNGs of noise of 1 MB, since receiving, fetching and hashing them is what differs; the URLs are of a web
server in this process. A conversation begins with the images and their names, then nine questions of each kind follow
in turn. Prints the medians in ms.
"""

import base64
import functools
import http.server
import json
import os
import statistics
import sys
import tempfile
import threading
from pathlib import Path

from PIL import Image

from benchmarks.cli import table
from benchmarks.client import Target, send_all
from benchmarks.server import launched

IMAGES = (1, 4, 8, 16, 26)
KINDS = ("data", "URL", "name")
QUESTIONS = 9
FIELDS = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 1, "cache_salt": "turns"}


class Files(http.server.SimpleHTTPRequestHandler):
    """Files of a folder, without a log."""

    def log_message(self, *_: object) -> None: ...


def conversation(count: int, folder: Path, root: str) -> list[bytes]:
    """Bodies of the first turn, and of the next ones, of each kind in turn; the images become files of `folder`."""
    parts: dict[str, list[dict[str, str]]] = {kind: [] for kind in KINDS}
    for name in (f"{count}-{number}.png" for number in range(count)):
        Image.frombytes("RGB", (640, 540), os.urandom(640 * 540 * 3)).save(folder / name, compress_level=1)
        data = f"data:image/png;base64,{base64.b64encode((folder / name).read_bytes()).decode()}"
        parts["data"].append({"type": "image_url", "image_url": data, "uuid": name})
        parts["URL"].append({"type": "image_url", "image_url": f"{root}/{name}"})
        parts["name"].append({"type": "image_url", "uuid": name})

    def body(kind: str, question: str) -> bytes:
        first = [*parts[kind], {"type": "text", "text": "What is it?"}]
        turns = zip(("user", "assistant", "user"), (first, "noise", question), strict=True)
        return json.dumps({"messages": [{"role": role, "content": text} for role, text in turns], **FIELDS}).encode()

    asked = [body(kind, f"What is in picture {number}?") for number in range(QUESTIONS) for kind in KINDS]
    return [body("data", "How many?"), *asked]


def main(flags: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Files, directory=folder))
        web.socket.listen(128)  # connections at once; of more some would wait for a second
        threading.Thread(target=web.serve_forever, daemon=True).start()
        host, rows = f"127.0.0.1:{web.server_port}", []
        with launched([*flags, "--allowed-media-domains", host]) as (root, _):
            target = Target(f"{root}/v1/chat/completions", "", False, {"Content-Type": "application/json"}, True)
            for count in IMAGES:
                bodies = conversation(count, Path(folder), f"http://{host}")
                asked = send_all(target, bodies, [0.0] * len(bodies), 1).outcomes
                assert all(outcome.ok for outcome in asked), asked
                times = (asked[1 + kind :: len(KINDS)] for kind in range(len(KINDS)))
                rows.append([count, *(1000 * statistics.median(outcome.ttft for outcome in each) for each in times)])
    print(table(["images", *KINDS], rows))


if __name__ == "__main__":
    main(sys.argv[1:])
