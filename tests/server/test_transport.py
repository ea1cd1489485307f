"""Sockets and certificates, before a model is loaded."""

import os
import socket
import ssl
import stat
from contextlib import closing

import pytest
import trustme

from dflash_jax.errors import InputError
from dflash_jax.options.serve import parse
from dflash_jax.server.transport import close, listen, tls_context


@pytest.fixture(scope="module")
def pems(tmp_path_factory):
    """Paths of a certificate, its key, a key of another one, and text that is none."""
    directory = tmp_path_factory.mktemp("tls")
    first, second = trustme.CA().issue_cert("localhost"), trustme.CA().issue_cert("localhost")
    paths = {name: str(directory / name) for name in ("cert", "key", "other", "text")}
    first.cert_chain_pems[0].write_to_path(paths["cert"])
    first.private_key_pem.write_to_path(paths["key"])
    second.private_key_pem.write_to_path(paths["other"])
    (directory / "text").write_bytes(os.urandom(1000))
    return paths | {"directory": str(directory), "missing": str(directory / "missing")}


def test_tls_context_of_valid_certificate(pems):
    args, _ = parse(["--ssl-certfile", pems["cert"], "--ssl-keyfile", pems["key"], "--ssl-ca-certs", pems["cert"]])
    assert tls_context(args).verify_mode == ssl.CERT_NONE
    args, _ = parse(["--ssl-certfile", pems["cert"], "--ssl-keyfile", pems["key"], "--ssl-ca-certs", pems["cert"]])
    args.ssl_cert_reqs = 2
    assert tls_context(args).verify_mode == ssl.CERT_REQUIRED
    assert tls_context(parse([])[0]) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ssl-keyfile", "key"], "--ssl-keyfile needs --ssl-certfile"),
        (["--ssl-ca-certs", "cert"], "--ssl-ca-certs needs --ssl-certfile"),
        (["--ssl-cert-reqs", "2"], "--ssl-cert-reqs needs --ssl-certfile"),
        (["--ssl-certfile", "cert"], "the certificate and key cannot be used"),
        (["--ssl-certfile", "missing"], "cannot be read: No such file"),
        (["--ssl-certfile", "directory"], "is a directory"),
        (["--ssl-certfile", "cert", "--ssl-keyfile", "directory"], "--ssl-keyfile .* is a directory"),
        (["--ssl-certfile", "cert", "--ssl-keyfile", "other"], "key values mismatch"),
        (["--ssl-certfile", "text", "--ssl-keyfile", "key"], "cannot be used"),
        (["--ssl-certfile", "cert", "--ssl-keyfile", "text"], "cannot be used"),
        (["--ssl-certfile", "cert", "--ssl-keyfile", "key", "--ssl-ca-certs", "text"], "--ssl-ca-certs"),
        (["--ssl-certfile", "cert", "--ssl-keyfile", "key", "--ssl-cert-reqs", "2"], "needs --ssl-ca-certs"),
        (["--ssl-certfile", "\0"], "--ssl-certfile"),
    ],
)
def test_hostile_certificates_are_one_line(options, message, pems):
    args, _ = parse([pems.get(option, option) for option in options])
    with pytest.raises(InputError, match=message) as e:
        tls_context(args)
    assert "\n" not in str(e.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads any file")
def test_a_key_without_permission(pems, tmp_path):
    key = tmp_path / "key"
    key.write_bytes(b"x")
    key.chmod(0)
    with pytest.raises(InputError, match="Permission denied"):
        tls_context(parse(["--ssl-certfile", pems["cert"], "--ssl-keyfile", str(key)])[0])


def test_an_encrypted_key_needs_its_password_and_asks_nobody(pems, tmp_path):
    from cryptography.hazmat.primitives import serialization

    with open(pems["key"], "rb") as file:
        key = serialization.load_pem_private_key(file.read(), None)
    locked = tmp_path / "locked"
    form = serialization.PrivateFormat.PKCS8
    cipher = serialization.BestAvailableEncryption(b"open")
    locked.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, cipher))
    options = ["--ssl-certfile", pems["cert"], "--ssl-keyfile", str(locked)]
    assert tls_context(parse([*options, "--ssl-keyfile-password", "open"])[0])
    for wrong in ([], ["--ssl-keyfile-password", "shut"]):
        with pytest.raises(InputError, match="cannot be used"):
            tls_context(parse(options + wrong)[0])


def test_a_dead_socket_is_replaced_and_a_live_one_is_not(tmp_path):
    path = str(tmp_path / "s")
    with closing(listen("", 0, path)):
        with pytest.raises(InputError, match=r"--uds .*/s: Address already in use"):
            listen("", 0, path)
        assert stat.S_ISSOCK(os.stat(path).st_mode)
    again = listen("", 0, path)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
    close(again, path)
    assert not os.path.exists(path)


@pytest.mark.parametrize("kind", ["file", "directory", "long", "missing", "nul", "empty"])
def test_hostile_socket_paths_are_one_line(kind, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "directory").mkdir()
    paths = {"long": "x" * 5000, "missing": "missing/s", "nul": "a\0b"}
    path = "" if kind == "empty" else str(tmp_path / paths.get(kind, kind))
    with pytest.raises(InputError, match="--uds ") as e:
        listen("", 0, path)
    assert "\n" not in str(e.value)
    assert len(str(e.value)) < 300
    assert (tmp_path / "file").read_text() == "mine"


def test_an_empty_host_does_not_open_all_networks():
    with pytest.raises(InputError, match="--host is empty"):
        listen("", 0)
