"""What requests return that sample nothing: transformers' hidden states and logits of the prompt's last token."""

from typing import Any

import pytest
import torch
from msgspec.structs import replace

from mini_engine.matmul import in_float32
from mini_engine.messages import NewSequence, PoolingParams
from mini_engine.model.parallel import TensorParallel
from tests.support import script, tiny
from tests.support.checkpoints import load
from tests.support.families import FAMILIES

needs_fbgemm = pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="not on x86")


def pooled_requests(media: tiny.MemoryMedia, family: str, copies: int = 1) -> list[NewSequence]:
    """Each of `mixed_requests` for its hidden state and for logits."""
    return [
        replace(new, request_id=f"{new.request_id} {kind} {copy}", pooling=pooling)
        for copy in range(copies)
        for kind, pooling in (("state", PoolingParams()), ("logits", PoolingParams([7, 3])))
        for new in tiny.mixed_requests(media, family)
    ]


def assert_pooled(results: dict[str, list[float]], oracle: Any, family: str, count: int = 12) -> None:
    """Those of `pooled_requests` are transformers'."""
    media = tiny.MemoryMedia()
    for new in pooled_requests(media, family, copies=3)[:count]:
        numbers = torch.tensor(results[new.request_id])
        torch.testing.assert_close(numbers, tiny.pool(oracle, media, new), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES, indirect=True, scope="session")
@pytest.mark.parametrize(("budget", "ahead", "preempt_at", "count"), [(64, 2, (3, 9), 12), (100_000, 1, (), 26)])
def test_numbers_are_those_of_transformers_beside_decodes(
    budget, ahead, preempt_at, count, family, checkpoint, make_runner, expected
):
    """In chunks, while others decode, after restarts with other blocks; and 32 in one step."""
    media = tiny.MemoryMedia()
    requests = [*tiny.mixed_requests(media, family), *pooled_requests(media, family, copies=3)[:count]]
    steps = script.write_steps(requests, 20, budget, preempt_at)
    results = script.run(make_runner(media), steps, ahead)
    assert_pooled(results, checkpoint.oracle, family, count)
    assert {name: results[name] for name in expected} == expected


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True, scope="session")
def test_two_ranks_return_the_numbers_once(checkpoint, make_runner, expected, runtime):
    """In steps that sample as well, and in steps that do not."""

    def run(tp: TensorParallel) -> list[dict[str, list]]:
        media = tiny.MemoryMedia()
        runner, results = make_runner(media, tp), []
        for others in (tiny.mixed_requests(media, "qwen3_vl"), []):
            requests = others + pooled_requests(media, "qwen3_vl")
            results.append(script.run(runner, script.write_steps(requests, 20, 64), ahead=1))
        return results

    (beside, alone), second = script.on_ranks(2, runtime, run)
    assert second == [{}, {}] and {name: beside[name] for name in expected} == expected
    for results in (beside, alone):
        assert_pooled(results, checkpoint.oracle, "qwen3_vl")


@pytest.mark.parametrize(("name", "bits"), [("qwen3_vl", "none"), ("qwen3_vl untied", "none"), ("qwen3_vl", "int8"),
                                            ("qwen3_vl untied", "int8"),
                                            pytest.param("qwen3_vl untied", "packed", marks=needs_fbgemm)])  # fmt: skip
def test_logits_of_a_sharded_bfloat16_head_are_not_rounded(name, bits, checkpoints, runtime, monkeypatch):
    """A tied head reads the table, which is not quantised."""
    path = checkpoints(name).path
    dense = load(path, torch.bfloat16)
    flags = {} if bits == "packed" else {"quantization": bits}
    if bits == "packed":
        monkeypatch.setattr(in_float32, "is_x86_without_bfloat16", lambda: True)
        monkeypatch.setattr("mini_engine.matmul.linear.LEAST_PACKED", 1)
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    rows, token_ids = torch.tensor([0, 2, 2, 2, 2, 1]), torch.tensor([0, 99, 100, 101, 199, 7])  # the parts meet there

    @torch.inference_mode()
    def run(tp: TensorParallel) -> torch.Tensor:
        model = load(path, torch.bfloat16, tp, **flags)
        logits = model.logits_of(hidden, rows, token_ids)
        model.logits_of(hidden[:1].expand(1 << 40, 64), rows, token_ids)  # no memory for a row of logits of each token
        return logits

    logits, _ = script.on_ranks(2, runtime, run)
    expected = (hidden[rows].float() * dense.head.weight[token_ids].float()).sum(1)
    bound = 0.05 if bits == "int8" and "untied" in name else 1e-5  # of weights and activations in 8 bits
    assert logits.dtype is torch.float32 and (logits - expected).abs().max() < bound
