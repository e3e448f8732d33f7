"""Find the images and videos of a folder that a text describes, the best first:

    python examples/search_clips.py FOLDER "a red circle" --model Qwen/Qwen3-VL-Embedding-2B [flags of serve.py]

Embeddings are kept in FOLDER/embeddings.npz: the next search embeds only its text, and files that are new or changed.
Remove that file to search with other flags. A model that was not trained for it, such as the bundled one, has
embeddings too, but they find nothing.
"""

import argparse
import mimetypes
import os
import sys
from pathlib import Path

import numpy as np

from mini_engine import LLM, Image, Video
from mini_engine.batch.server_handle import ServerError
from mini_engine.config import ConfigError
from mini_engine.launch.cli import settle

KINDS = {"image": Image, "video": Video}
INSTRUCTION = (
    "Retrieve images or text relevant to the user's query."  # of a text that searches, as its authors write it
)


def kind_of(path: Path) -> str:
    return (mimetypes.guess_type(path)[0] or "").partition("/")[0]


def embed_new(llm: LLM, folder: Path, known: dict[str, np.ndarray], model: str) -> dict[str, np.ndarray]:
    """The embedding of each file by its model, time and name; those that are not known are computed."""
    paths = [path for path in sorted(folder.rglob("*")) if kind_of(path) in KINDS]
    keys = {f"{model}:{path.stat().st_mtime_ns}:{path.relative_to(folder)}": path for path in paths}
    new = [key for key in keys if key not in known]
    for key, answer in zip(new, llm.embed([[KINDS[kind_of(keys[key])](keys[key])] for key in new]), strict=True):
        if answer.error:
            print(f"{keys[key]}: {answer.error}", file=sys.stderr)
        else:
            known[key] = np.asarray(answer.vector)
    return {key: known[key] for key in keys if key in known}


def main() -> None:
    """Print a line with the cosine and the name of each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("text")
    parser.add_argument("--top", type=int, default=10, metavar="N")
    args, flags = parser.parse_known_args()
    path = args.folder / "embeddings.npz"
    if not args.folder.is_dir():
        parser.error(f"{args.folder} is no folder")
    try:
        settings = settle([*flags, "--runner=pooling"], os.environ)
        options = {name: getattr(settings.config, name) for name in settings.origins}
        with LLM(**options) as llm:
            known = dict(np.load(path)) if path.exists() else {}
            found = embed_new(llm, args.folder, known, settings.config.model)
            np.savez(path, **found)  # type: ignore[arg-type] # its own argument is a flag
            (query,) = llm.embed([args.text], instruction=INSTRUCTION, use_tqdm=False)
    except (ConfigError, ServerError, OSError) as error:
        parser.error(str(error))
    if query.error:
        parser.error(query.error)
    cosines = {key.split(":", 2)[2]: float(vector @ np.asarray(query.vector)) for key, vector in found.items()}
    for name in sorted(cosines, key=cosines.__getitem__, reverse=True)[: args.top]:
        print(f"{cosines[name]:.3f} {name}")


if __name__ == "__main__":
    main()
