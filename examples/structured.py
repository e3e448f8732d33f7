"""Ask about a video and get JSON by a schema, whatever the model would rather say:

    python examples/structured.py clip.mp4 [--model MODEL]

A grammar made from the schema allows no other tokens. Without `--model` the bundled model answers, and the schema is of
what it knows; it was not trained for JSON, and errs more often than in words.
"""

import argparse
import json
from pathlib import Path

from mini_engine import LLM, Video

PROPERTIES = {
    "motion": {"enum": ["left", "right", "up", "down", "still"]},
    "colour": {"enum": ["red", "green", "blue", "yellow", "orange", "purple", "cyan", "white"]},
    "shape": {"enum": ["circle", "square", "triangle", "cross"]},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": [*PROPERTIES], "additionalProperties": False}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("video", type=Path)
    parser.add_argument("--model", help="directory or hub name")
    args = parser.parse_args()

    response_format = {"type": "json_schema", "json_schema": {"name": "scene", "schema": SCHEMA}}
    with LLM(args.model) as llm:
        prompt = [Video(args.video), "Describe the video."]
        answer = llm.submit(prompt, temperature=0, response_format=response_format).result()
    if answer.error:
        raise SystemExit(answer.error)
    scene = json.loads(answer.text)
    for name in PROPERTIES:
        print(f"{name}: {scene[name]}")


if __name__ == "__main__":
    main()
