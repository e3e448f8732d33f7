"""Render one video of the kind that the bundled model knows, or its middle frame, by the ending of `--out`:
`python -m mini_engine.demo --out clip.mp4`.
"""

import argparse
import random
from pathlib import Path

from mini_engine.demo import videos

CODECS = {"mp4": "h264", "mkv": "h264", "webm": "vp9"}


def main() -> None:
    """Write the file, and print what the right description of it is."""
    parser = argparse.ArgumentParser(prog="python -m mini_engine.demo", description=__doc__)
    parser.add_argument("--colour", choices=videos.COLOURS)
    parser.add_argument("--shape", choices=videos.SHAPES)
    parser.add_argument("--motion", choices=videos.MOTIONS)
    parser.add_argument("--seed", type=int, default=None, help="random seed of unset properties; default: a new one")
    parser.add_argument(
        "--out", type=Path, default=Path("clip.mp4"), help="output file: .mp4, .mkv, .webm, or .png for a frame"
    )
    args = parser.parse_args()
    container = args.out.suffix.removeprefix(".")
    if container not in (*CODECS, "png"):
        parser.error(f"--out: {args.out} does not end in one of .{', .'.join(CODECS)}, .png")
    chosen = {name: getattr(args, name) for name in ("colour", "shape", "motion") if getattr(args, name)}
    clip = videos.render(random.randrange(10**9, 2 * 10**9) if args.seed is None else args.seed, **chosen)
    if container == "png":
        middle = videos.Clip(clip.colour, clip.shape, None, clip.frames[len(clip.frames) // 2 :])
        args.out.write_bytes(videos.encode_image(middle))
    else:
        args.out.write_bytes(videos.encode(clip, container, CODECS[container]))
    print(f"{args.out}: {clip.colour} {clip.shape}, {clip.motion}")


if __name__ == "__main__":
    main()
