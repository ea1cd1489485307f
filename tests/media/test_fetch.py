"""A table of attacks: what a URL may reach, and what it may cost."""

import asyncio
import base64
import os
import socket
import threading

import httpcore
import pytest

from dflash_jax.errors import InputError
from dflash_jax.media.errors import MediaError
from dflash_jax.media.fetch import Fetcher
from dflash_jax.media.limits import DEFAULT_LIMITS, MediaLimits
from dflash_jax.media.public_http import resolve
from tests.media.hostile_server import ADDRESSES, CONTENT, PUBLIC, internet

IMAGES = ("images.example",)
ALL = ("*",)
LIMITS = MediaLimits(item_bytes=2**20, image_fetch_s=5.0)
# The time of what never ends.
SHORT = MediaLimits(item_bytes=2**20, image_fetch_s=0.3)


def fetched(url: str, domains=IMAGES, limits=LIMITS, names=("images.example", "other.example"), **arguments):
    """The content of a URL, and the addresses and ports that were connected to."""

    async def main():
        async with internet(names) as (network, public, context):
            fetcher = Fetcher(domains, limits=limits, network=public, ssl_context=context, **arguments)
            try:
                return await fetcher.fetch(url, "image"), network.connections
            except MediaError as e:
                return e, network.connections
            finally:
                fetcher.stop()

    return asyncio.run(main())


@pytest.mark.parametrize(
    "url",
    [
        "http://images.example/image",
        "https://images.example/image",
        "http://images.example:80/image",
        "https://images.example:443/image",
        "HTTP://IMAGES.Example/image",
        "http://images.example./image",
        "http://images.example/query?a=b&c#fragment",
        "http://images.example/relative",
        "http://images.example/secure",
        "http://images.example/three",
    ],
)
def test_an_allowed_host_is_reached_at_its_address(url):
    content, connections = fetched(url)
    assert content == CONTENT
    assert {address for address, _ in connections} == {PUBLIC}


@pytest.mark.parametrize("url", ["http://other.example/image", "http://six.example/image", f"http://{PUBLIC}/image"])
def test_all_public_hosts_are_reached_with_a_star(url):
    assert fetched(url, ALL)[0] == CONTENT
    assert fetched(url)[0].status == 422


def test_the_next_address_is_tried_where_one_does_not_answer():
    content, connections = fetched("http://two.example/image", ALL)
    assert content == CONTENT
    assert [address for address, _ in connections] == ADDRESSES["two.example"]


def test_a_redirect_to_another_allowed_host_is_followed():
    assert fetched("http://images.example/to-other", (*IMAGES, "other.example"))[0] == CONTENT
    error, connections = fetched("http://images.example/to-other")
    assert (error.status, len(connections)) == (422, 1)


PRIVATE_HOSTS = [
    *("127.0.0.1", "127.1", "0", "0.0.0.0", "2130706433", "0x7f000001", "0x7f.1", "017700000001", "0177.0.0.1"),
    *("10.0.0.1", "172.16.0.1", "192.168.0.1", "100.64.0.1", "169.254.169.254", "192.0.2.1", "198.18.0.1"),
    *("224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.0.192", "168.63.129.16", "192.88.99.1", "[3fff::1]"),
    *("[::1]", "[::]", "[fe80::1]", "[fec0::1]", "[fc00::1]", "[ff02::1]", "[2001:db8::1]", "[::127.0.0.1]"),
    *("[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::ffff:10.0.0.1]", "[0:0:0:0:0:ffff:7f00:1]"),
    # Addresses that translate to IPv4: 6to4, Teredo, NAT64.
    *("[2002:7f00:1::]", "[2002:a00:1::1]", "[2001:0:53aa:64c:0:0:80ff:fffe]", "[64:ff9b::7f00:1]"),
    *("private.example", "mapped.example", "mixed.example", "empty.example", "unknown.example"),
]


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("host", PRIVATE_HOSTS)
def test_addresses_that_are_not_public_are_not_connected_to(host, scheme):
    error, connections = fetched(f"{scheme}://{host}/image", ALL)
    assert isinstance(error, MediaError)
    assert (error.status, connections) == (422, [])
    # The name's addresses are the server's knowledge.
    assert not any(address in str(error) for address in ADDRESSES.get(host, ()))


