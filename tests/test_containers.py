"""docker/: what can be held to the package without a container engine."""

import http.server
import importlib.util
import math
import re
import ssl
import threading
import tomllib
from pathlib import Path

import pytest
import trustme
import yaml

from dflash_jax.cluster import options as cluster
from dflash_jax.options.serve import parse
from dflash_jax.parallel.distributed import PORT as COORDINATOR_PORT
from dflash_jax.parallel.sharding import Layout
from dflash_jax.server.access import OPEN_PATHS

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
# With the resource that a pod has of its host.
GROUPS = {"leader_worker_set.yaml": "nvidia.com/gpu", "tpu_slice.yaml": "google.com/tpu"}
MANIFESTS = ("kubernetes.yaml", "ray_service.yaml", "gateway.yaml", *GROUPS)
OBJECTS = {name: list(yaml.safe_load_all((DOCKER / name).read_text())) for name in MANIFESTS}
CLAIM, DEPLOYMENT, BUDGET, SERVICE = OBJECTS["kubernetes.yaml"]
RAY_SERVICE = OBJECTS["ray_service.yaml"][1]
# Groups of APIs: of custom resources, and one of Kubernetes itself.
API_GROUPS = {
    "gateway.networking.k8s.io",
    "inference.networking.k8s.io",
    "inference.networking.x-k8s.io",
    "leaderworkerset.sigs.k8s.io",
    "leaderworkerset.x-k8s.io",
    "lws.sigs.k8s.io",
    "ray.io",
    "rbac.authorization.k8s.io",
}
POD = DEPLOYMENT["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
ENTRYPOINT = yaml.safe_load(re.search(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)[1])
PORT = int(re.search(r"^EXPOSE (\d+)$", DOCKERFILE, re.MULTILINE)[1])


def build_accelerators() -> set[str]:
    """The values of ACCELERATOR that the Dockerfile accepts."""
    patterns = re.findall(r"^ +([\w|]+)\) extras=", DOCKERFILE, re.MULTILINE)
    return {name for pattern in patterns for name in pattern.split("|")}


def extras(name: str) -> list[str]:
    """The requirements of an extra."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][name]


def test_dockerfile_installs_extras_that_exist():
    named = set(re.search(r'"\.\[([\w,]+)\$extras\]"', DOCKERFILE)[1].split(","))
    assert {"server", "video", "ray", "train"} <= named
    assert build_accelerators() == {"cpu", "cuda13", "tpu"}
    assert all(extras(name) for name in named | build_accelerators() - {"cpu"})


def test_dockerfile_copies_what_exists_and_is_not_ignored():
    copied = [
        name for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE) for name in line.split()[:-1]
    ]
    kept = re.findall(r"^!(.*)$", (DOCKER / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    assert all((ROOT / name).exists() for name in copied)
    assert set(copied) == set(kept)


COMMANDS = [service["command"] for service in COMPOSE["services"].values()]


@pytest.mark.parametrize("arguments", [[], *COMMANDS, CONTAINER["args"]], ids=str)
def test_servers_listen_on_all_networks_and_the_exposed_port(arguments, monkeypatch):
    monkeypatch.delenv("DFLASH_API_KEY", raising=False)
    assert ENTRYPOINT[:2] == ["dflash", "serve"]
    args, *_ = parse([*ENTRYPOINT[2:], *arguments])
    assert (args.host, args.port) == ("0.0.0.0", PORT)


def test_servers_that_something_starts_again_end_after_a_failure():
    assert all(service["restart"] != "no" for service in COMPOSE["services"].values())
    assert all(parse(words)[0].exit_on_failure for words in (*COMMANDS, CONTAINER["args"]))


def test_a_stop_waits_longer_than_the_server_drains():
    args, *_ = parse([])
    pod, *_ = parse(CONTAINER["args"])
    pause = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert POD["terminationGracePeriodSeconds"] > pause + pod.drain_s
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


def test_an_update_and_an_emptied_node_leave_servers():
    spec = DEPLOYMENT["spec"]
    assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert BUDGET["spec"]["maxUnavailable"] < spec["replicas"]
    # A pod of another node mounts the volume beside those that are there.
    assert CLAIM["spec"]["accessModes"] == ["ReadWriteMany"]
    start = CONTAINER["startupProbe"]
    assert spec["progressDeadlineSeconds"] > start["periodSeconds"] * start["failureThreshold"]


def test_kubernetes_objects_refer_to_each_other():
    kinds = ["PersistentVolumeClaim", "Deployment", "PodDisruptionBudget", "Service"]
    assert [each["kind"] for each in OBJECTS["kubernetes.yaml"]] == kinds
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert BUDGET["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert SERVICE["spec"]["selector"].items() <= labels.items()
    assert {port["targetPort"] for port in SERVICE["spec"]["ports"]} == {port["name"] for port in CONTAINER["ports"]}
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == set(volumes)
    assert volumes["cache"]["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]


def test_the_cache_of_the_image_is_the_mounted_directory():
    (cache,) = (mount["mountPath"] for mount in CONTAINER["volumeMounts"] if mount["name"] == "cache")
    assert f"XDG_CACHE_HOME={cache} HF_HOME={cache}/" in DOCKERFILE
    assert COMPOSE["services"]["cpu"]["volumes"] == [f"cache:{cache}"]


@pytest.mark.parametrize("name", MANIFESTS)
def test_kubernetes_accepts_the_manifests(name):
    """Kubernetes' own kinds, without unknown fields. Custom resources are left out: their pods are not."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for value in OBJECTS[name]:
        if pods := pods_of(value):
            for pod in pods:
                template = {"apiVersion": "v1", "kind": "PodTemplate", "template": pod}
                kubernetes_validate.validate(template, "1.37", strict=True)
        elif value["apiVersion"].split("/")[0] not in API_GROUPS - {"rbac.authorization.k8s.io"}:
            kubernetes_validate.validate(value, "1.37", strict=True)


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_volume_keeps_the_permissions_of_its_files_at_the_next_start(name):
    """Else Kubernetes makes them writable for the group, and a compile cache that is so is refused."""
    for value in OBJECTS[name]:
        pods = pods_of(value) or ([value["spec"]["template"]] if value["kind"] == "Deployment" else [])
        contexts = [pod["spec"].get("securityContext", {}) for pod in pods]
        assert all(c["fsGroupChangePolicy"] == "OnRootMismatch" for c in contexts if "fsGroup" in c)


def pods_of(value) -> list:
    """The templates of the pods of a custom resource."""
    if value["kind"] == "LeaderWorkerSet":
        return [value["spec"]["leaderWorkerTemplate"][f"{role}Template"] for role in ("leader", "worker")]
    if value["kind"] == "RayService":
        cluster = value["spec"]["rayClusterConfig"]
        return [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    return []


def test_a_ray_service_has_a_worker_for_each_replica_and_the_ingress_on_its_head(monkeypatch):
    monkeypatch.delenv("DFLASH_API_KEY", raising=False)
    spec = RAY_SERVICE["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    args, _ = cluster.parse(application["args"]["argv"])
    assert application["name"] == args.name
    assert args.host == "0.0.0.0"
    ray, (head, worker) = spec["rayClusterConfig"], (pod["spec"] for pod in pods_of(RAY_SERVICE))
    (ingress,), (replica,) = head["containers"], worker["containers"]
    assert {"name": "http", "containerPort": args.port} in ingress["ports"]
    (group,) = ray["workerGroupSpecs"]
    assert (group["replicas"], group["replicas"]) == args.replicas
    assert replica["resources"]["limits"]["nvidia.com/gpu"] == args.replica_gpus
    assert worker["terminationGracePeriodSeconds"] > args.drain_s
    requirement = next(each for each in extras("ray") if each.startswith("ray["))
    assert f">={ray['rayVersion'].rpartition('.')[0]}" in requirement


@pytest.mark.parametrize(("name", "resource"), GROUPS.items())
def test_a_leader_worker_set_serves_one_model_over_its_pods(name, resource, monkeypatch):
    monkeypatch.delenv("DFLASH_API_KEY", raising=False)
    group_set, service = OBJECTS[name][1:]
    group = group_set["spec"]["leaderWorkerTemplate"]
    leader, worker = (group[f"{role}Template"] for role in ("leader", "worker"))
    (first,), (other,) = (template["spec"]["containers"] for template in (leader, worker))
    assert first["args"] == other["args"]
    args, _ = parse([*ENTRYPOINT[2:], *first["args"]])
    assert args.distributed
    assert Layout.parse(args.mesh).devices == group["size"] * first["resources"]["limits"][resource]
    assert leader["spec"]["terminationGracePeriodSeconds"] > args.drain_s
    # The leader alone has HTTP.
    ports = {port["name"]: port["containerPort"] for port in first["ports"]}
    assert ports == {"http": PORT, "coordinator": COORDINATOR_PORT}
    assert not {"ports", "livenessProbe", "readinessProbe", "startupProbe"} & other.keys()
    assert first["readinessProbe"]["httpGet"] == CONTAINER["readinessProbe"]["httpGet"]
    selected = service["spec"]["selector"].items()
    assert selected <= leader["metadata"]["labels"].items()
    assert not selected <= worker["metadata"]["labels"].items()


def test_a_group_of_a_slice_has_all_of_its_chips_and_the_mesh_of_its_system():
    pods = pods_of(OBJECTS["tpu_slice.yaml"][1])
    (topology,) = {pod["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"] for pod in pods}
    args, system = parse([*ENTRYPOINT[2:], *pods[0]["spec"]["containers"][0]["args"]])
    chips = math.prod(map(int, topology.split("x")))
    assert chips == Layout.parse(args.mesh).devices
    assert args.mesh == system.meshes[f"v6ex{chips}"]
    assert f"--tpu-topology {topology}" in (DOCKER / "tpu_slice.yaml").read_text()
    assert all(pod["spec"]["containers"][0]["image"] == "dflash-jax:tpu" for pod in pods)


def test_a_queued_resource_starts_the_command_of_the_group_of_a_slice():
    """The page's commands for Cloud TPU virtual machines."""
    page = (ROOT / "docs/cluster.md").read_text().replace("\\\n", "")
    (words,) = re.findall(r"dflash-jax:tpu +(--[^'`]*)'", page)
    args, _ = parse([*ENTRYPOINT[2:], *words.split()])
    (template, _) = pods_of(OBJECTS["tpu_slice.yaml"][1])
    group, _ = parse([*ENTRYPOINT[2:], *template["spec"]["containers"][0]["args"]])
    assert vars(args) == vars(group)
    assert f"--accelerator-type v6e-{Layout.parse(args.mesh).devices} " in page


def test_a_gateway_sends_requests_to_the_servers_that_the_picker_names():
    kinds = {value["kind"]: value for value in OBJECTS["gateway.yaml"]}
    pool, route, picker = (kinds[kind] for kind in ("InferencePool", "HTTPRoute", "Deployment"))
    assert (
        pool["spec"]["selector"]["matchLabels"].items() <= DEPLOYMENT["spec"]["template"]["metadata"]["labels"].items()
    )
    assert pool["spec"]["targetPorts"] == [{"number": PORT}]
    (rule,), (parent,) = route["spec"]["rules"], route["spec"]["parentRefs"]
    assert [ref["name"] for ref in rule["backendRefs"]] == [pool["metadata"]["name"]]
    assert parent["name"] == kinds["Gateway"]["metadata"]["name"]
    service, named = kinds["Service"], pool["spec"]["endpointPickerRef"]
    assert (named["name"], named["port"]["number"]) == (
        service["metadata"]["name"],
        service["spec"]["ports"][0]["port"],
    )
    pod = picker["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    assert f"--pool-name={pool['metadata']['name']}" in container["args"]
    (mount,), (volume,) = container["volumeMounts"], pod["spec"]["volumes"]
    (file,) = kinds["ConfigMap"]["data"]
    assert volume["configMap"]["name"] == kinds["ConfigMap"]["metadata"]["name"]
    assert f"--config-file={mount['mountPath']}/{file}" in container["args"]
    config = yaml.safe_load(kinds["ConfigMap"]["data"][file])
    used = {plugin["pluginRef"] for profile in config["schedulingProfiles"] for plugin in profile["plugins"]}
    assert used <= {plugin["type"] for plugin in config["plugins"]}


def health():
    """The script of the image's health check."""
    assert "HEALTHCHECK" in DOCKERFILE
    assert 'CMD ["python", "/opt/dflash/health.py"]' in DOCKERFILE
    spec = importlib.util.spec_from_file_location("health", DOCKER / "health.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("command", ["serve", "cluster"])
@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("demands", [False, True], ids=["any client", "clients with a certificate"])
def test_health_check_follows_port_and_tls(tmp_path, command, is_tls, demands):
    server, words = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Healthy), []
    if is_tls:
        authority = trustme.CA()
        (pem := tmp_path / "server.pem").write_bytes(authority.issue_cert("x").private_key_and_cert_chain_pem.bytes())
        authority.cert_pem.write_to_path(tmp_path / "ca.pem")
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tmp_path / "ca.pem")
        context.verify_mode = ssl.CERT_REQUIRED if demands else ssl.CERT_NONE
        context.load_cert_chain(pem)
        # A refusal is that of a handshake: after the connection is accepted.
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        server.handle_error = lambda *_: None
        words = ["--ssl_certfile", str(pem)]
        words += ["--ssl-cert-reqs=2", "--ssl-ca-certs", str(tmp_path / "ca.pem")] if demands else []
    words = [command, "--host", "0.0.0.0", f"--port={server.server_port}", *words]
    for number, line in ((1, ["/sbin/docker-init", "--", "dflash", *words]), (7, ["python", "/bin/dflash", *words])):
        (tmp_path / "proc" / str(number)).mkdir(parents=True)
        (tmp_path / "proc" / str(number) / "cmdline").write_bytes("\0".join([*line, ""]).encode())
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        assert health().main(tmp_path / "proc") == 0
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert health().main(tmp_path / "proc") == 1


def test_health_check_of_a_command_without_a_server_is_that_of_its_process(tmp_path):
    assert health().main(tmp_path) == 1
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "cmdline").write_bytes(b"/opt/dflash/bin/python\0/opt/dflash/bin/dflash\0train\0")
    assert health().main(tmp_path) == 0


@pytest.mark.parametrize(
    "path", sorted(each for each in DOCKER.iterdir() if each.is_file()), ids=lambda path: path.name
)
def test_no_host_of_a_registry_is_named(path: Path):
    hosts = re.findall(r"\b[\w-]+(?:\.[\w-]+)*\.(?:io|com|org|dev|gcr|net)\b(?!/(?:gpu|tpu|gke))", path.read_text())
    assert set(hosts) <= API_GROUPS
