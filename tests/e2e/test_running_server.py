"""On a host with CUDA devices, but too few of them, the tests' servers serve too."""

from __future__ import annotations

import pytest
import torch

from mini_engine.api import engine_client
from mini_engine.cli import parse
from tests.e2e.running_server import FIGURES_SECONDS, RunningServer, where_to_serve

ON_THE_CPU = {"MINI_ENGINE_DEVICE": "cpu"}


@pytest.mark.parametrize(
    ("flags", "devices"),
    [
        (["-tp", "2"], 1),
        (["--tensor-parallel-size=2", "model"], 1),
        (["-dp", "2", "--api-server-count", "2"], 1),
        (["--port", "0", "-tp", "2", "--data-parallel-size", "2"], 3),
    ],
)
def test_workers_without_a_device_each_serve_on_the_cpu(flags, devices):
    assert where_to_serve(flags, {}, devices) == ON_THE_CPU
    assert where_to_serve(flags, {}, 4) == {}, "there are enough"
    assert where_to_serve(flags, {}, 0) == {}, "auto is the CPU"
    assert parse(["-tp", "2"], ON_THE_CPU).device == "cpu"


@pytest.mark.parametrize("told", [["--device", "cuda"], ["--distributed-backend", "gloo"], ["--device=auto"]])
def test_who_says_where_to_serve_is_heeded(told):
    assert where_to_serve(["-tp", "2", *told], {}, 1) == {}
    name, _, value = told[0].partition("=")
    variable = f"MINI_ENGINE_{name[2:].upper().replace('-', '_')}"
    assert where_to_serve(["-tp", "2"], {variable: value or told[1]}, 1) == {}


def test_a_server_is_started_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("MINI_ENGINE_DEVICE", "MINI_ENGINE_DISTRIBUTED_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    server = RunningServer("-tp", "2", environ={"NAME": "value"})
    assert (server.environ["NAME"], server.environ["MINI_ENGINE_DEVICE"]) == ("value", "cpu")
    assert "MINI_ENGINE_DEVICE" not in RunningServer().environ


def test_how_long_engines_may_take_to_tell_their_figures_is_known():
    assert FIGURES_SECONDS == engine_client.FIGURES_SECONDS
