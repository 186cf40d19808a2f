"""The web pages: a chat at `/`, and at `/dashboard` what the server holds and has done. Static files that need only
each other and the API.

Unlike the API, the files are open to anyone who can reach the server: they disclose nothing.
"""

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_STYLES = ("page.css", "colours.css", "dashboard.css")
_PARTS = ("draw_caches.js", "draw_pictures.js", "draw_requests.js", "elements.js", "server.js")
_SCRIPTS = ("page.js", "dashboard.js", *_PARTS)
# File names by path.
PAGE_FILES = {
    "/": "index.html",
    "/dashboard": "dashboard.html",
    **{f"/{name}": name for name in (*_STYLES, *_SCRIPTS)},
}
HEADERS = {
    # Content of answers and pictures can be shown but never run, and nothing is requested from other hosts.
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data: blob:; media-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    return [_route(path, name) for path, name in PAGE_FILES.items()]


def _route(path: str, name: str) -> Route:
    content = files("keepsight.frontend").joinpath("page", name).read_bytes()
    media_type = MEDIA_TYPES[name.rpartition(".")[2]]

    async def page_file(_http: Request) -> Response:
        return Response(content, headers=HEADERS, media_type=media_type)

    return Route(path, page_file)
