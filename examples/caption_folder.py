"""Caption all images and videos of a folder, with a line `{"file", "text"}` or `{"file", "error"}` for each:

    python examples/caption_folder.py FOLDER --out captions.jsonl [--question TEXT] [flags of serve.py]

Killed or stopped, it goes on when the same command is given again. What failed is asked again; the exit status is 1
then. Without `--model` the bundled model answers, which knows only rendered moving shapes; for real footage add
`--model Qwen/Qwen2.5-VL-3B-Instruct`.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mini_engine import LLM, Image, Video
from mini_engine.batch.server_handle import ServerError
from mini_engine.config import ConfigError
from mini_engine.launch.cli import settle

KINDS = dict.fromkeys(
    ".avif .bmp .heic .heif .jfif .jp2 .jpeg .jpg .png .tif .tiff .webp".split(), Image
) | dict.fromkeys(".avi .flv .gif .m2ts .m4v .mkv .mov .mp4 .mpeg .mpg .mts .ts .webm .wmv".split(), Video)


def keep_answers(path: Path) -> set[str]:
    """Remove a torn last line and the errors from a file of captions; returns the files that it still has."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    rows = {line: json.loads(line) for line in lines if line.endswith(b"\n")}
    kept = {row["file"]: line for line, row in rows.items() if "error" not in row}
    if len(kept) < len(lines):
        copy = path.with_name(path.name + ".tmp")
        copy.write_bytes(b"".join(kept.values()))
        os.replace(copy, path)  # at once: a process killed here leaves the old file or the new one
    return set(kept)


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--question", default="Describe the video.")
    args, flags = parser.parse_known_args()
    if not args.folder.is_dir():
        parser.error(f"{args.folder} is no folder")
    try:
        settings = settle(flags, os.environ)
        options = {name: getattr(settings.config, name) for name in settings.origins}
        done, num_failed = keep_answers(args.out.resolve()), 0
        paths = sorted(path for path in args.folder.rglob("*") if path.suffix.lower() in KINDS)
        left = [path for path in paths if str(path.relative_to(args.folder)) not in done]
        if left:
            num_failed = caption(left, args, options)
    except (ConfigError, ServerError, OSError) as error:
        parser.error(str(error))
    print(f"{len(paths)} files, {num_failed} failed: {args.out}", file=sys.stderr)
    return 1 if num_failed else 0


def caption(paths: list[Path], args: argparse.Namespace, options: dict[str, Any]) -> int:
    """Append the captions of these files; returns how many failed."""
    num_failed = 0
    with args.out.open("a", buffering=1) as out, LLM(**options) as llm:
        prompts = ([KINDS[path.suffix.lower()](path), args.question] for path in paths)
        for answer in tqdm(llm.stream(prompts, temperature=0), total=len(paths), unit=" files"):
            row = {"error": answer.error} if answer.error else {"text": answer.text}
            out.write(json.dumps({"file": str(paths[answer.id].relative_to(args.folder)), **row}) + "\n")
            num_failed += answer.error is not None
    return num_failed


if __name__ == "__main__":
    sys.exit(main())
