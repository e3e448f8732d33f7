"""The playground: a page that asks this server from a browser and shows what happened. Static files; all that the page
shows comes from the API."""

from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import Response

FOLDER = Path(__file__).parent.parent / "playground"
SCRIPTS = ("app", "answer", "api", "elements", "media", "server", "snippets")
TYPES = {"index.html": "text/html", "style.css": "text/css", "clip.mp4": "video/mp4"}
TYPES |= {f"{name}.js": "text/javascript" for name in SCRIPTS}
PATHS = ("/", *(f"/playground/{name}" for name in TYPES))  # no API key: the page asks for it

# Answers are set as text; if one became HTML nevertheless, its scripts would not run and nothing would leave the page.
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' blob: data:; media-src 'self' blob: data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",  # a page of one release with the script of another would not fit
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}

router = APIRouter(include_in_schema=False)


@router.get("/")
async def page() -> Response:
    return await file("index.html")


@router.get("/playground/{name}")
async def file(name: str) -> Response:
    if name not in TYPES:
        raise HTTPException(404)
    return Response((FOLDER / name).read_bytes(), media_type=TYPES[name], headers=HEADERS)
