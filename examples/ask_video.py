"""Ask a running server about a video, with the openai SDK (`pip install openai`); the answer is shown as it comes, then
the seconds of each stage, if the server is one of this project:

    python examples/ask_video.py clip.mp4 [--question TEXT] [--base-url http://localhost:8000/v1]
"""

import argparse
import base64
import os
from pathlib import Path
from typing import Any

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("video", type=Path)
    parser.add_argument("--question", default="Describe the video.")
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    args = parser.parse_args()

    url = "data:video/mp4;base64," + base64.b64encode(args.video.read_bytes()).decode()
    content = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": args.question}]
    messages: Any = [{"role": "user", "content": content}]  # the SDK's types have no videos
    with OpenAI(base_url=args.base_url, api_key=os.environ.get("OPENAI_API_KEY", "none")) as client:
        model = client.models.list().data[0].id
        ours = {"return_timings": True}
        stream = client.chat.completions.create(
            model=model, messages=messages, temperature=0, stream=True, extra_body=ours
        )
        timings: dict[str, float] = {}
        for chunk in stream:
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
            timings = getattr(chunk, "metrics", timings)
    print()
    for stage, seconds in timings.items():
        print(f"{stage:>12} {seconds:8.3f} s")


if __name__ == "__main__":
    main()
