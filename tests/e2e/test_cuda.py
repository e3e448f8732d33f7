"""The bundled model on CUDA: by kernels and graphs, and without; by each transport and cache; with two workers.

Where there is a CUDA device, the other tests of this folder run on it too, but for those of more workers than there are
devices: `--device` is `auto`. And the kernels serve on the CPU, by Triton's interpreter.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.client import answers_of, ask_image, ask_two, ask_video
from tests.support.running_server import RunningServer


@pytest.mark.parametrize(
    "path_of_patches",
    [
        pytest.param("--mm-tensor-ipc torch_shm --mm-processor-cache-type lru", id="torch_shm"),
        pytest.param("--mm-tensor-ipc direct_rpc --mm-processor-cache-type lru", id="direct_rpc"),
        pytest.param("--mm-processor-cache-type shm", id="store"),
        pytest.param("--mm-tensor-ipc torch_shm --mm-processor-device cuda", id="on the device"),
    ],
)
@pytest.mark.parametrize(
    ("workers", "has_graphs"),
    [
        pytest.param("", True, marks=pytest.mark.gpu, id="one"),
        pytest.param("--enforce-eager", False, marks=pytest.mark.gpu, id="eager"),
        pytest.param("-tp 2 --distributed-backend gloo", False, marks=pytest.mark.gpu, id="gloo"),
        pytest.param("-tp 2", True, marks=pytest.mark.multi_gpu, id="nccl"),
    ],
)
def test_answers_by_each_path(workers: str, has_graphs: bool, path_of_patches: str):
    questions = [*map(ask_video, range(20)), *map(ask_image, range(6)), *map(ask_two, range(4))]
    flags = f"--device cuda {workers} {path_of_patches} --api-server-count 2".split()
    with RunningServer(*flags) as server:
        answers = answers_of(server, questions)
        sent = server.total("ipc_messages_total")
        again = answers_of(server, questions)
        assert has_graphs == ("CUDA graphs of decode steps recorded" in server.log)
        assert server.total("ipc_fallbacks_total") == 0 and sent >= len(questions)
        assert "pageable memory" not in server.log
    assert sum(question.answer != answer for question, answer in zip(questions, answers, strict=True)) <= 2, answers
    assert sum(a != b for a, b in zip(answers, again, strict=True)) <= 1


@pytest.mark.gpu
def test_cuda_graphs_do_not_change_tokens():
    """Long greedy continuations of texts, many at a time, so that steps have every size."""
    texts = [" ".join(["red circle", "moves left", "and then"][: 1 + i % 3] * (1 + i % 5)) for i in range(40)]

    def complete(*flags: str) -> list[str]:
        with RunningServer("--device", "cuda", *flags) as server, ThreadPoolExecutor(len(texts)) as pool:
            complete = server.client.completions.create
            made = pool.map(
                lambda text: complete(model=server.model, prompt=text, max_tokens=60, temperature=0).choices[0].text,
                texts,
            )
            return list(made)

    with_graphs, without = complete(), complete("--enforce-eager")
    # In another company a sum may round otherwise, and a near tie fall to the other side.
    assert sum(a == b for a, b in zip(with_graphs, without, strict=True)) >= 38


@pytest.mark.slow
def test_server_with_triton_kernels_in_the_interpreter():
    """Only one small question, since it is slow."""
    flags = ["--device", "cpu", "--attention-backend", "triton", "--health-timeout", "600", "--max-num-seqs", "2"]
    question = ask_image(3)
    with RunningServer(*flags, environ={"TRITON_INTERPRET": "1"}) as server:
        assert server.ask(question.text, question.urls) == question.answer