@pytest.mark.parametrize("host", ["private.example", "mapped.example", "mixed.example"])
def test_a_listed_name_of_a_private_address_is_refused(host):
    error, connections = fetched(f"http://{host}/image", (host,))
    assert (error.status, connections) == (422, [])


def test_a_redirect_to_less_security_is_refused():
    assert fetched("http://images.example/insecure")[0] == CONTENT
    error, _ = fetched("https://images.example/insecure")
    assert isinstance(error, MediaError), error
    assert error.status == 422


MALFORMED = [
    *("", "image", "/etc/passwd", "//images.example/image", "javascript:alert(1)", "blob:x", "about:blank"),
    *("ftp://images.example/image", "gopher://images.example/", "ws://images.example/", "unix:///run/docker.sock"),
    *("http:", "http://", "http:///image", "http:images.example/image", "http:/images.example/image"),
    *("http://user:pass@images.example/image", "http://images.example@127.0.0.1/image", "http://@images.example/image"),
    *("http://images.example%2f@127.0.0.1/", "http://%69mages.example/image", "http://images.example%00/image"),
    *("http://images.example\\@127.0.0.1/", "http:\\\\images.example\\image", "http://images.example\\image"),
    *(
        "http://images.example/a b",
        "http://images.example/\r\nHost: x",
        "http://images\t.example/",
        " http://images.example/",
    ),
    *("http://images。example/image", "http://ⓘmages.example/", "http://images.example/é", "http://-images.example/"),
    *("http://[fe80::1%25eth0]/", "http://[fe80::1%eth0]/", "http://[::1", "http://[v1.x]/", "http://[127.0.0.1]/"),
    *("http://images.example:x/image", "http://images.example:99999/image", "http://images.example/" + "x" * 9000),
]


@pytest.mark.parametrize("url", MALFORMED)
def test_malformed_urls_are_refused(url):
    for domains in (IMAGES, ALL):
        error, connections = fetched(url, domains)
        assert isinstance(error, MediaError), error
        assert (error.status, connections) == (400, [])
        assert len(str(error)) < 200


NOT_ALLOWED = [
    *("http://evil.example/image", "http://sub.images.example/image", "http://images.example.evil.example/image"),
    *("http://xn--mages-5sa.example/image", "http://images/image", f"http://{PUBLIC}/image", "http://[2606:2800::1]/"),
    *("http://images.example:443/image", "https://images.example:80/image", "http://images.example:8080/image"),
    *("http://images.example:22/image", "http://images.example:0/image"),
    *("file:///etc/passwd", "FILE:///etc/passwd", "file:/etc/passwd", "file://images.example/etc/passwd"),
]


@pytest.mark.parametrize("url", NOT_ALLOWED)
def test_other_hosts_ports_and_files_are_refused(url):
    error, connections = fetched(url)
    assert (error.status, connections) == (422, [])


@pytest.mark.parametrize("url", ["http://images.example/image", "https://127.0.0.1/", "file:///etc/passwd"])
def test_nothing_is_fetched_by_default(url):
    with pytest.raises(MediaError, match=r"data: URL|reads no files"):
        asyncio.run(Fetcher().fetch(url, "image"))


REDIRECTS = [
    *("/to-loopback", "/to-private", "/to-mapped", "/to-metadata", "/to-decimal", "/to-user", "/to-port"),
    *("/to-file", "/to-data", "/to-bad", "/loop", "/four", "/no-location"),
]


@pytest.mark.parametrize("path", REDIRECTS)
def test_redirects_are_checked_like_urls(path):
    for domains in (IMAGES, ALL):
        error, connections = fetched(f"http://images.example{path}", domains)
        assert isinstance(error, MediaError), error
        assert error.status == 422
        assert {address for address, _ in connections} == {PUBLIC}
        # What the other server says is not repeated.
        assert "secret" not in str(error)
        assert "127.0.0.1" not in str(error)


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/missing", 422, "status 404"),
        ("/broken", 422, "status 503"),
        ("/cut", 422, "as it should"),
        ("/garbage", 422, "as it should"),
        ("/nothing", 422, "as it should"),
        ("/negative", 422, "as it should"),
        ("/two-lengths", 422, "as it should"),
        ("/endless-headers", 422, "as it should"),
        ("/huge", 413, "more than 1048576 bytes"),
        ("/endless", 413, "more than 1048576 bytes"),
        ("/endless-chunks", 413, "more than 1048576 bytes"),
    ],
)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_answers_that_are_no_content_are_refused(path, status, message, scheme):
    error, _ = fetched(f"{scheme}://images.example{path}")
    assert isinstance(error, MediaError), error
    assert message in str(error)
    assert error.status == status


