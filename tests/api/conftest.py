"""Fixtures of the API server's tests: a small model's processor, loaded once."""

import pytest

from mini_engine.media.processor import MediaProcessor
from tests import tiny_processor


@pytest.fixture(scope="session")
def processor(tmp_path_factory: pytest.TempPathFactory) -> MediaProcessor:
    return MediaProcessor(tiny_processor.build(tmp_path_factory.mktemp("model")))
