"""docker/: what can be held to the package without a container engine."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from dflash_jax.cli.serve_arguments import parse
from dflash_jax.server.access import OPEN_PATHS

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
CLAIM, DEPLOYMENT, SERVICE = yaml.safe_load_all((DOCKER / "kubernetes.yaml").read_text())
POD = DEPLOYMENT["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
ENTRYPOINT = yaml.safe_load(re.search(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)[1])
PORT = int(re.search(r"^EXPOSE (\d+)$", DOCKERFILE, re.MULTILINE)[1])


def build_accelerators() -> set[str]:
    """The values of ACCELERATOR that the Dockerfile accepts."""
    patterns = re.findall(r"^ +([\w|]+)\) extras=", DOCKERFILE, re.MULTILINE)
    return {name for pattern in patterns for name in pattern.split("|")}


def test_dockerfile_installs_extras_that_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {name for names in re.findall(r"extras=([\w,]+)", DOCKERFILE) for name in names.split(",") if name}
    assert build_accelerators() == {"cpu", "cuda13", "tpu"}
    assert named | build_accelerators() - {"cpu"} <= set(extras)


def test_dockerfile_copies_what_exists_and_is_not_ignored():
    copied = [
        name for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE) for name in line.split()[:-1]
    ]
    kept = re.findall(r"^!(.*)$", (DOCKER / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    assert all((ROOT / name).exists() for name in copied)
    assert set(copied) == set(kept)


@pytest.mark.parametrize("arguments", [[], COMPOSE["services"]["cuda"]["command"], CONTAINER["args"]], ids=str)
def test_servers_listen_on_all_networks_and_the_exposed_port(arguments, monkeypatch):
    monkeypatch.delenv("DFLASH_API_KEY", raising=False)
    assert ENTRYPOINT[:2] == ["dflash", "serve"]
    args, *_ = parse([*ENTRYPOINT[2:], *arguments])
    assert (args.host, args.port) == ("0.0.0.0", PORT)


def test_a_stop_waits_longer_than_the_server_drains():
    args, *_ = parse([])
    assert POD["terminationGracePeriodSeconds"] > args.drain_s
    for service in COMPOSE["services"].values():
        assert int(service["stop_grace_period"].removesuffix("s")) > args.drain_s


def test_compose_builds_accelerators_and_publishes_the_port_on_loopback():
    assert set(COMPOSE["services"]) == {"cpu", "cuda"}
    for service in COMPOSE["services"].values():
        build = service["build"]
        assert build["args"]["ACCELERATOR"] in build_accelerators()
        assert service["image"] == f"dflash-jax:{build['args']['ACCELERATOR']}"
        assert (DOCKER / build["context"] / build["dockerfile"]).exists()
        assert service["ports"] == [f"127.0.0.1:{PORT}:{PORT}"]
        assert {volume.split(":")[0] for volume in service["volumes"]} == set(COMPOSE["volumes"])


def test_kubernetes_probes_are_endpoints_that_need_no_key():
    probes = {kind: CONTAINER[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
    assert {kind: probe["path"] for kind, probe in probes.items()} == {
        "startup": "/health",
        "liveness": "/health",
        "readiness": "/ready",
    }
    assert {probe["path"] for probe in probes.values()} <= set(OPEN_PATHS)
    (port,) = CONTAINER["ports"]
    assert port["containerPort"] == PORT
    assert {probe["port"] for probe in probes.values()} == {port["name"]}


def test_kubernetes_objects_refer_to_each_other():
    assert [o["kind"] for o in (CLAIM, DEPLOYMENT, SERVICE)] == ["PersistentVolumeClaim", "Deployment", "Service"]
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert SERVICE["spec"]["selector"].items() <= labels.items()
    assert {port["targetPort"] for port in SERVICE["spec"]["ports"]} == {port["name"] for port in CONTAINER["ports"]}
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == set(volumes)
    assert volumes["cache"]["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]


def test_the_cache_of_the_image_is_the_mounted_directory():
    (cache,) = (mount["mountPath"] for mount in CONTAINER["volumeMounts"] if mount["name"] == "cache")
    assert f"XDG_CACHE_HOME={cache} HF_HOME={cache}/" in DOCKERFILE
    assert COMPOSE["services"]["cpu"]["volumes"] == [f"cache:{cache}"]


@pytest.mark.parametrize("path", sorted(DOCKER.iterdir()), ids=lambda path: path.name)
def test_no_host_of_a_registry_is_named(path: Path):
    hosts = re.findall(r"\b[\w-]+(?:\.[\w-]+)*\.(?:io|com|org|dev|gcr|net)\b(?!/gpu)", path.read_text())
    assert not hosts
