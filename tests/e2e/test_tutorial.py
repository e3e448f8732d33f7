"""docs/tutorial.md: all of its commands, in one shell, print what the page shows."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.support.running_server import ROOT

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
# A block of commands, and the block of their output that may follow.
BLOCK = re.compile(r"\n\n((?:    .*\n|\n(?=    ))+)(?:\n```text\n([\s\S]*?)^```)?", re.MULTILINE)
END = "--- end of block"


def run(blocks: list[str], cwd: Path) -> list[str]:
    """The output of each, in one shell, with the server at another port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    script = "".join(f"{block}echo '{END}'\n" for block in blocks)
    for before, after in ((".venv/bin/python", sys.executable), (" serve.py", f" {ROOT}/serve.py"), ("8000", port)):
        script = script.replace(before, after)
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(cwd), "TMPDIR": str(cwd)}
    with (cwd / "output").open("w+") as output:
        streams = {"stdout": output, "stderr": subprocess.STDOUT}
        shell = subprocess.Popen(["bash", "-c", script], cwd=cwd, env=environ, start_new_session=True, **streams)
        try:
            shell.wait(300)
        finally:
            with contextlib.suppress(ProcessLookupError):  # nothing is left, as the page says
                os.killpg(shell.pid, signal.SIGTERM)
        output.seek(0)
        return output.read().replace(port, "8000").split(f"{END}\n")


def test_commands_print_what_the_page_shows(tmp_path):
    blocks = [(re.sub(r"^    ", "", match[1], flags=re.MULTILINE), match[2] or "") for match in BLOCK.finditer(PAGE)]
    outputs = run([commands for commands, _ in blocks], tmp_path)
    for (commands, shown), printed in zip(blocks, outputs, strict=False):
        pattern = re.escape(shown).replace("…", ".*")
        assert re.fullmatch(pattern, printed), f"{commands}\nshown:\n{shown}\nprinted:\n{printed}"
    assert len(outputs) == len(blocks) + 1


def test_every_fail_point_is_named():
    source = "".join(path.read_text() for path in (ROOT / "mini_engine").rglob("*.py"))
    names = set(re.findall(r"reach_failpoint\(\"([\w-]+)\"\)", source))
    assert len(names) >= 15 and names == {name for name in names if f"`{name}`" in PAGE}
