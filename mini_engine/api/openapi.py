"""What `/openapi.json` says of the bodies of requests and of refusals. Handlers parse the former and make the latter
themselves, so FastAPI cannot know.

Knows nothing of what the endpoints do.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from mini_engine.api.body import Body
from mini_engine.api.errors import ErrorResponse

_REF = "#/components/schemas/{model}"


def takes(kind: type[Body]) -> dict[str, Any]:
    """The `openapi_extra` of an endpoint that wants a `kind` as JSON; the application is to describe it."""
    schema = {"$ref": _REF.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def in_path(name: str) -> dict[str, Any]:
    """The `openapi_extra` of an endpoint with a text in its path."""
    return {"parameters": [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]}


def refuses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of an endpoint that may answer with an error of these statuses."""
    content = {"application/json": {"schema": {"$ref": _REF.format(model=ErrorResponse.__name__)}}}
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}


FOR_TEXT = refuses(400, 401, 404, 408, 413, 415, 429, 500, 503)  # of an endpoint that asks an engine for text
GUARDED = refuses(401, 503)  # of any other that asks for a key, and is closed when the server drains


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
            _, errors = msgspec.json.schema_components([ErrorResponse], ref_template=_REF.format(model="{name}"))
            document["components"] = {"schemas": described["$defs"] | errors}
        return document
