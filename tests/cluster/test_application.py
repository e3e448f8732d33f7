"""What `build` takes and refuses."""

from pathlib import Path

import pytest
import yaml

pytest.importorskip("ray", reason="needs the extra [ray]")

from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as call_builder  # noqa: E402

from mini_engine.cluster import Arguments, build  # noqa: E402
from mini_engine.cluster.front import ENDPOINTS  # noqa: E402
from mini_engine.config import ConfigError  # noqa: E402
from mini_engine.http.app import ROUTERS  # noqa: E402
from mini_engine.http.routes import playground  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray's own


@pytest.mark.parametrize(
    "flags, message",
    [("--api-key a", "flags: --api-key"), ("--port 80", "flags: --port"), ("--max-num-seqs 0", "--max-num-seqs")],
)
def test_flags_that_engines_cannot_have_are_refused_before_one_starts(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(Arguments(flags=flags))


def test_the_arguments_of_the_documented_file_are_taken() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    applications = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])["applications"]
    resource = yaml.safe_load(page.rpartition("```yaml\n")[2].partition("```")[0])
    assert yaml.safe_load(resource["spec"]["serveConfigV2"])["applications"] == applications
    assert call_builder(build, applications[0]["args"])


def test_engines_may_be_as_slow_as_their_flags_say() -> None:
    front = build(Arguments(flags="--health-timeout 60"))._bound_deployment
    engines = front.init_args[0]._bound_deployment
    assert engines._deployment_config.health_check_timeout_s > 60


def test_an_unknown_argument_is_refused() -> None:
    with pytest.raises(ValueError, match="nodes"):
        Arguments(nodes=3)


def test_the_front_knows_the_endpoints_of_an_engine() -> None:
    paths = {route.path for router in ROUTERS for route in router.routes} | {"/docs", "/openapi.json"}
    assert ENDPOINTS == paths - {"/v1/models/{name:path}", "/playground/{name}"} | {*playground.PATHS}
