"""The files of the playground, and access to them."""

import re
from itertools import pairwise

from mini_engine.http.routes.playground import FOLDER, PATHS
from tests.support.serving import Serve, Served, check_error


async def test_files_need_no_key_and_run_no_script_but_their_own(serve: Serve) -> None:
    async with serve(api_key=["k"]) as served:
        for path in PATHS:
            response = await served.http.get(path)
            assert response.status_code == 200 and response.content, path
            assert response.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'; ")


async def test_other_files_are_not_served(served: Served) -> None:
    check_error(await served.http.get("/playground/..%2fapi%2fapp.py"), 404, "unknown_url")


async def test_without_the_playground_its_paths_are_like_any_other(serve: Serve) -> None:
    async with serve(disable_playground=True) as served:
        check_error(await served.http.get("/"), 404, "unknown_url")
    async with serve(disable_playground=True, api_key=["k"]) as served:
        check_error(await served.http.get("/"), 401, "invalid_api_key")


def test_neighbouring_stages_differ_in_lightness() -> None:
    lightness = re.findall(r"\.(\w+) \{ background: oklch\((\S+)", (FOLDER / "style.css").read_text())
    assert len(lightness) == 10
    assert all(abs(float(one) - float(other)) >= 0.1 for (_, one), (_, other) in pairwise(lightness))