@pytest.mark.parametrize("path", ["/slow-headers", "/slow-body", "/silence", "/endless-continues"])
def test_slow_answers_end(path):
    error, _ = fetched(f"http://images.example{path}", limits=SHORT)
    assert isinstance(error, MediaError), error
    assert (error.status, "takes more than 0.3 s" in str(error)) == (422, True)


def test_the_certificate_must_be_of_the_host():
    assert fetched("https://images.example/image", names=("images.example",))[0] == CONTENT
    error, _ = fetched("https://images.example/image", names=("other.example", PUBLIC))
    assert error.status == 422


def test_the_certificate_must_be_trusted():
    async def main():
        async with internet() as (_, public, _):
            # The system's certificates do not have the server's.
            fetcher = Fetcher(IMAGES, network=public)
            try:
                await fetcher.fetch("https://images.example/image", "image")
            finally:
                fetcher.stop()

    with pytest.raises(MediaError, match="cannot be reached"):
        asyncio.run(main())


@pytest.mark.parametrize("path", ["/tiny-chunks", "/endless-continues"])
def test_floods_are_parsed_in_another_thread(path, monkeypatch):
    """Thousands of events of one read would keep the server's loop for a second."""
    threads = set()
    read = httpcore.AsyncConnectionPool.stream

    def stream(*arguments, **keywords):
        threads.add(threading.current_thread().name)
        return read(*arguments, **keywords)

    monkeypatch.setattr(httpcore.AsyncConnectionPool, "stream", stream)
    assert fetched(f"http://images.example{path}", limits=SHORT)[0].status == 422
    assert threads == {"media-fetch"}


def test_a_cancelled_fetch_ends():
    async def main():
        async with internet() as (network, public, context):
            fetcher = Fetcher(IMAGES, limits=MediaLimits(fetches=1), network=public, ssl_context=context)
            task = asyncio.create_task(fetcher.fetch("http://images.example/silence", "image"))
            while not network.connections:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            # Its place is free.
            assert await fetcher.fetch("http://images.example/image", "image") == CONTENT
            fetcher.stop()

    asyncio.run(main())


