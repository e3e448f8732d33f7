"""Fixtures of the media tests: a small model directory, and its processor, loaded once."""

from pathlib import Path

import pytest

from mini_engine.media.processor import MediaProcessor
from tests.media import tiny_processor


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_processor.build(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def processor(model_dir: Path) -> MediaProcessor:
    return MediaProcessor(model_dir)
