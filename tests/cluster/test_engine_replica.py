"""What a replica does without Ray."""

import io
import sys

import pytest

pytest.importorskip("ray", reason="needs the extra [ray]")

from mini_engine.cluster.engine_replica import write_log  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray's own


def test_a_full_disk_loses_lines_of_the_log_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True) as full:
        with pytest.raises(OSError):
            full.write("line\n")
        monkeypatch.setattr(sys, "stderr", full)
        write_log("line\n")
