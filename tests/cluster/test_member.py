import asyncio
import json

import pytest

from dflash_jax.cluster.member import RUN_HEADER, SECRET_HEADER, Member, RunHeader


class Application:
    """Keeps what it gets: its scope, its body, and two ids of its run."""

    async def __call__(self, scope, receive, send):
        self.scope, self.body, more = scope, b"", True
        while more:
            message = await receive()
            self.body, more = self.body + message.get("body", b""), message.get("more_body")
        self.run = scope["state"]["run"]
        self.ids = [self.run.fresh_id(), self.run.fresh_id()]


def ask(headers, parts=(b"",)):
    """The application behind a member, and the member's own answer where it refuses."""
    application, sent = Application(), []
    messages = [{"type": "http.request", "body": part, "more_body": part is not parts[-1]} for part in parts]

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": headers, "client": ("ingress", 1)}
    asyncio.run(Member(application, "secret")(scope, receive, send))
    return application, sent


def run_header(**fields):
    return RUN_HEADER, RunHeader(**{"key": "k", "created": 7, "client": ["1.2.3.4", 5], **fields}).encode()


@pytest.mark.parametrize("headers", [[], [(SECRET_HEADER, b"other")], [run_header(recorded=3)]])
def test_request_without_the_secret_is_refused_whatever_it_has(headers):
    application, sent = ask(headers, [b": [0, [1], [1], 0, 0, null, null]\n{}"])
    assert not hasattr(application, "scope")
    assert sent[0]["status"] == 403
    assert "replica of a cluster" in json.loads(sent[1]["body"])["error"]["message"]


def test_application_sees_the_request_of_the_client():
    given = [(SECRET_HEADER, b"secret"), run_header(), (b"content-length", b"2"), (b"x-session-id", b"s")]
    application, _ = ask(given, [b"{", b"}"])
    assert application.scope["headers"] == [(b"content-length", b"2"), (b"x-session-id", b"s")]
    assert application.scope["client"] == ("1.2.3.4", 5)
    assert application.body == b"{}"
    assert application.run.created == 7


def test_ids_follow_from_the_key_alone():
    def ids(key):
        return ask([(SECRET_HEADER, b"secret"), run_header(key=key)])[0].ids

    first = ids("a")
    assert first == ids("a")
    assert first[0] != first[1]
    assert first != ids("b")


@pytest.mark.parametrize("size", [1, 5, 100])
def test_recorded_lines_are_taken_from_the_body(size):
    lines = [b"[0,[5],[1],0,0,null,null]", b'[1,[6],[1],0,0,"stop",null]']
    recorded = b"".join(line + b"\n" for line in lines)
    whole = recorded + b'{"a": 1}'
    parts = [whole[at : at + size] for at in range(0, len(whole), size)]
    headers = [(SECRET_HEADER, b"secret"), run_header(recorded=len(recorded)), (b"content-length", b"%d" % len(whole))]
    application, _ = ask(headers, parts)
    assert application.body == b'{"a": 1}'
    assert dict(application.scope["headers"])[b"content-length"] == b"8"
    assert application.run._lines == lines
