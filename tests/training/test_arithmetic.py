"""The training's own fast arithmetic against transformers' processor and model, the references."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from mini_engine.demo import videos
from training import codecs, evaluate, forward
from training.data import Item, Sample, Writer, make_item, resized, sample_indices, video_item
from training.model import WEIGHTS


@pytest.fixture(scope="module")
def processor():
    return AutoProcessor.from_pretrained(WEIGHTS)


@pytest.fixture(scope="module")
def model():
    return AutoModelForImageTextToText.from_pretrained(WEIGHTS).eval()


def media_and_items(seed: int) -> tuple[list[videos.Clip], list[Item]]:
    """An image, and two decoded videos of different size, length and rate; the same as training items."""
    clips = [videos.render(seed, width=320, height=180), videos.render(seed + 1, width=96, height=128, num_frames=9)]
    seen = [codecs.roundtrip(clip, "mp4", codec) for clip, codec in zip(clips, ("h264", "vp9"), strict=True)]
    picture = videos.render_image(seed + 2)
    items = [Item(picture.colour, picture.shape, None, resized(picture.frames))]
    items += [video_item(clip, sample_indices(len(clip.frames), 7)) for clip in seen]
    return [picture, *seen], items


@pytest.mark.parametrize("seed", [3, 40])
def test_patches_equal_the_processors(processor, seed):
    media, items = media_and_items(seed)
    wanted = evaluate.processed(processor, media, "What is in each of them?", num_frames=7)
    ours = [forward.normalised(item.patches()) for item in items]
    torch.testing.assert_close(ours[0], wanted["pixel_values"], atol=1e-6, rtol=0)
    torch.testing.assert_close(torch.cat(ours[1:]), wanted["pixel_values_videos"], atol=1e-6, rtol=0)
    assert [list(item.grid) for item in items[1:]] == wanted["video_grid_thw"].tolist()
    assert list(items[0].grid) == wanted["image_grid_thw"][0].tolist()
    assert [item.seconds_per_grid for item in items[1:]] == pytest.approx(
        [float(s) for s in wanted["second_per_grid_ts"]]
    )


def test_tokens_positions_and_logits_equal_transformers(processor, model):
    media, items = media_and_items(11)
    wanted = evaluate.processed(processor, media, "What is in each of them?", num_frames=7)
    writer = Writer(processor.tokenizer)
    messages = evaluate.user_message(media, "What is in each of them?")
    messages.append({"role": "assistant", "content": "first: a red circle; second: a blue square moving up"})
    batch = writer.batch([Sample(tuple(items), writer.expand(messages, tuple(items)))])
    length = wanted["input_ids"].shape[1]
    assert batch.input_ids[:, :length].tolist() == wanted["input_ids"].tolist()

    more = batch.input_ids.shape[1] - length
    inputs = dict(wanted, input_ids=batch.input_ids, attention_mask=torch.ones_like(batch.input_ids))
    inputs["mm_token_type_ids"] = torch.nn.functional.pad(wanted["mm_token_type_ids"], (0, more))
    rope = {
        k: inputs[k]
        for k in ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    }
    assert model.model.get_rope_index(**rope)[0].tolist() == batch.positions.tolist()

    with torch.inference_mode():
        logits = model(**inputs).logits[0, :-1][batch.labels[0, 1:] != -100]
        outputs = forward.run(model, batch)
    torch.testing.assert_close(outputs.logits, logits, atol=2e-4, rtol=1e-4)
    assert outputs.targets.tolist() == batch.labels[batch.labels != -100].tolist()


def test_the_decoder_gives_the_same_in_groups_of_any_size(processor, model):
    writer, rng = Writer(processor.tokenizer), np.random.default_rng(2)
    samples = [writer.sample(tuple(make_item(seed) for seed in range(20, 20 + n)), rng) for n in (1, 2, 0, 1, 3)]
    batch = writer.batch(samples)
    with torch.inference_mode():
        one, many = forward.run(model, batch, 10**6), forward.run(model, batch, 1)
    assert many.rows.unique_consecutive().numel() == len(samples)
    order = [torch.argsort(outputs.rows, stable=True) for outputs in (one, many)]
    assert one.targets[order[0]].tolist() == many.targets[order[1]].tolist()
    torch.testing.assert_close(one.logits[order[0]], many.logits[order[1]], atol=2e-4, rtol=1e-4)
