"""Pages of other origins that may use the server: vLLM's four options, over Starlette's middleware."""

import json
from dataclasses import dataclass
from urllib.parse import urlsplit

from dflash_jax.errors import InputError

# Headers of answers that pages of other origins may read.
EXPOSED = ("X-Dflash-Note", "X-Request-Id", "Retry-After")


@dataclass(frozen=True)
class Cors:
    """Rules for pages of other origins.

    Attributes:
        origins: Allowed origins; "*" for all.
        methods: Allowed methods; "*" for all.
        headers: Allowed headers; "*" for all.
        credentials: Whether cookies are allowed.
    """

    origins: tuple[str, ...]
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    credentials: bool = False

    def add_to(self, app) -> None:
        """Adds the middleware to an application."""
        from starlette.middleware.cors import CORSMiddleware

        app.add_middleware(
            CORSMiddleware,
            allow_origins=self.origins,
            allow_methods=self.methods,
            allow_headers=self.headers,
            allow_credentials=self.credentials,
            expose_headers=EXPOSED,
        )


def of_arguments(args) -> Cors | None:
    """The rules that the flags describe; None without ``--allowed-origins``.

    Raises:
        InputError: An origin is none that a browser sends, or flags contradict each other.
    """
    if args.allowed_origins is None:
        for name in ("allowed_methods", "allowed_headers", "allow_credentials"):
            if getattr(args, name):
                raise InputError(f"--{name.replace('_', '-')} is about other origins: add --allowed-origins")
        return None
    origins = _words("--allowed-origins", args.allowed_origins)
    for origin in origins:
        parts = urlsplit(origin)
        if origin != "*" and (not parts.scheme or not parts.netloc or origin != f"{parts.scheme}://{parts.netloc}"):
            raise InputError(
                f"--allowed-origins {origin!r}: it must be a scheme and a host without a path, such as "
                f"https://app.example, or *"
            )
    if "*" in origins and args.allow_credentials:
        raise InputError("--allow-credentials with --allowed-origins *: name the origins")
    methods = _words("--allowed-methods", args.allowed_methods or ["*"])
    headers = _words("--allowed-headers", args.allowed_headers or ["*"])
    return Cors(origins, methods, headers, args.allow_credentials)


def _words(name: str, given: list[str]) -> tuple[str, ...]:
    """The words of a flag, or of vLLM's form: one JSON list."""
    if len(given) > 1 or not given[0].startswith("["):
        return tuple(given)
    try:
        value = json.loads(given[0])
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise InputError(f"{name} {given[0]}: it must be words, or a JSON list of strings")
    return tuple(value)
