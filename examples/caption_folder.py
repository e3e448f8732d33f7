"""Caption all images and videos of a folder, with a line `{"file", "text"}` or `{"file", "error"}` for each:

    python examples/caption_folder.py FOLDER --out captions.jsonl [--question TEXT] [flags of serve.py]

Killed or stopped, it goes on when the same command is given again; another folder or question needs another file. What
failed is asked again; the exit status is 1 then. Without `--model` the bundled model answers, which knows only rendered
moving shapes; for real footage add `--model Qwen/Qwen2.5-VL-3B-Instruct`.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from tqdm import tqdm

from mini_engine import LLM, Image, Video
from mini_engine.batch.server_handle import ServerError
from mini_engine.config import ConfigError

KINDS = dict.fromkeys(
    ".avif .bmp .heic .heif .jfif .jp2 .jpeg .jpg .png .tif .tiff .webp".split(), Image
) | dict.fromkeys(".avi .flv .gif .m2ts .m4v .mkv .mov .mp4 .mpeg .mpg .mts .ts .webm .wmv".split(), Video)
ROW_START = b'{"file": '


def keep_answers(path: Path) -> set[str]:
    """Remove a torn last line and the errors from a file of captions; returns the files that it still has. Raises
    ConfigError: it has other lines."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    is_torn = bool(lines) and not lines[-1].endswith(b"\n") and ROW_START.startswith(lines[-1][: len(ROW_START)])
    try:
        rows = [json.loads(line) for line in lines[: len(lines) - is_torn]]
        kept = {row["file"]: line for row, line in zip(rows, lines, strict=False) if "error" not in row}
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"{path} has lines that are no captions; choose another file") from None
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
        done = keep_answers(args.out.resolve())
        paths = sorted(path for path in args.folder.rglob("*") if path.suffix.lower() in KINDS)
        left = [path for path in paths if str(path.relative_to(args.folder)) not in done]
        num_failed = caption(left, args, flags) if left else 0
    except (ConfigError, ServerError, OSError) as error:
        sys.exit(f"caption_folder.py: {error}")
    num_before = len(paths) - len(left)
    print(f"{len(paths)} files, {num_before} with a caption before, {num_failed} failed: {args.out}", file=sys.stderr)
    return 1 if num_failed else 0


def caption(paths: list[Path], args: argparse.Namespace, flags: list[str]) -> int:
    """Append the captions of these files; returns how many failed."""
    num_failed = 0
    with args.out.open("a", buffering=1) as out, LLM(flags=flags) as llm:
        prompts = ([KINDS[path.suffix.lower()](path), args.question] for path in paths)
        for answer in tqdm(llm.stream(prompts, temperature=0), total=len(paths), unit=" files"):
            row = {"error": answer.error} if answer.error else {"text": answer.text}
            out.write(json.dumps({"file": str(paths[answer.id].relative_to(args.folder)), **row}) + "\n")
            num_failed += answer.error is not None
    return num_failed


if __name__ == "__main__":
    sys.exit(main())
