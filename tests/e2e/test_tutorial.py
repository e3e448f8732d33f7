"""docs/tutorial.md: all of its commands, in one shell, print what the page shows."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys

from tests.support.running_server import ROOT

PAGE = (ROOT / "docs" / "tutorial.md").read_text()


def test_commands_print_what_the_page_shows(tmp_path):
    # A block of commands, and the block of their output that may follow.
    block = re.compile(r"\n\n((?:    .*\n|\n(?=    ))+)(?:\n```text\n([\s\S]*?)^```)?", re.MULTILINE)
    blocks = [(re.sub(r"^    ", "", match[1], flags=re.MULTILINE), match[2] or "") for match in block.finditer(PAGE)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    script = "".join(f"{commands}echo '--- end of block'\n" for commands, _ in blocks)
    for before, after in ((".venv/bin/python", sys.executable), (" serve.py", f" {ROOT}/serve.py"), ("8000", port)):
        script = script.replace(before, after)
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    with (tmp_path / "output").open("w+") as output:
        streams = {"stdout": output, "stderr": subprocess.STDOUT}
        shell = subprocess.Popen(["bash", "-c", script], cwd=tmp_path, env=environ, start_new_session=True, **streams)
        try:
            shell.wait(300)
        finally:
            with contextlib.suppress(ProcessLookupError):  # nothing is left, as the page says
                os.killpg(shell.pid, signal.SIGTERM)
        output.seek(0)
        *outputs, rest = output.read().replace(port, "8000").split("--- end of block\n")
    for (commands, shown), printed in zip(blocks, outputs, strict=False):
        pattern = re.escape(shown).replace("…", ".*")
        assert re.fullmatch(pattern, printed), f"{commands}\nshown:\n{shown}\nprinted:\n{printed}"
    assert len(outputs) == len(blocks), rest


def test_every_fail_point_is_named():
    source = "".join(path.read_text() for path in (ROOT / "mini_engine").rglob("*.py"))
    names = set(re.findall(r"reach_failpoint\(\"([\w-]+)\"\)", source))
    assert len(names) >= 15 and names == {name for name in names if f"`{name}`" in PAGE}
