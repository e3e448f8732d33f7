"""Fixtures of the media tests: a small model and its processor, loaded once; a policy with names of its own."""

from pathlib import Path

import pytest

from mini_engine.media.fetch import MediaPolicy
from mini_engine.media.processor import MediaProcessor
from tests import tiny_processor
from tests.media.fetching import LIMIT, Names


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_processor.build(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def processor(model_dir: Path) -> MediaProcessor:
    return MediaProcessor(model_dir)


@pytest.fixture
def names() -> Names:
    return Names(media_test=["127.0.0.1"], other_test=["127.0.0.1"])


@pytest.fixture
def policy(names: Names) -> MediaPolicy:
    """media.test is allowed and stands for this machine. Nothing else is allowed."""
    return MediaPolicy(
        None,
        LIMIT,
        allowed_media_domains=["media.test"],
        media_fetch_timeout=20,
        resolve=names,
        is_allowed_address=lambda address: str(address) == "127.0.0.1",
    )
