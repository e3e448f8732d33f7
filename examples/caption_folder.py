"""Caption all images and videos of a folder, with a line `{"file", "text"}` or `{"file", "error"}` for each:

    python examples/caption_folder.py FOLDER --out captions.jsonl [--question TEXT] [flags of serve.py]

Killed or stopped, it goes on when the same command is given again; what failed is asked again. Without `--model` the
bundled model answers, which knows only rendered moving shapes; for real footage add
`--model Qwen/Qwen2.5-VL-3B-Instruct --max-model-len 16384`.
"""

import argparse
import json
import os
from pathlib import Path

from tqdm import tqdm

from mini_engine import LLM, Image, Video
from mini_engine.launch.cli import settle

KINDS = dict.fromkeys(".avif .bmp .heic .heif .jp2 .jpeg .jpg .png .tif .tiff .webp".split(), Image) | dict.fromkeys(
    ".avi .flv .gif .m2ts .m4v .mkv .mov .mp4 .mpeg .mpg .mts .ts .webm .wmv".split(), Video
)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--question", default="Describe the video.")
    args, flags = parser.parse_known_args()
    settings = settle(flags, {})
    options = {name: getattr(settings.config, name) for name in settings.origins}

    paths = sorted(path for path in args.folder.rglob("*") if path.suffix.lower() in KINDS)
    done = keep_answers(args.out.resolve())
    paths = [path for path in paths if str(path.relative_to(args.folder)) not in done]
    with LLM(**options) as llm, args.out.open("a", buffering=1) as out:
        prompts = ([KINDS[path.suffix.lower()](path), args.question] for path in paths)
        for answer in tqdm(llm.stream(prompts, temperature=0), total=len(paths), unit=" files"):
            caption = {"error": answer.error} if answer.error else {"text": answer.text}
            out.write(json.dumps({"file": str(paths[answer.id].relative_to(args.folder)), **caption}) + "\n")


if __name__ == "__main__":
    main()
