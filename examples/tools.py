"""Let a model look into a video by a tool, with the openai SDK (`pip install openai`) and a running server:

    python examples/tools.py clip.mp4 [--question TEXT] [--force] [--base-url http://localhost:8000/v1]

The model calls `frame_at`, this program sends it that frame, and so on until the model answers in words. Serve a model
that was trained for tools, such as Qwen/Qwen3-VL-4B-Instruct. The bundled one was not: it calls only with `--force`.
"""

import argparse
import base64
import io
import json
import os
from pathlib import Path
from typing import Any

import av
from openai import OpenAI

MAX_TURNS = 8


def make_tool(seconds: int) -> dict[str, Any]:
    """What the model is shown of `frame_at`, for a video of this length."""
    second = {"type": "integer", "minimum": 0, "maximum": seconds}
    parameters = {"type": "object", "properties": {"second": second}, "required": ["second"]}
    description = "The frame of the video that is shown at a time, in full resolution."
    return {"type": "function", "function": {"name": "frame_at", "description": description, "parameters": parameters}}


def frame_at(container: av.container.InputContainer, second: float) -> list[dict[str, Any]]:
    """The frame, or the last one before it, as the content of a message. Raises av.FFmpegError."""
    container.seek(int(second * av.time_base))  # to the key frame before it
    for frame in container.decode(video=0):
        if (frame.time or 0.0) >= second:
            break
    sink = io.BytesIO()
    frame.to_image().save(sink, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(sink.getvalue()).decode()}"
    return [{"type": "image_url", "image_url": {"url": url}}]


def call(container: av.container.InputContainer, function: Any) -> Any:
    """The result of a call; a wrong one is for the model to correct."""
    print(f"{function.name}({function.arguments})")
    try:
        return {"frame_at": frame_at}[function.name](container, **json.loads(function.arguments))
    except (av.FFmpegError, KeyError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("video", type=Path)
    parser.add_argument("--question", default="Describe the video.")
    parser.add_argument("--force", action="store_true", help="The first answer has to be a call.")
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    args = parser.parse_args()

    url = "data:video/mp4;base64," + base64.b64encode(args.video.read_bytes()).decode()
    content = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": args.question}]
    messages: list[Any] = [{"role": "user", "content": content}]
    choice: Any = "required" if args.force else "auto"
    key = os.environ.get("OPENAI_API_KEY", "none")
    with av.open(str(args.video)) as container, OpenAI(base_url=args.base_url, api_key=key) as client:
        tools: Any = [make_tool((container.duration or 0) // av.time_base)]
        asking: dict[str, Any] = {"model": client.models.list().data[0].id, "tools": tools, "temperature": 0}
        for _ in range(MAX_TURNS):
            reply = client.chat.completions.create(
                messages=messages, tool_choice=choice, parallel_tool_calls=False, **asking
            )
            message: Any = reply.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                print(message.content)
                return
            for made in message.tool_calls:
                result = call(container, made.function)
                messages.append({"role": "tool", "tool_call_id": made.id, "content": result})
            choice = "auto"
    raise SystemExit(f"no answer after {MAX_TURNS} calls")


if __name__ == "__main__":
    main()
