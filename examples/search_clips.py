"""Find the images and videos of a folder that a text describes, the best first:

    python examples/search_clips.py FOLDER "a red circle" --model Qwen/Qwen3-VL-Embedding-2B [flags of serve.py]

Embeddings are kept in FOLDER/embeddings.npz: the next search embeds only its text, and files that are new or changed.
Remove that file to search with another model. A model that was not trained for it, such as the bundled one, has
embeddings too, but they find nothing.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

from mini_engine import LLM
from mini_engine.batch.llm import KINDS
from mini_engine.batch.server_handle import ServerError
from mini_engine.config import ConfigError

# Of a text that searches, as its authors write it.
INSTRUCTION = "Retrieve images or text relevant to the user's query."


def embed_new(llm: LLM, folder: Path, known: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The embedding of each file by its time and name; those that are not known are computed."""
    files = (path for path in sorted(folder.rglob("*")) if not path.is_dir())  # some have a file's suffix
    media = {
        f"{path.stat().st_mtime_ns}:{path.relative_to(folder)}": KINDS[path.suffix.lower()](path)
        for path in files
        if path.suffix.lower() in KINDS
    }
    new = [key for key in media if key not in known]
    for key, answer in zip(new, llm.embed([[media[key]] for key in new]), strict=True):
        if answer.error:
            print(f"{key.partition(':')[2]}: {answer.error}", file=sys.stderr)
        else:
            known[key] = np.asarray(answer.vector)
    return {key: known[key] for key in media if key in known}


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
        with LLM(flags=[*flags, "--runner=pooling"]) as llm:
            found = embed_new(llm, args.folder, dict(np.load(path)) if path.exists() else {})
            whole = path.with_name("embeddings.new.npz")  # a search that is killed leaves the old ones
            np.savez(whole, **found)  # type: ignore[arg-type] # its own argument is a flag
            whole.replace(path)
            (query,) = llm.embed([args.text], instruction=INSTRUCTION, use_tqdm=False)
    except (ConfigError, ServerError, OSError) as error:
        parser.error(str(error))
    if query.error:
        parser.error(query.error)
    cosines = {key.partition(":")[2]: float(vector @ np.asarray(query.vector)) for key, vector in found.items()}
    for name in sorted(cosines, key=cosines.__getitem__, reverse=True)[: args.top]:
        print(f"{cosines[name]:.3f} {name}")


if __name__ == "__main__":
    main()
