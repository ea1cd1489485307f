"""Who may ask, and how: keys, hosts, paths, methods, types."""

import socket

import httpx
import pytest

from dflash_jax.errors import InputError
from dflash_jax.options.serve import parse
from dflash_jax.server.access import OPEN_PATHS, Access, default_hosts
from dflash_jax.server.body import Body
from dflash_jax.server.engine_host import in_process
from dflash_jax.server.errors import ApiError
from dflash_jax.server.serving import Serving
from tests.server.conftest import Running


def status(access: Access, path: str = "/v1/models", method: str = "GET", **headers: str) -> int:
    given = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
    try:
        access.check({"path": path, "method": method, "headers": given})
    except ApiError as e:
        return e.status_code
    return 200


def test_access_with_keys_refuses_all_others():
    access = Access(["one", "two"], None, OPEN_PATHS)
    for key in ("one", "two"):
        assert status(access, authorization=f"Bearer {key}") == status(access, authorization=f"bearer {key}") == 200
        assert status(access, x_api_key=key) == 200
    for headers in ({}, {"authorization": "one"}, {"authorization": "Bearer "}, {"authorization": "Bearer onetwo"}):
        assert status(access, **headers) == 401
    assert status(access, authorization="Bearer wrong", x_api_key="one") == 401


def test_all_paths_need_a_key_but_the_open_ones():
    access = Access(["one"], None, OPEN_PATHS)
    for path in ("/v1/messages", "/flush_cache", "/", "/metrics/", "//health", "/health/x", "/nothing"):
        assert status(access, path) == 401
    for path in OPEN_PATHS:
        assert status(access, path) == 200
    assert status(access, method="OPTIONS") == 200


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", 200),
        ("LOCALHOST:30000", 200),
        ("127.0.0.1:30000", 200),
        ("[::1]:30000", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example:30000", 403),
        ("", 403),
        ("\u00e9", 403),
    ],
)
def test_hosts_of_a_local_server(host, expected):
    assert status(Access((), default_hosts("127.0.0.1"), ()), host=host) == expected
    assert status(Access((), default_hosts("0.0.0.0"), ()), host=host) == 200


def test_access_allows_listed_hosts_only():
    access = Access((), ["Api.example", "*.lan"], ())
    assert [status(access, host=h) for h in ("api.example", "a.lan:1", "a.b.lan", "lan", "xlan")] == [200] * 3 + [
        403
    ] * 2
    assert status(Access((), ["a", "*"], ()), host="anything") == 200


def clients_of(original, seen: list):
    """A form of `Body.__init__` that appends the client of each body."""

    def init(self, bodies, limits, client, *args, **kwargs):
        seen.append(client)
        original(self, bodies, limits, client, *args, **kwargs)

    return init


def test_a_server_with_keys_and_hosts(llm, quiet, monkeypatch):
    serving = Serving(llm, in_process(quiet.host), ["tiny"])
    running = Running(serving, quiet.host, "secret", default_hosts("127.0.0.1"))
    try:
        for path in ("/", "/app.js", "/health", "/metrics", "/openapi.json"):
            assert running.http.get(path).status_code == 200
        for path in ("/v1/models", "/server_info", "/get_model_info", "/nothing"):
            assert running.http.get(path).status_code == 401
        assert running.http.get("/v1/models", headers={"x-api-key": "secret"}).status_code == 200
        found = running.http.get("/health", headers={"Host": "evil.example"})
        assert found.status_code == 403
        assert "--allowed-hosts" in found.json()["error"]["message"]
        # Responses belong to the key that let them in, not to another one that is sent beside it.
        two, body = [("Authorization", "Bearer other"), ("Authorization", "Bearer secret")], {"max_output_tokens": 1}
        found = running.http.post("/v1/responses", json=body | {"input": "x"}, headers=two)
        path = f"/v1/responses/{found.json()['id']}"
        assert running.http.get(path, headers={"x-api-key": "secret"}).status_code == 200
        # One key is one client, from any address.
        clients = []
        monkeypatch.setattr(Body, "__init__", clients_of(Body.__init__, clients))
        other = httpx.HTTPTransport(local_address="127.0.0.2")
        with httpx.Client(base_url=running.url, transport=other, headers={"x-api-key": "secret"}) as second:
            for client in (running.http, second):
                client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"x-api-key": "secret"})
        assert len(clients) == 2
        assert clients[0] == clients[1] not in ("127.0.0.1", "127.0.0.2", None)
        # A body for what needs no key would be memory that anyone can take.
        assert running.http.post("/ping", json={}).status_code == 200
        monkeypatch.setattr(serving.bodies, "nbytes", 2**40)
        for method, path in (("POST", "/ping"), ("OPTIONS", "/v1/models")):
            assert running.http.request(method, path, json={"x": "y" * 2**17}).status_code in (200, 405)
    finally:
        running.stop()


