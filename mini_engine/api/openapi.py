"""What `/openapi.json` says of the bodies of requests. Handlers parse those themselves, so FastAPI cannot know.

Knows nothing of what the endpoints do.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from mini_engine.api.protocol import Body

_REF = "#/components/schemas/{model}"


def takes(kind: type[Body]) -> dict[str, Any]:
    """The `openapi_extra` of an endpoint that wants a `kind` as JSON; the application is to describe it."""
    schema = {"$ref": _REF.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


class DescribedApp(FastAPI):
    """An application whose document holds the schemas of `bodies`, and of all that they are made of."""

    def __init__(self, bodies: list[type[Body]], **more: Any):
        super().__init__(**more)
        self._bodies = bodies

    def openapi(self) -> dict[str, Any]:
        """The document, made once."""
        document = super().openapi()
        if "components" not in document:
            _, described = models_json_schema([(kind, "validation") for kind in self._bodies], ref_template=_REF)
            document["components"] = {"schemas": described["$defs"]}
        return document
