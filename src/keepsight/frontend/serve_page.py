"""The page at `/`: a chat in the browser, of three static files.  It needs nothing but them and the API beside them.

The files are open to whoever reaches the server, as the API is not: they say nothing.
"""

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PAGE_FILES = {"index.html": "text/html", "page.css": "text/css", "page.js": "text/javascript"}
HEADERS = {
    # What an answer or a picture says can be shown, never run, and nothing else is asked for anything.
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    return [
        _route("/" if name == "index.html" else f"/{name}", name, media_type) for name, media_type in PAGE_FILES.items()
    ]


def _route(path: str, name: str, media_type: str) -> Route:
    content = files("keepsight.frontend").joinpath("page", name).read_bytes()

    async def page_file(_http: Request) -> Response:
        return Response(content, headers=HEADERS, media_type=media_type)

    return Route(path, page_file)
