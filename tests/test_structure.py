"""The shape of the project: who imports whom, how long things are, and that nothing named is missing."""

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from mini_engine import config
from mini_engine.launch.cli import build_parser

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mini_engine"
BESIDE = ["benchmarks", "examples", "training"]  # may import everything; nothing of the package imports them
FILES = sorted(path for part in (PACKAGE, *(ROOT / name for name in BESIDE)) for path in part.rglob("*.py"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Full names of the package's own modules that a file imports."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if (ROOT / (name.replace(".", "/") + ".py")).exists() else node.module for name in names}
    return {name for name in found if name.startswith("mini_engine")}


@pytest.mark.parametrize(
    ("part", "may_import"),
    {
        # `http` and the core may read a model's config.json, `media` its spec.
        "http": "http protocol prompt media engine_client transport model.config",
        "prompt": "prompt protocol media.processor media.hashing",
        "media": "media protocol transport.shared_memory model.architectures",
        "engine_client": "engine_client protocol transport",
        "protocol": "protocol",
        "transport": "transport",
        "core": "core model.config transport.sockets transport.codec transport.page_allocator",  # those without torch
        "worker": "worker model kernels transport launch.plan.memory_plan",
        "model": "model matmul kernels",
        "matmul": "matmul kernels",
        "kernels": "kernels",
        "demo": "demo",
        "batch": "batch launch.cli launch.runtime_directory",
        "cluster": "cluster protocol launch.cli http.access http.admission http.body http.error_responses "
        "http.routes.playground",
    }.items(),
)
def test_imports_point_one_way(part: str, may_import: str):
    """Each part may import these folders and files, and files at the top."""
    at_top = "messages config log metrics failpoints fair_semaphore free_memory".split()
    allowed = f"{may_import} launch.child launch.process_setup".split()
    for path in (PACKAGE / part).rglob("*.py"):
        for name in imports_of(path):
            file = name.removeprefix("mini_engine.")
            assert file in at_top or file in allowed or file.partition(".")[0] in allowed, f"{path} imports {name}"


def test_only_the_cluster_imports_ray_and_only_commands_what_is_beside_the_package():
    for names, users in (("ray", {"cluster"}), ("|".join(BESIDE), {"benchmarks", "training"})):
        pattern = re.compile(rf"^\s*(from|import) ({names})\b", re.MULTILINE)
        assert {path.parent.name for path in FILES if pattern.search(path.read_text())} == users


def test_no_two_files_or_classes_of_the_package_share_a_name():
    files = [path for path in PACKAGE.rglob("*.py") if not path.name.startswith("__")]
    names = Counter(path.name for path in files)
    names.update(node.name for path in files for node in parsed(path).body if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_a_folder_of_more_than_twelve_files_has_a_folder_that_names_an_idea():
    folders = [PACKAGE, *(path for path in PACKAGE.rglob("*") if any(path.glob("*.py")))]
    large = [folder for folder in folders if len([*folder.glob("*.py")]) > 12]
    assert [folder for folder in large if not any(folder.glob("*/__init__.py"))] == []


def test_no_import_cycles_between_files_or_folders():
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): imports_of(path) for path in PACKAGE.rglob("*.py")}
    files = {name.removesuffix(".__init__"): imports for name, imports in files.items()}
    folders: dict[str, set[str]] = {}
    for name, imports in files.items():
        own = name.split(".")[1:2]
        folders.setdefault("".join(own), set()).update(part.split(".")[1] for part in imports if "." in part)
    for graph in (files, folders):
        graph = {name: imports - {name} for name, imports in graph.items()}
        list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


def test_the_core_and_the_supervisor_import_neither_torch_nor_aiohttp():
    code = "import sys, mini_engine.core.engine_core, mini_engine.launch.supervisor; "
    code += "sys.exit(bool({'torch', 'aiohttp', 'yarl'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_short(path: Path):
    assert len(path.read_text().splitlines()) <= 450
    for node in ast.walk(parsed(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= 60, f"{node.name}: {length} lines"


def test_helpers_of_tests_serve_one_folder_or_are_in_support():
    """Or of a folder around it. No two classes share a name."""
    files, classes, wrong = sorted((ROOT / "tests").rglob("*.py")), [], []
    for path in files:
        own = ".".join(path.parent.relative_to(ROOT).parts)
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests"):
                for name in (f"{node.module}.{alias.name}" for alias in node.names):
                    module = name if (ROOT / (name.replace(".", "/") + ".py")).exists() else node.module
                    folder = module.rpartition(".")[0]
                    is_around = folder != "tests" and f"{own}.".startswith(f"{folder}.")
                    if folder != "tests.support" and not is_around:
                        wrong.append(f"{path.relative_to(ROOT)} imports {module}")
        classes += [node.name for node in parsed(path).body if isinstance(node, ast.ClassDef)]
    assert not wrong, wrong
    assert len(classes) == len({*classes}), sorted(name for name in {*classes} if classes.count(name) > 1)


def test_every_module_says_what_it_is():
    silent = [str(path) for path in FILES if path.stat().st_size and not ast.get_docstring(parsed(path))]
    assert not silent, silent


def test_names_in_docstrings_and_comments_are_defined_where_they_say():
    """Each `module.name` and `Class.member`: in a file of that name, or in one with that class."""
    files, names = dict[str, str](), set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        names |= {*re.findall(r"`(\w+)\.(?!py\b|json\b)(\w+)", text)}
        for owner in (path.stem, *re.findall(r"^class (\w+)", text, re.MULTILINE)):
            files[owner] = files.get(owner, "") + text
    for owner, name in names:
        if owner in files or (name in files and name != name.lower()):
            definition = rf"^\s*(async def |def |class |self\.)?{name}\b *[:(=,\[]"
            assert re.search(definition, files.get(owner, ""), re.MULTILINE), f"{owner}.{name}"


def test_every_config_field_is_read_somewhere():
    code = "\n".join(path.read_text() for path in FILES if path.parent.name != "config")
    code += (PACKAGE / "config" / "engine_config.py").read_text().partition("def served_names")[2]  # properties
    unread = [field.name for field in config.fields() if not re.search(rf"[.\"]{field.name}\b", code)]
    assert not unread, f"accepted and ignored: {unread}"


def test_every_path_and_flag_in_the_documents_exists():
    others = {"--gpus", "--memory", "--shm-size", "--stop-timeout", "--tmpfs", "--ulimit", "--build", "--build-arg"}
    others |= {"--head", "--address", "--resources", "--node-id", "--reason", "--reason-message"}  # of `ray`
    flags = {*re.findall(r"--[a-z-]+", build_parser().format_help()), *others}
    for document in [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *sorted((ROOT / "docs").glob("*.md")),
    ]:
        text = document.read_text()
        for path in re.findall(r"`((?:mini_engine|benchmarks|examples|training|tests|docs|deploy)/[\w./-]+)`", text):
            assert (ROOT / path).exists(), f"{document.name} names {path}"
        for path in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
            assert (document.parent / path).exists(), f"{document.name} shows {path}"
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text):
            commands = [path for path in FILES if path.parent.name in ("demo", "batch", *BESIDE)]
            known = flag in {*flags, "--no-", "--index-url"} or any(
                f'"{flag}"' in path.read_text() for path in commands
            )
            assert known, f"{document.name} names {flag}"


def test_ruff():
    subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", "."], cwd=ROOT, check=True)
    subprocess.run([sys.executable, "-m", "ruff", "format", "--no-cache", "--check", "."], cwd=ROOT, check=True)


def test_mypy(tmp_path: Path):
    subprocess.run([sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path)], cwd=ROOT, check=True)
