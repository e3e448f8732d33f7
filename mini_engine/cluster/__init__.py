"""Several hosts: Ray Serve starts one whole engine on each and routes requests by their media.

`serve run mini_engine.cluster:build hosts=3 flags="MODEL -tp 2"`. Only this folder imports Ray, and of this folder
neither this file nor `routing` and `media_key` do until `build` is called.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.serve import Application


def build(args: dict[str, str]) -> "Application":
    """The application for `serve run` and for a YAML's `import_path`; for the arguments see `Arguments`."""
    from mini_engine.cluster.application import Arguments, application

    return application(Arguments.model_validate(args))
