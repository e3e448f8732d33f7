"""`/openapi.json`: what routes take and answer, from the types that they decode and encode with msgspec."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI

from mini_engine.api.errors import ErrorResponse

_REF = "#/components/schemas/{name}"
_described: set[type[msgspec.Struct]] = set()  # types that routes refer to


def takes(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The `openapi_extra` of a route that takes a `kind` as JSON."""
    return {"requestBody": {"required": True, "content": _content(kind)}}


def in_path(name: str) -> dict[str, Any]:
    """The `openapi_extra` of a route with a text in its path."""
    return {"parameters": [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]}


def answers(kind: type[msgspec.Struct]) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that answers with a `kind` as JSON."""
    return {200: {"description": HTTPStatus.OK.phrase, "content": _content(kind)}}


def refuses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may answer with an error of these statuses."""
    content = _content(ErrorResponse)
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}


def _content(kind: type[msgspec.Struct]) -> dict[str, Any]:
    _described.add(kind)
    return {"application/json": {"schema": {"$ref": _REF.format(name=kind.__name__)}}}


GENERATION_ERRORS = refuses(400, 401, 404, 408, 413, 415, 429, 500, 503)
GUARDED = refuses(401, 503)  # of a route that needs an API key, and is refused while the server drains


class DescribedApp(FastAPI):
    """An application whose document has the schemas of all types that its routes refer to."""

    def openapi(self) -> dict[str, Any]:
        """The document, made once."""
        document = super().openapi()
        if "components" not in document:
            kinds = sorted(_described, key=lambda kind: kind.__name__)
            _, schemas = msgspec.json.schema_components(kinds, ref_template=_REF)
            document["components"] = {"schemas": schemas}
        return document
