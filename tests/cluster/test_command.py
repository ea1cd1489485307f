"""`dflash cluster` as it runs: two replicas, of which one is killed in the middle of a stream."""

import contextlib
import json
import logging.handlers
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import httpx
import psutil
import pytest

from dflash_jax.cluster import app, command
from dflash_jax.cluster.options import parse
from dflash_jax.errors import InputError
from dflash_jax.server.connections import ConnectionLimits
from dflash_jax.server.launch import http_config
from tests.server.conftest import wait_until

BODY = {"prompt": "def clamp(value, low, high):\n    ", "max_tokens": 160, "ignore_eos": True, "stream": True}
BODY |= {"temperature": 0.8, "seed": 3, "return_token_ids": True}
# Few programs, and a wait that holds while a busy machine starts a replica.
WORDS = ["--bundled", "--slots", "1", "--max-block-size", "4", "--max-len", "512", "--prefix-bytes", "0"]
WORDS += ["--platform", "cpu", "--wait-s", "900"]
# A second command joins the Ray of the first one.
RAY = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_command_without_ray_names_the_extra(capsys):
    assert command.main(["--port", "0"]) == 2
    assert 'pip install "dflash-jax[ray]"' in capsys.readouterr().err


def test_server_closes_no_handler_of_the_process():
    """A new controller of Serve asks each replica for the file of its log, and ends one that has none."""
    handler = logging.handlers.MemoryHandler(1, target=logging.NullHandler())
    http_config(None, ConnectionLimits())
    assert handler.target is not None


@pytest.fixture
def other(monkeypatch):
    """A stand-in for Ray, on which a cluster of another command runs.

    Attributes:
        names: Names of actors that run.
        applications: Names of applications.
        started: Names of actors that were started, and what was ended, in order.
        nodes: Nodes of the cluster.
        places: The options of each actor that was started.
    """
    found = SimpleNamespace(names=["dflash-ingress"], applications=["dflash"], started=[], nodes=[], places=[])

    def get_actor(name, _):
        if name not in found.names:
            raise ValueError(name)
        return SimpleNamespace(url=SimpleNamespace(remote=lambda: "http://there"))

    def start(name, get_if_exists, **options):
        def remote(_, secret, __):
            if name in found.names and not get_if_exists:
                raise ValueError(f"{name} is already taken")
            found.started.append(name)
            found.places.append(options | {"secret": secret})
            return SimpleNamespace(secret=SimpleNamespace(remote=lambda: b"of the first"), name=name)

        return SimpleNamespace(remote=remote)

    ray, serve, scheduling = ModuleType("ray"), ModuleType("ray.serve"), ModuleType("ray.util.scheduling_strategies")
    ray.get, ray.get_actor, ray.serve = lambda value: value, get_actor, serve
    ray.remote = lambda _: SimpleNamespace(options=start)
    ray.nodes = lambda: found.nodes
    ray.kill = lambda actor: found.started.append(f"the end of {actor.name}")
    ray.shutdown = lambda: found.started.append("the end of Ray")
    scheduling.NodeAffinitySchedulingStrategy = lambda node, soft: (node, soft)
    serve.delete = lambda name: found.started.append(f"the end of {name}")
    serve.status = lambda: SimpleNamespace(applications=found.applications)
    for module in (ray, serve, scheduling):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return found


@pytest.mark.parametrize("applications", [[], ["dflash"]], ids=["starting", "running"])
def test_second_cluster_of_a_name_is_refused_and_one_of_another_name_starts(other, applications):
    other.applications = applications
    with pytest.raises(
        InputError, match=r"--name dflash is taken on this Ray cluster by http://there: .* another --name"
    ):
        app.start_ingresses(parse([])[0], may_run=False)
    assert other.started == []
    app.start_ingresses(parse(["--name", "b.2"])[0], may_run=False)
    assert other.started == ["b.2-ingress"]


def test_application_of_others_is_not_replaced(other):
    other.names = []
    with pytest.raises(InputError, match="taken on this Ray cluster, and not by a cluster of ours: "):
        app.start_ingresses(parse([])[0], may_run=False)


def test_update_takes_the_ingress_that_runs(other):
    app.start_ingresses(parse([])[0], may_run=True)
    assert other.started == ["dflash-ingress"]


def test_each_ingress_has_a_node_of_its_own_the_first_one_the_head_and_all_share_a_secret(other):
    other.nodes = [
        {"NodeID": "c", "Alive": True, "Resources": {}},
        {"NodeID": "a", "Alive": False, "Resources": {}},
        {"NodeID": "z", "Alive": True, "Resources": {"node:__internal_head__": 1.0}},
        {"NodeID": "b", "Alive": True, "Resources": {}},
    ]
    args, _ = parse(["--name", "many", "--ingresses", "3"])
    assert [actor.name for actor in app.start_ingresses(args, may_run=False)] == other.started
    assert other.started == app.names_of(args) == ["many-ingress", "many-ingress-1", "many-ingress-2"]
    assert [place["scheduling_strategy"] for place in other.places] == [("z", False), ("b", False), ("c", False)]
    assert [place["secret"] for place in other.places[1:]] == [b"of the first"] * 2
    with pytest.raises(InputError, match="--ingresses 4: this Ray cluster has 3 nodes"):
        app.start_ingresses(parse(["--name", "more", "--ingresses", "4"])[0], may_run=False)


