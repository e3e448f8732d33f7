"""Every family through the running server: answers equal what transformers generates from the same frames."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_engine.demo import videos
from mini_engine.media.frame_sampling import VideoSampling
from mini_engine.media.processor import MediaProcessor
from mini_engine.prompt.detokenizer import Vocabulary
from tests.support import families, tiny_processor
from tests.support.client import data_url
from tests.support.decoding import decode_image, decode_video
from tests.support.full_call import full_call
from tests.support.running_server import RunningServer, message

SMALL_STEPS = ["--max-num-batched-tokens", "64"]  # prompts are cut into chunks in the middle of items
MODEL_CARD = ["--mm-processor-kwargs", '{"fps": 2, "do_sample_frames": true}', "--tool-call-parser", "qwen3_coder"]
QWEN3_5 = ("qwen3_5", MODEL_CARD)


class Family:
    """A directory with a random model and a real processor, and transformers' own of both."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        tiny_processor.build(folder, name)
        self.processor = MediaProcessor(folder)
        self.hf = self.processor.hf_processor
        more = {
            "image_token_id": self.hf.image_token_id,
            "video_token_id": self.hf.video_token_id,
            "vision_start_token_id": self.hf.tokenizer.convert_tokens_to_ids("<|vision_start|>"),
            "vision_end_token_id": self.hf.tokenizer.convert_tokens_to_ids("<|vision_end|>"),
            "patch_size": self.hf.image_processor.patch_size,
        }
        self.model = families.build(name, len(self.hf.tokenizer), deviation=0.15, **more)
        self.model.save_pretrained(folder)
        fps = getattr(self.hf.video_processor, "fps", None)
        self.sampling = VideoSampling(fps=fps, min_frames=4) if fps else VideoSampling(num_frames=32)

    def inputs(self, messages: list[dict[str, Any]], media: list[tuple[str, bytes]]) -> Any:
        """What transformers' own template and processor make of a conversation."""
        prompt = self.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        decoded = [
            decode_image(data) if kind == "image_url" else decode_video(data, self.sampling) for kind, data in media
        ]
        return full_call(self.processor, *decoded, text=prompt)


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A family, and the server of it."""
    name, flags = request.param
    family = Family(name, tmp_path_factory.mktemp("model"))
    with RunningServer(str(family.folder), *SMALL_STEPS, *flags) as server:
        yield family, server


@pytest.mark.parametrize(
    "served",
    [
        pytest.param(QWEN3_5, id="qwen3_5"),  # the first, as below: so both tests have the same server
        pytest.param(("qwen2_vl", ["--mm-processor-cache-type", "lru"]), id="qwen2_vl", marks=pytest.mark.slow),
        pytest.param(("qwen3_vl", ["--mm-processor-cache-type", "shm"]), id="qwen3_vl"),
        pytest.param(("qwen3_5", ["-tp", "2"]), id="qwen3_5-tp2", marks=pytest.mark.slow),
        pytest.param(("qwen3_vl_moe", ["-tp", "2"]), id="qwen3_vl_moe-tp2", marks=pytest.mark.slow),
        pytest.param(("qwen3_5_moe", []), id="qwen3_5_moe", marks=pytest.mark.slow),
        pytest.param(("qwen2_5_vl", []), id="qwen2_5_vl", marks=pytest.mark.slow),
        pytest.param(
            ("qwen3_vl", ["--mm-processor-cache-type", "lru", "-tp", "2"]), id="qwen3_vl-tp2", marks=pytest.mark.slow
        ),
    ],
    indirect=True,
)
def test_answers_equal_transformers(served: tuple[Family, RunningServer]):
    """Twice each: the second time the media, and most of the prompt, come out of the caches."""
    family, server = served
    first, second = (
        videos.encode(videos.render(3 * 10**9 + seed, width=96, height=64, num_frames=frames, fps=8), "mp4", "h264")
        for seed, frames in ((1, 24), (2, 14))
    )
    picture = videos.encode_image(videos.render_image(3 * 10**9 + 3))
    prompts = {
        "image": [("image_url", picture)],
        "two videos": [("video_url", second), ("video_url", first)],
        "mixed": [("video_url", second), ("image_url", picture), ("video_url", first)],
    }
    vocabulary = Vocabulary(family.hf.tokenizer)

    @torch.inference_mode()
    def generate(question: str, media: list[tuple[str, bytes]]) -> list[bytes]:
        """The bytes of each of the likeliest tokens, by transformers."""
        content = [{"type": kind.removesuffix("_url")} for kind, _ in media] + [{"type": "text", "text": question}]
        inputs = family.inputs([{"role": "user", "content": content}], media)
        output = family.model.generate(**inputs, max_new_tokens=64, do_sample=False, top_k=None, pad_token_id=0)
        return [vocabulary.bytes_of(token) for token in output[0, inputs["input_ids"].shape[1] :].tolist()]

    expected = {name: generate(f"Describe {name}.", media) for name, media in prompts.items()}
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected), "then a swap would not be seen"
    decodes = []
    for turn in range(2):
        hits = server.total("prefix_cache_hits_total")
        for name, media in prompts.items():
            reply = server.client.chat.completions.create(
                model=server.model,
                messages=[message(f"Describe {name}.", [(kind, data_url(data)) for kind, data in media])],
                temperature=0,
                max_tokens=64,
                logprobs=True,
                extra_body={"ignore_eos": True, "skip_special_tokens": False},
            )
            tokens = [bytes(token.bytes) for token in reply.choices[0].logprobs.content]
            assert tokens == expected[name], (name, turn)
        assert turn == 0 or server.total("prefix_cache_hits_total") > hits
        decodes.append(server.total("media_decodes_total"))
    # Two videos and a picture; both videos once more where they share the prompt's length. Everything else was a hit.
    assert decodes[0] == decodes[1] and decodes[0] in (3, 5)


@pytest.mark.parametrize("served", [pytest.param(QWEN3_5, id="qwen3_5")], indirect=True)  # of recurrent states
def test_turns_of_a_conversation_compute_only_what_is_new(served: tuple[Family, RunningServer]):
    """Five turns about one video, which is encoded once."""
    _, server = served

    def encoded_and_decoded() -> tuple[float, float]:
        """How many media items were, so far."""
        encoded = server.total("encoder_cache_queries_total") - server.total("encoder_cache_hits_total")
        return encoded, server.total("media_decodes_total")

    clip = videos.encode(videos.render(3 * 10**9 + 4, width=640, height=480, num_frames=16, fps=8), "mp4", "h264")
    messages = [message("What moves?", [("video_url", data_url(clip))])]
    length = 0
    for turn in range(5):
        before = encoded_and_decoded()
        reply = server.client.chat.completions.create(
            model=server.model, messages=messages, temperature=0, max_tokens=20, extra_body={"ignore_eos": True}
        )
        cached = reply.usage.prompt_tokens_details.cached_tokens
        if turn:
            # The text of random tokens is not always tokenised as it was sampled.
            assert length - 16 <= cached
            assert encoded_and_decoded() == before
        length = reply.usage.prompt_tokens
        messages += [
            {"role": "assistant", "content": reply.choices[0].message.content},
            {"role": "user", "content": f"And number {turn}?"},
        ]


@pytest.mark.parametrize("served", [pytest.param(QWEN3_5, id="qwen3_5")], indirect=True)
def test_forced_calls_in_xml(served: tuple[Family, RunningServer]):
    """The grammar acts in the worker, and the stream's arguments are those of the whole answer."""
    family, server = served
    properties = {"side": {"enum": ["north", "south"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}}
    function = {"name": "look", "parameters": {"properties": properties, "required": ["side", "n"]}}
    for seed in range(4):
        asked: dict[str, Any] = {
            "model": server.model,
            "messages": [message("Look.", [])],
            "tools": [{"type": "function", "function": function}],
            "tool_choice": {"type": "function", "function": {"name": "look"}},
            "seed": seed,
            "extra_body": {"stop_token_ids": [family.hf.tokenizer.eos_token_id]},  # which the random model's files lack
        }
        (call,) = server.client.chat.completions.create(**asked).choices[0].message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert arguments["side"] in ("north", "south") and isinstance(arguments["n"], int), call
        with server.client.chat.completions.stream(**asked) as stream:
            (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
        assert streamed.function.arguments == call.function.arguments