@pytest.mark.parametrize("hosts", [None, default_hosts("127.0.0.1")])
def test_request_with_two_host_headers_is_refused(hosts):
    """What is before the server may have read the other one."""
    scope = {"path": "/health", "method": "GET", "headers": [(b"host", b"localhost"), (b"host", b"localhost")]}
    with pytest.raises(ApiError, match="2 Host headers") as error:
        Access((), hosts, ()).check(scope)
    assert error.value.status_code == 400


OWN, OTHER = {"host": "localhost:30000", "origin": "http://localhost:30000"}, {"host": "localhost:30000"}
OTHER |= {"origin": "https://evil.example"}
BY_SITE = {"host": "localhost:30000", "sec_fetch_site": "cross-site"}
PATHS = [("POST", "/flush_cache"), ("GET", "/flush_cache"), ("HEAD", "/flush_cache"), ("POST", "/reset_prefix_cache")]
PATHS += [("POST", "/abort_request"), ("POST", "/v1/responses/resp_1/cancel"), ("POST", "/generate")]


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_a_page_of_another_origin_changes_nothing_unless_it_is_allowed(method, path):
    access, allows = Access((), None, ()), Access((), None, (), ["https://evil.example"])
    everything = Access((), None, (), ["*"])
    same_site = OTHER | {"origin": "http://localhost:3000", "sec_fetch_site": "same-site"}
    pages = (OTHER, BY_SITE, same_site, OTHER | {"origin": "null"}, OTHER | {"origin": "https://["})
    for headers in (*pages, OTHER | {"content_type": "Text/Plain; charset=x"}):
        assert status(access, path, method, **headers) == 403
        assert status(everything, path, method, **headers) == 200
    assert status(allows, path, method, **OTHER, sec_fetch_site="cross-site") == status(allows, path, method, **OTHER)
    assert status(allows, path, method, **OTHER) == 200
    assert status(allows, path, method, **same_site) == 403
    # The page of this server, below a proxy too; an address that is typed; clients that are no browsers.
    own = (OWN, OWN | {"sec_fetch_site": "same-origin"}, OTHER | {"sec_fetch_site": "same-origin"})
    for headers in (*own, {"sec_fetch_site": "none"}, {"host": "localhost:30000"}, {}):
        assert status(access, path, method, **headers) == 200


def test_what_a_browser_asks_for_first_or_changes_nothing_is_for_cors_to_decide():
    access = Access((), None, ())
    assert status(access, "/v1/models", **OTHER) == status(access, "/v1/models", "OPTIONS", **OTHER) == 200
    assert status(access, "/v1/responses/resp_1", "DELETE", **OTHER) == 200
    assert status(access, "/generate", "POST", content_type="application/json", **OTHER) == 200


def test_a_page_of_another_origin_does_not_flush_the_cache(quiet):
    for method, path in PATHS[:4]:
        assert quiet.http.request(method, path, headers={"Origin": "https://evil.example"}).status_code == 403
        assert quiet.http.request(method, path).status_code in (200, 400)


def test_two_hosts_over_a_socket(quiet):
    with socket.create_connection(("127.0.0.1", int(quiet.url.rpartition(":")[2])), timeout=120) as s:
        s.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nhOST: evil.example\r\nConnection: close\r\n\r\n")
        assert s.recv(2**16).startswith(b"HTTP/1.1 400 ")