def test_name_servers_that_do_not_answer_leave_others_a_thread(monkeypatch):
    """The system's resolver waits for them half a minute, six times as long as the fetch of an image."""
    answer, asked = threading.Event(), []

    def getaddrinfo(host, *_, **__):
        asked.append(host)
        if host == "silent.example":
            answer.wait()
        return [(None, None, None, None, (PUBLIC, 80))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    # Half a minute of fetches, each of which has been given up.
    abandoned = DEFAULT_LIMITS.fetches * 7

    async def main():
        tasks = [asyncio.create_task(resolve("silent.example", 80)) for _ in range(abandoned)]
        while len(asked) < abandoned:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert await resolve("images.example", 80) == [PUBLIC]

    try:
        asyncio.run(asyncio.wait_for(main(), 120))
    finally:
        answer.set()


def test_data_urls_are_read_in_pieces():
    content = os.urandom(2**20)
    encoded = base64.b64encode(content).decode()
    for header in ("data:image/png;base64,", "DATA:;base64,", "data:image/svg+xml;charset=utf-8;BASE64,"):
        assert fetched(header + encoded, ())[0] == content


DATA_URLS = [
    ("data:", 400),
    ("data:image/png,AAAA", 400),
    ("data:image/png;base64", 400),
    ("data:image/png;base64,A", 400),
    ("data:image/png;base64,AAA", 400),
    ("data:image/png;base64,AA=A", 400),
    ("data:image/png;base64,AA==AA==", 400),
    ("data:image/png;base64,AAAA AAAA", 400),
    ("data:image/png;base64,AAAA\n", 400),
    ("data:image/png;base64,AA-_", 400),
    ("data:image/png;base64,AAA\u0391", 400),
    ("data:image/png;base64,AAA\ud800", 400),
    ("data:image/png;base64,%41AAA", 400),
    ("data:" + "x" * 300 + ";base64,AAAA", 400),
    ("data:image/png;base64," + "A" * (2**20 - 4) + "AAA=" + "AAAA", 400),
    ("data:image/png;base64," + "A" * (2**22), 413),
    ("data:image/png;base64," + "A" * (2**20 // 3 * 4 + 4), 413),
]


@pytest.mark.parametrize(("url", "status"), DATA_URLS)
def test_malformed_data_urls_are_refused(url, status):
    error, _ = fetched(url, ())
    assert isinstance(error, MediaError), error
    assert error.status == status
    assert len(str(error)) < 200


@pytest.fixture
def directory(tmp_path):
    """A directory of images, with links and a pipe; beside it a secret."""
    allowed = tmp_path / "images"
    (allowed / "sub").mkdir(parents=True)
    (allowed / "a b.png").write_bytes(CONTENT)
    (allowed / "sub" / "é.png").write_bytes(CONTENT)
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "images-of-others").mkdir()
    (tmp_path / "images-of-others" / "image").write_bytes(b"secret")
    (allowed / "inside").symlink_to(allowed / "sub" / "é.png")
    (allowed / "outside").symlink_to(tmp_path / "secret")
    (allowed / "up").symlink_to(tmp_path)
    (allowed / "loop").symlink_to(allowed / "loop")
    (allowed / "environment").symlink_to("/proc/self/environ")
    os.mkfifo(allowed / "pipe")
    with open(allowed / "sparse", "wb") as file:
        file.truncate(2**40)
    return allowed


@pytest.mark.parametrize("path", ["a%20b.png", "sub/%C3%A9.png", "sub/../a%20b.png", "inside"])
def test_files_below_the_directory_are_read(directory, path):
    for prefix in ("file://", "FILE://localhost", "file:"):
        assert fetched(f"{prefix}{directory}/{path}", (), directory=directory)[0] == CONTENT


@pytest.mark.parametrize(
    "path",
    [
        *("", "missing", "sub", "pipe", "outside", "up/secret", "loop", "environment", "../secret", "%2e%2e/secret"),
        *("..%2fsecret", "sub/../../secret", "../images-of-others/image", "a%20b.png%00", "a%20b.png?x", "a%20b.png#x"),
        *("a%20b.png/../../secret", "x" * 300, "x/" * 3000),
    ],
)
def test_other_files_are_refused_with_one_message(directory, path):
    error, _ = fetched(f"file://{directory}/{path}", (), directory=directory)
    assert isinstance(error, MediaError), error
    assert error.status == 422
    assert str(error).endswith("it is no file below the directory that this server allows")


@pytest.mark.parametrize(
    "url",
    [
        *("file:///etc/passwd", "file:////etc/passwd", "file:/proc/self/environ", "file:///proc/self/fd/0"),
        *("file:///dev/zero", "file:///dev/stdin", "file:secret", "file:", "file://", "file:%2fetc%2fpasswd"),
        *("file://images.example/etc/passwd", "file://127.0.0.1/etc/passwd", "file://localhost:80/etc/passwd"),
        *("file://~/secret", "file://[::1/etc/passwd", "file:\\\\etc\\passwd", "file:///C:/secret"),
        # Not parsed: each would take the square of its length.
        pytest.param("file://" + "\u0316\u0300" * 2_000_000 + "/a", id="combining characters"),
        pytest.param("file:///" + "a" * 60_000_000, id="a long path"),
    ],
)
def test_files_elsewhere_are_refused(directory, url):
    error, _ = fetched(url, (), directory=directory)
    assert isinstance(error, MediaError), error
    assert error.status == 422


def test_a_relative_path_is_refused_within_the_directory_too(directory, monkeypatch):
    monkeypatch.chdir(directory)
    assert fetched("file:a%20b.png", (), directory=directory)[0].status == 422


def test_a_file_is_read_up_to_the_limit(directory):
    error, _ = fetched(f"file://{directory}/sparse", (), directory=directory)
    assert (error.status, "more than 1048576 bytes" in str(error)) == (413, True)


@pytest.mark.parametrize("domain", ["", "http://images.example", "images.example/", "images.example:80", "*.example"])
def test_domains_in_another_form_are_refused(domain):
    with pytest.raises(InputError, match="allowed_media_domains"):
        Fetcher([domain])


def test_a_directory_that_is_none_is_refused(tmp_path):
    with pytest.raises(InputError, match="allowed_local_media_path"):
        Fetcher(directory=tmp_path / "missing")
