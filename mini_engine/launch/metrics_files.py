"""The files in which API servers count, so that any of them can return the metrics of all.

They are those of prometheus_client's multiprocess mode. The supervisor makes the files of an API server before it
starts the process, numbered, and with their room on the disk allocated: prometheus_client would make sparse files, and
a page that the disk has no room for kills the process that touches it. The replacement of a dead API server counts on
in its files, so that deaths fill no disk.
"""

import os
from pathlib import Path

# The files of a process by what prometheus_client calls them, with room for the metrics of 64 engines.
FILE_BYTES = {
    "counter": 176 << 10,
    "histogram": 80 << 10,
    "gauge_livesum": 4 << 10,
    "gauge_livemax": 80 << 10,
    "gauge_livemostrecent": 128 << 10,
}
# In the environment of an API server: where the files are, which prometheus_client reads, too; and its number.
DIRECTORY_VARIABLE, NUMBER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR", "MINI_ENGINE_METRICS_NUMBER"
NOTHING_USED = bytes(8)  # at the start of a file: how much of it is used, and padding


def make_files(directory: Path, number: int) -> None:
    """Make those of an API server's files that do not exist; each appears at once whole, as zeros. Raises OSError: no
    room for them."""
    for kind, nbytes in FILE_BYTES.items():
        path = directory / f"{kind}_{number}.db"
        if path.exists():
            continue
        partial = path.with_suffix("")
        try:
            with partial.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as error:
            partial.unlink(missing_ok=True)
            reason = f"no room in TMPDIR for the metrics of an API server ({error.strerror})"
            raise OSError(error.errno, f"{reason}; set TMPDIR to a directory with free space") from None
        partial.rename(path)


def forget_gauges(directory: Path, number: int) -> None:
    """Empty the gauges of a dead API server; its counters stay in the totals."""
    for path in directory.glob(f"gauge_live*_{number}.db"):
        with path.open("r+b") as file:
            file.write(NOTHING_USED)
