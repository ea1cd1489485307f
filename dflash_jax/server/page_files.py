"""The files of the page at /, and of the one at /docs."""

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

PAGE = Path(__file__).parent / "page"
# Each file has its own route: a directory mounted at / would handle all unknown paths and wrong methods.
PAGE_PATHS = ("/", *(f"/{file.relative_to(PAGE).as_posix()}" for file in sorted(PAGE.rglob("*.*")) if file.is_file()))
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".mjs": "text/javascript"}
# The page shows text of a model, which is untrusted: it runs its own files only, and reaches this server only. HTML
# that a script inserts has to pass DOMPurify.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; media-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types dompurify"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Browsers ask whether a file is new, and get 304 if not.
    "Cache-Control": "no-cache",
}


def page_file(path: str) -> Callable[[Request], Awaitable[Response]]:
    """A route's handler that returns a file of the page; ``path`` as in `PAGE_PATHS`."""
    file = PAGE / (path[1:] or "index.html")
    content, media_type = file.read_bytes(), TYPES.get(file.suffix, "text/plain")
    headers = HEADERS | {"ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}

    async def get(http: Request) -> Response:
        if http.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return get