def test_ingresses_that_were_started_end_where_another_name_is_taken(other):
    other.nodes = [{"NodeID": str(i), "Alive": True, "Resources": {}} for i in range(2)]
    other.names += ["dflash-ingress-1"]
    other.names.remove("dflash-ingress")
    other.applications = []
    with pytest.raises(InputError, match="is taken"):
        app.start_ingresses(parse(["--ingresses", "2"])[0], may_run=False)
    assert other.started == ["dflash-ingress", "the end of dflash-ingress"]


def test_command_without_an_ingress_of_its_own_ends_no_other(other):
    args, _ = parse(["--address", "auto"])
    command._end(args, 0, command._children(), [])
    assert other.started == ["the end of Ray"]


@pytest.mark.parametrize("name", ["", "-a", "a b", "é", "a" * 64])
def test_name_that_others_cannot_have_is_refused(name):
    with pytest.raises(InputError, match="it must be 1 to 63 letters"):
        parse([f"--name={name}"])


def descendants(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).children(recursive=True)
    return []


def named(process, title: str):
    """Processes below ``process`` by the beginning of their title."""
    matching = []
    for each in descendants(process):
        with contextlib.suppress(psutil.Error):
            if " ".join(each.cmdline()).startswith(title):
                matching.append(each)
    return matching


@contextlib.contextmanager
def running(count: int, *words: str):
    """URL and process of a cluster of ``count`` replicas."""
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "dflash_jax.cluster", "--replicas", str(count), "--port", str(port)]
    process = subprocess.Popen([*command, *WORDS, *words], env=os.environ | RAY)
    url = f"http://127.0.0.1:{port}"
    try:
        assert wait_until(lambda: has_replicas(url, process, count), 600)
        yield url, process
    finally:
        process.kill()
        process.wait()


def has_replicas(url: str, process, count: int) -> bool:
    assert process.poll() is None, "the cluster has ended"
    with contextlib.suppress(httpx.HTTPError):
        return f"\ndflash:replicas {count}\n" in httpx.get(f"{url}/metrics", timeout=60).text
    return False


def resumed(url: str) -> float:
    """Streams that went on from another engine, of the engines that live."""
    text = httpx.get(f"{url}/metrics", timeout=60).text
    return sum(float(count) for count in re.findall(r"^dflash:cluster_resumed_total{.*} (.*)$", text, re.MULTILINE))


def tokens_of(url, kill=None):
    """The tokens of `BODY`; ``kill`` is a process that ends at the first event."""
    lines = []
    with httpx.stream("POST", f"{url}/v1/completions", json=BODY, timeout=600) as answer:
        for line in answer.iter_lines():
            if kill is not None and not lines:
                kill.kill()
            # Comments keep a connection alive while there is no engine.
            if line.startswith("data: "):
                lines.append(line)
    assert lines.pop() == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    return [token for event in events for token in event["choices"][0]["token_ids"]]


@pytest.fixture(scope="module")
def cluster():
    """URL and process of a cluster, which a test ends, and the tokens of `BODY` before that."""
    with running(2) as (url, process):
        yield url, process, tokens_of(url)


def test_second_cluster_on_the_same_ray_leaves_the_first_one_alone(cluster):
    url, process, whole = cluster
    (raylet,) = (each for each in descendants(process) if each.name() == "raylet")
    address = next(word.partition("=")[2] for word in raylet.cmdline() if word.startswith("--gcs-address="))
    command = [sys.executable, "-m", "dflash_jax.cluster", "--address", address]
    refused = subprocess.run(
        [*command, "--port", "0"], env=os.environ | RAY, capture_output=True, text=True, timeout=600
    )
    assert refused.returncode == 2
    assert f"--name dflash is taken on this Ray cluster by {url}: " in refused.stderr
    assert tokens_of(url) == whole
    with running(1, "--address", address, "--name", "second") as (other, second):
        assert tokens_of(other) == whole
        second.send_signal(signal.SIGTERM)
        assert second.wait(120) == 0
    assert tokens_of(url) == whole


def test_stream_outlives_its_replica_and_a_signal_ends_every_process(cluster):
    url, process, whole = cluster
    assert len(whole) == BODY["max_tokens"]
    for replica in named(process, "ray::ServeReplica"):
        # The first one may be idle. Then the second one has the stream.
        assert tokens_of(url, replica) == whole
        if resumed(url):
            break
    else:
        pytest.fail("no stream went on from another replica")
    started = descendants(process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0
    assert wait_until(lambda: not [each for each in started if each.is_running()], 10)


@pytest.mark.parametrize("which", [0, 1], ids=["one of its hosts", "another of its hosts"])
def test_a_replica_over_two_hosts_gives_the_tokens_of_one_and_starts_again(cluster, which):
    """Its processes are those of a placement group; a stream whose group ends goes on from the next one."""
    _, _, whole = cluster
    with running(1, "--replica-hosts", "2", "--mesh", "tensor=2") as (url, process):
        assert tokens_of(url) == whole
        hosts = named(process, "ray::Host")
        assert len(hosts) == 2
        assert tokens_of(url, sorted(hosts, key=lambda each: each.pid)[which]) == whole
        assert resumed(url) == 1
        assert wait_until(lambda: not any(each.is_running() for each in hosts), 60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