def test_an_owner_is_a_key():
    """With keys and without, in either header; no key is an owner too."""
    for keys in ((), ("one", "two")):
        owners = [
            Access(keys, None, ()).check({"path": "/x", "method": "GET", "headers": [header]})
            for header in ((b"authorization", b"Bearer one"), (b"x-api-key", b"one"), (b"x-api-key", b"two"))
        ]
        assert owners[0] == owners[1] != owners[2]
    assert Access((), None, ()).check({"path": "/x", "method": "GET", "headers": []}) not in owners


def test_unknown_path_is_404_and_wrong_method_is_405(quiet):
    http = quiet.http
    for method in ("GET", "POST", "HEAD", "DELETE"):
        assert http.request(method, "/nothing").status_code == http.request(method, "/v1/nothing").status_code == 404
    for path in ("/v1/chat/completions", "/generate", "/tokenize"):
        found = http.get(path)
        assert (found.status_code, found.headers["allow"]) == (405, "POST")
    for path in ("/", "/health", "/v1/models"):
        assert http.post(path).status_code == 405
        found = http.head(path)
        assert (found.status_code, found.content) == (200, b"")
        assert int(found.headers["content-length"]) == len(http.get(path).content)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
def test_a_body_that_is_not_said_to_be_json(quiet, kind):
    found = quiet.http.post(
        "/v1/completions", content=b'{"prompt": "x"}', headers={} if kind is None else {"Content-Type": kind}
    )
    assert found.status_code == 415
    assert "Content-Type: application/json" in found.json()["error"]["message"]


def test_json_by_its_other_names(quiet):
    for kind in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"):
        body = b'{"prompt": "x", "max_tokens": 1}'
        found = quiet.http.post("/v1/completions", content=body, headers={"Content-Type": kind})
        assert found.status_code == 200, found.text


def test_a_body_that_is_too_large_is_answered(quiet):
    """A client that sends all of it before it reads."""
    with socket.create_connection(("127.0.0.1", int(quiet.url.rpartition(":")[2])), timeout=120) as s:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 30000000"
        s.sendall(f"{head}\r\n\r\n".encode() + b"x" * 30_000_000)
        assert s.recv(2**16).startswith(b"HTTP/1.1 413 ")


def keys(*argv: str) -> list[str]:
    return parse(list(argv))[0].api_keys


def test_api_keys_come_from_options_file_and_environment(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("three\n\n four \n")
    args = parse(["org/model", "--api-key", "one", "two", "--api-key", "five", "--api-key-file", str(file)])[0]
    assert (args.target, args.api_keys) == ("org/model", ["one", "two", "five", "three", "four"])
    # MODEL behind a key, as a directory or a repository.
    for model in (str(tmp_path), "org/model"):
        args = parse(["--api-key", "one", model])[0]
        assert (args.target, args.api_keys) == (model, ["one"])
        args = parse(["--api-key=one", model])[0]
        assert (args.target, args.api_keys) == (model, ["one"])
    assert keys("--api-key", "org/model") == ["org/model"]
    monkeypatch.setenv("DFLASH_API_KEY", "six, seven")
    assert keys() == ["six", "seven"]
    assert keys("--api-key", "one") == ["one", "six", "seven"]


def test_an_administrator_s_keys_are_others(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("two\n")
    monkeypatch.setenv("DFLASH_ADMIN_API_KEY", "three")
    args = parse(["--admin-api-key", "one", "--admin-api-key-file", str(file), "--api-key", "four"])[0]
    assert (args.admin_api_keys, args.api_keys) == (["one", "two", "three"], ["four"])


@pytest.mark.parametrize("key", ["", "é", "secret b", "secret\n"])
@pytest.mark.parametrize("option", ["--api-key", "--admin-api-key"])
def test_keys_that_cannot_be(option, key):
    with pytest.raises(InputError, match="API key") as error:
        parse([option, key])
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("option", ["--api-key-file", "--admin-api-key-file"])
def test_files_of_keys_that_cannot_be(tmp_path, option):
    empty = tmp_path / "empty"
    empty.write_text("\n\n")
    for path in (empty, tmp_path / "missing", tmp_path):
        with pytest.raises(InputError, match=option):
            parse([option, str(path)])


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (413, "invalid_request_error"),
        (429, "rate_limit_error"),
        (503, "server_error"),
    ],
)
def test_errors_have_the_types_of_openai(code, kind):
    assert ApiError(code, "a reason").body["error"]["type"] == kind
