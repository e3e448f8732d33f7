"""Caption all images and videos of a folder, with a line of JSON for each: `file`, `question`, and `text` or `error`.

    python examples/caption_folder.py FOLDER --out captions.jsonl [--question TEXT] [flags of serve.py]

Killed or stopped, it goes on when the same command is given again; another folder or question needs another file. What
failed is asked again; the exit status is 1 then. Without `--model` the bundled model answers, which knows only rendered
moving shapes; for real footage add `--model Qwen/Qwen2.5-VL-3B-Instruct`.
"""

import argparse
import contextlib
import sys
from pathlib import Path

from tqdm import tqdm

from mini_engine import LLM
from mini_engine.batch.llm import KINDS
from mini_engine.batch.row_file import RowFile
from mini_engine.batch.server_handle import ServerError
from mini_engine.config import ConfigError


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
        return caption(args, flags)
    except (ConfigError, ServerError, OSError) as error:
        sys.exit(f"caption_folder.py: {error}")
    except KeyboardInterrupt:
        return 130  # captions so far are in the file


def caption(args: argparse.Namespace, flags: list[str]) -> int:
    """Append a caption of each file that has none; returns 1 if one failed."""
    files = (path for path in sorted(args.folder.rglob("*")) if not path.is_dir())  # some have a file's suffix
    paths = {str(path.relative_to(args.folder)): path for path in files}
    kinds = {name: KINDS[path.suffix.lower()] for name, path in paths.items() if path.suffix.lower() in KINDS}
    if not kinds:
        raise ConfigError(f"{args.folder} has no images or videos, by the names of its files")
    done = set[str]()

    def has_caption(row: dict[str, str]) -> bool:
        if row["question"] != args.question:
            sys.exit(f"caption_folder.py: {args.out} answers another question, {row['question']!r}; choose another")
        if "error" not in row:
            done.add(row["file"])
        return row["file"] in done

    with contextlib.closing(RowFile(args.out, b'{"file":', has_caption)) as out:
        left, num_failed = [name for name in kinds if name not in done], 0
        if left:
            with LLM(flags=flags) as llm:
                prompts = ([kinds[name](paths[name]), args.question] for name in left)
                for answer in tqdm(llm.stream(prompts, temperature=0), total=len(left), unit=" files"):
                    row = {"error": answer.error} if answer.error else {"text": answer.text}
                    out.append({"file": left[answer.id], "question": args.question, **row})
                    num_failed += answer.error is not None
    num_before = len(kinds) - len(left)
    counts = f"{len(kinds)} files, {num_before} with a caption before, {num_failed} failed"
    others = f"; {ignored} with other suffixes ignored" if (ignored := len(paths) - len(kinds)) else ""
    print(f"{counts}{others}: {args.out}", file=sys.stderr)
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
