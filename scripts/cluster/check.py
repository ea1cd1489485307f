"""Disturbs a cluster under load: no request may be lost, repeated in part, or changed. And what a cluster costs.

    python scripts/cluster/check.py kill            each part gets SIGKILL at a random time, for several seeds
    python scripts/cluster/check.py gcs             Ray's GCS gets SIGKILL: all must end, with code 1
    python scripts/cluster/check.py update          a new version takes the place of two replicas, one after the other
    python scripts/cluster/check.py scale           one replica, two under load, and one again
    python scripts/cluster/check.py throughput      tokens per second of a cluster of one replica and of a plain server

Every second request is a stream. Tokens and texts are compared with those of a run without a disturbance: the exit code
is 1 where an answer is lost, too long or changed. Needs "dflash-jax[ray]".
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tools.server_process import START_S, ServerProcess, free_port, is_ready, machine

# --help works without them.
with contextlib.suppress(ModuleNotFoundError):
    import httpx
    import psutil

REPLICA, INGRESS, FRONT = "ray::ServeReplica", "ray::Ingress", "dflash_jax.cluster.front_process"
# Parts whose end closes connections of clients, which then send their requests again.
OF_CLIENTS = ("front", "ingress")
# Processes of a plain server.
KINDS = "engine", "front"
# What `kill` disturbs: a part of a process's command, and the signal. A stopped one goes on after STOPPED_S. The
# controller that takes the place of a killed one then has to start a replica.
PARTS = {
    "stopped replica": (REPLICA, signal.SIGSTOP),
    "controller": ("ray::ServeController", signal.SIGKILL),
    "replica": (REPLICA, signal.SIGKILL),
    "front": (FRONT, signal.SIGKILL),
    "ingress": (INGRESS, signal.SIGKILL),
}
STOPPED_S = 10.0
PROMPTS = ["def clamp(value, low, high):\n    ", "class Stack:\n", "import os\n\n", "x = "]
SMALL = ["--bundled", "--slots", "8", "--max-len", "1024"]
# Clients that go on while the cluster ends a replica, of those under whose load it has started one.
FEW = 2


@dataclass
class Answer:
    """A complete answer.

    Attributes:
        tokens: Its token ids.
        text: Its text, reasoning included.
        model: The model that its beginning names.
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    model: str = ""


def wanted(i: int, most: int) -> tuple[str, dict]:
    """The i-th request, of ``most`` tokens at most: path and body."""
    rng = random.Random(i)
    body = {"seed": i, "temperature": rng.choice([0, 0.7, 1.0]), "ignore_eos": True, "return_token_ids": True}
    body |= {"max_tokens": rng.choice([most // 5, most * 3 // 5, most]), "stream": i % 2 == 0}
    body |= rng.choice([{}, {}, {"frequency_penalty": 0.5, "repetition_penalty": 1.1}, {"stop": ["return"]}])
    if rng.random() < 0.5:
        return "/v1/completions", {"prompt": rng.choice(PROMPTS), **body}
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": rng.choice(PROMPTS)}], **body}


# Path and body of the i-th request.
Request = Callable[[int], tuple[str, dict]]


async def answer(client: "httpx.AsyncClient", path: str, body: dict) -> Answer:
    """The answer to a request. Raises for one that is not complete."""
    result, ended, done = Answer(), False, False

    def take(event: dict) -> None:
        nonlocal ended
        result.model = result.model or event["model"]
        for choice in event["choices"]:
            message = choice.get("delta") or choice.get("message") or choice
            result.tokens.extend(choice.get("token_ids") or ())
            for name in ("text", "reasoning_content", "content"):
                result.text += message.get(name) or ""
            ended = ended or choice["finish_reason"] is not None

    if not body["stream"]:
        response = await client.post(path, json=body)
        response.raise_for_status()
        take(response.json())
        return result
    async with client.stream("POST", path, json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                take(event)
    if not (ended and done):
        raise RuntimeError("the stream has no end")
    return result


def connected(url: str) -> "httpx.AsyncClient":
    return httpx.AsyncClient(base_url=url, timeout=None, limits=httpx.Limits(max_connections=None))


async def send_all(
    url: str,
    count: int,
    clients: int,
    request: Request,
    until: asyncio.Event | None = None,
    again: list[int] | None = None,
) -> list[tuple[int, Answer | Exception]]:
    """Sends the first ``count`` requests, and the same ones again until an event.

    Args:
        url: The server.
        count: Requests.
        clients: How many clients send them; each waits for its answer before it sends the next.
        request: The i-th request.
        until: Requests go on until it is set; None: each is sent once.
        again: Gets the number of each request that its client sends again, because it has lost its connection or the
            cluster has no replica yet; None: no client does.

    Returns:
        (number of the request, answer or exception) of each.
    """
    numbers, answers = itertools.count(), []
    async with connected(url) as http:

        async def result(i: int) -> Answer | Exception:
            while True:
                try:
                    return await answer(http, *request(i))
                except (httpx.HTTPError, RuntimeError, ValueError, LookupError) as e:
                    is_early = isinstance(e, httpx.HTTPStatusError) and e.response.status_code == 503
                    if again is None or not (is_early or isinstance(e, httpx.TransportError)):
                        return e
                    again.append(i)
                await asyncio.sleep(0.5)

        async def client() -> None:
            while (i := next(numbers)) < count or (until is not None and not until.is_set()):
                answers.append((i % count, await result(i % count)))

        await asyncio.gather(*(client() for _ in range(clients)))
    return answers


async def expected_of(url: str, count: int, clients: int, request: Request) -> list[Answer]:
    """The answers without a disturbance."""
    complete: dict[int, Answer] = {}
    for i, each in await send_all(url, count, clients, request):
        if isinstance(each, Exception):
            raise SystemExit(f"without a disturbance: request {i}: {each!r}")
        complete[i] = each
    return [complete[i] for i in range(count)]


def compared(answers: list[tuple[int, Answer | Exception]], expected: list[Answer], what: str) -> list[int]:
    """Requests, those that are lost, those with more tokens than expected, and those with other tokens or text."""
    complete = [(each, expected[i]) for i, each in answers if isinstance(each, Answer)]
    for i, each in answers:
        if isinstance(each, Exception):
            print(f"{what}: request {i}: {each!r}", file=sys.stderr)
    longer = sum(len(a.tokens) > len(b.tokens) for a, b in complete)
    changed = sum((a.tokens, a.text) != (b.tokens, b.text) for a, b in complete)
    return [len(answers), len(answers) - len(complete), longer, changed]


@dataclass
class State:
    """What the metrics of a cluster say.

    Attributes:
        replicas: Names of the replicas that answer.
        resumed: Requests that the replicas have from others, after tokens.
        repeated: Those without tokens.
    """

    replicas: set[str] = field(default_factory=set)
    resumed: int = 0
    repeated: int = 0

    @classmethod
    def read(cls, text: str) -> "State":
        """Reads the text of /metrics."""
        counts = Counter()
        for name, count in re.findall(r"^dflash:cluster_(\w+)_total{.*} (\S+)$", text, re.M):
            counts[name] += int(float(count))
        return cls(set(re.findall(r'engine="([^"]+)"', text)), counts["resumed"], counts["repeated"])


def state(url: str) -> State:
    """The state of a cluster; an empty one where it does not answer."""
    with contextlib.suppress(httpx.HTTPError, KeyError):
        return State.read(httpx.get(f"{url}/metrics", timeout=60).text)
    return State()


async def until_state(url: str, holds: Callable[[State], bool]) -> State:
    """The first state for which ``holds``."""
    until = time.monotonic() + START_S
    async with httpx.AsyncClient(timeout=60) as http:
        while time.monotonic() < until:
            with contextlib.suppress(httpx.HTTPError, KeyError):
                now = State.read((await http.get(f"{url}/metrics")).text)
                if holds(now):
                    return now
            await asyncio.sleep(0.2)
    raise SystemExit(f"{url}: what was to come did not come within {START_S:.0f} s")


def table(names: str, rows: list[list]) -> str:
    """A table of numbers in Markdown; ``names``: of its columns, between bars."""
    head = f"| {names} |\n{'| ---: ' * (names.count('|') + 1)}|"
    return "\n".join([head, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


ANSWERS = "requests | lost | too long | changed | went on elsewhere | began again elsewhere | seconds"


async def disturbed(url: str, work: Awaitable, loads: Callable[[], Awaitable], expected, what: str) -> list:
    """The columns of `ANSWERS` for ``loads()`` while ``work`` is done."""
    before, began = state(url), time.perf_counter()
    _, answers = await asyncio.gather(work, loads())
    seconds, after = time.perf_counter() - began, state(url)
    # A new replica counts anew.
    totals = [(before.resumed, after.resumed), (before.repeated, after.repeated)]
    went_on = [new - old if new >= old else new for old, new in totals]
    return [*compared(answers, expected, what), *went_on, f"{seconds:.1f}"]


def processes_below(pid: int, name: str) -> list["psutil.Process"]:
    """Processes below the process ``pid`` whose command has ``name`` in it."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if name in " ".join(process.cmdline()):
                found.append(process)
    return found


def stopped(server: ServerProcess) -> str:
    """Ends a cluster, and returns a sentence with its exit code and the number of processes that remain."""
    began, children = time.perf_counter(), psutil.Process(server.process.pid).children(recursive=True)
    code = server.stop()
    left = [each for each in children if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    return f"SIGTERM: exit code {code}, {len(left)} processes left after {time.perf_counter() - began:.0f} s."


def load_text(count: int, clients: int, seconds: float) -> str:
    return f"{count} requests of {clients} clients, {seconds:.1f} s without a disturbance"


def load_of(args) -> tuple[int, int, Request]:
    """What `send_all` takes: requests, clients, and the i-th request."""
    return args.requests, args.clients, partial(wanted, most=args.new_tokens)


def are_right(rows: list[list]) -> bool:
    """Whether no answer of a table of `ANSWERS`, after its first column, is lost, too long or changed."""
    return not any(value for row in rows for value in row[2:5])


def kill(args) -> tuple[str, bool]:
    words = ["--replicas", "2", *SMALL, *args.words]
    rows, load, is_whole = [], load_of(args), True
    with ServerProcess.of("cluster", words) as server:
        server.wait_until(lambda: len(state(server.url).replicas) == 2)
        began = time.perf_counter()
        expected = asyncio.run(expected_of(server.url, *load))
        seconds = time.perf_counter() - began

        async def disturb(title: str, number: signal.Signals, rng: random.Random, over: asyncio.Event) -> None:
            await asyncio.sleep(rng.uniform(0.05, 0.8) * seconds)
            before = processes_below(server.process.pid, title)
            process = rng.choice(before)
            process.send_signal(number)
            if number == signal.SIGSTOP:
                await asyncio.sleep(STOPPED_S)
                process.send_signal(signal.SIGCONT)

            def is_back() -> bool:
                now = processes_below(server.process.pid, title)
                is_new = number == signal.SIGSTOP or process not in now
                return is_new and len(now) == len(before) and len(state(server.url).replicas) == 2

            try:
                await asyncio.to_thread(server.wait_until, is_back)
            finally:
                over.set()

        runs = [(part, seed) for part in args.parts for seed in range(args.seeds)]
        for part, seed in runs:
            title, number = PARTS[part]
            over, again = asyncio.Event(), [] if part in OF_CLIENTS else None
            replicas = processes_below(server.process.pid, REPLICA)
            loads = lambda over=over, again=again: send_all(server.url, *load, over, again)  # noqa: E731
            work = disturb(title, number, random.Random(f"kill {seed}"), over)
            row = asyncio.run(disturbed(server.url, work, loads, expected, f"{part}, seed {seed}"))
            ended = sum(not each.is_running() for each in replicas)
            is_whole = is_whole and ended == (part == "replica")
            rows.append([f"{part}, {seed}", *row, len(set(again or ())), ended])
            print(rows[-1], file=sys.stderr)
        end = stopped(server)
    head = f"`dflash cluster {' '.join(words)}` on {machine()}: {load_text(args.requests, args.clients, seconds)}."
    columns = f"part, seed | {ANSWERS} | sent again by clients | replicas that ended"
    return f"{head}\n\n{table(columns, rows)}\n\n{end}\n", are_right(rows) and is_whole


def gcs(args) -> tuple[str, bool]:
    words, count = ["--replicas", "1", *SMALL, *args.words], 0
    with ServerProcess.of("cluster", words) as server:
        server.wait_until(lambda: len(state(server.url).replicas) == 1)
        children = psutil.Process(server.process.pid).children(recursive=True)
        next(each for each in children if "gcs_server" in each.name()).kill()
        began = time.perf_counter()
        while server.process.poll() is None:
            answers = asyncio.run(send_all(server.url, 1, 1, load_of(args)[2]))
            count += isinstance(answers[0][1], Answer)
        seconds, code = time.perf_counter() - began, server.process.returncode
        left = psutil.wait_procs(children, timeout=START_S)[1]
        last = time.perf_counter() - began
    text = f"`dflash cluster {' '.join(words)}` on {machine()}: exit code {code} {seconds:.0f} s after the GCS, with "
    text += f"{count} requests answered meanwhile; the last process ended after {last:.0f} s, and {len(left)} remained."
    return f"{text}\n", code == 1 and not left


def update(args) -> tuple[str, bool]:
    """Deploys one version after the other with ``serve deploy``, as a cluster of several machines does."""
    words, rows, load = ["--replicas", "2", *SMALL, *args.words], [], load_of(args)
    ports = {name: str(free_port()) for name in ("port", "dashboard-port", "dashboard-agent-listen-port")}
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    programs = Path(sys.executable).parent
    # `ray start` asks for it. The default is a file of the user's, which a cluster of the user's may have.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with contextlib.ExitStack() as stack:
        command = [str(programs / "ray"), "start", "--head", "--block", "--node-ip-address", "127.0.0.1"]
        command += ["--disable-usage-stats", "--object-store-memory", str(200 * 2**20)]
        command += [word for name, value in ports.items() for word in (f"--{name}", value)]
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        server = stack.enter_context(ServerProcess(command, port))
        dashboard = f"http://127.0.0.1:{ports['dashboard-port']}"

        def deploy(version: str) -> None:
            argv = [*words, "--port", str(port), "--served-model-name", version]
            application = {"name": "dflash", "route_prefix": None, "import_path": "dflash_jax.cluster.app:build"}
            config = {"proxy_location": "Disabled", "applications": [application | {"args": {"argv": argv}}]}
            (path := Path(directory) / "serve.yaml").write_text(json.dumps(config))
            subprocess.run([str(programs / "serve"), "deploy", str(path), "--address", dashboard], check=True)

        server.wait_until(lambda: answers_at(dashboard))
        deploy("1")
        server.wait_until(lambda: len(state(url).replicas) == 2)
        began = time.perf_counter()
        expected = asyncio.run(expected_of(url, *load))
        seconds = time.perf_counter() - began
        for version in range(2, args.versions + 2):
            over = asyncio.Event()

            async def updated(version=version, over=over) -> None:
                old = state(url).replicas
                # A moment of load before it.
                await asyncio.sleep(1)
                await asyncio.to_thread(deploy, str(version))
                await until_state(url, lambda now: len(now.replicas) == 2 and not now.replicas & old)
                over.set()

            loads = lambda over=over: send_all(url, *load, over)  # noqa: E731
            rows.append([version, *asyncio.run(disturbed(url, updated(), loads, expected, f"version {version}"))])
            print(rows[-1], file=sys.stderr)
        subprocess.run([str(programs / "serve"), "shutdown", "--yes", "--address", dashboard], check=True)
    head = f"`serve deploy` of `{' '.join(words)}` on {machine()}: {load_text(args.requests, args.clients, seconds)}."
    text = f"{head}\n\n{table(f'to version | {ANSWERS}', rows)}\n"
    return text, are_right(rows)


def answers_at(url: str) -> bool:
    try:
        return httpx.get(url, timeout=60).status_code < 500
    except httpx.HTTPError:
        return False


def scale(args) -> tuple[str, bool]:
    words = ["--replicas", "1:2", "--target-ongoing", "4", "--scale-up-s", "2", "--scale-down-s", "5"]
    words += [*SMALL, *args.words]
    rows = []
    with ServerProcess.of("cluster", words) as server:
        url = server.url
        server.wait_until(lambda: len(state(url).replicas) == 1)
        began = time.perf_counter()
        count, _, request = load_of(args)
        expected = asyncio.run(expected_of(url, count, FEW, request))
        seconds = time.perf_counter() - began
        for i in range(args.rounds):
            up, down, took = asyncio.Event(), asyncio.Event(), []

            async def scaled(up=up, down=down, took=took) -> None:
                began = time.perf_counter()
                await until_state(url, lambda now: len(now.replicas) == 2)
                took.append(time.perf_counter() - began)
                # Both replicas have requests for a while.
                await asyncio.sleep(5)
                up.set()
                began = time.perf_counter()
                await until_state(url, lambda now: len(now.replicas) == 1)
                took.append(time.perf_counter() - began)
                down.set()

            async def loads(up=up, down=down):
                many = send_all(url, count, args.clients - FEW, request, up)
                few = send_all(url, count, FEW, request, down)
                return [each for answers in await asyncio.gather(many, few) for each in answers]

            row = asyncio.run(disturbed(url, scaled(), loads, expected, f"round {i}"))
            rows.append([i, *row, *(f"{each:.0f}" for each in took)])
            print(rows[-1], file=sys.stderr)
        end = stopped(server)
    head = f"`dflash cluster {' '.join(words)}` on {machine()}: {load_text(args.requests, FEW, seconds)}; "
    head += f"{args.clients} clients until two replicas have answered for 5 s, then {FEW}."
    text = f"{head}\n\n{table(f'round | {ANSWERS} | to two, s | to one, s', rows)}\n\n{end}\n"
    return text, are_right(rows)


def throughput(args) -> tuple[str, bool]:
    """Turns of a plain server and of a cluster of one replica, one after the other, each first in every second turn."""
    words = [*SMALL, *args.words]

    def request(stream: bool) -> Request:
        def of(i: int) -> tuple[str, dict]:
            body = {"prompt": PROMPTS[i % len(PROMPTS)], "seed": i, "temperature": 0.7, "ignore_eos": True}
            return "/v1/completions", body | {"max_tokens": args.new_tokens, "stream": stream, "return_token_ids": True}

        return of

    async def turn(url: str, stream: bool) -> tuple[float, int]:
        """Seconds and tokens."""
        began = time.perf_counter()
        answers = await send_all(url, args.requests, args.clients, request(stream))
        seconds = time.perf_counter() - began
        if failures := [each for _, each in answers if isinstance(each, Exception)]:
            raise SystemExit(f"{url}: {failures[0]!r}")
        return seconds, sum(len(each.tokens) for _, each in answers if isinstance(each, Answer))

    def cpu_s(processes: list["psutil.Process"]) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    # Of each kind of answer and server: (tokens/s, µs of CPU a token of the server, of the fronts) of each turn.
    turns: dict[tuple[bool, bool], list[tuple[float, float, float]]] = {}
    with ServerProcess.of("serve", words) as plain, ServerProcess.of("cluster", ["--replicas", "1", *words]) as cluster:
        plain.wait_until(lambda: is_ready(plain.url))
        cluster.wait_until(lambda: is_ready(cluster.url))
        measured = [
            (plain.url, *(processes_below(plain.process.pid, f"dflash_jax.server.{kind}_process") for kind in KINDS)),
            (cluster.url, *(processes_below(cluster.process.pid, name) for name in (REPLICA, FRONT))),
        ]
        for i in range(args.turns + 1):
            for stream in (True, False):
                for is_cluster in (False, True) if i % 2 else (True, False):
                    url, *groups = measured[is_cluster]
                    before = [cpu_s(group) for group in groups]
                    seconds, tokens = asyncio.run(turn(url, stream))
                    print(f"turn {i}, {stream=}, {is_cluster=}: {tokens / seconds:.0f}", file=sys.stderr)
                    used = [1e6 * (cpu_s(group) - b) / tokens for group, b in zip(groups, before, strict=True)]
                    # The first turn warms up.
                    if i:
                        turns.setdefault((stream, is_cluster), []).append((tokens / seconds, used[0], used[1]))
    rows = []
    for stream in (True, False):
        ratios = [b[0] / a[0] for a, b in zip(turns[stream, False], turns[stream, True], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        columns = [
            statistics.median(values) for kind in (False, True) for values in zip(*turns[stream, kind], strict=True)
        ]
        tokens, engine, fronts, cluster_tokens, replica, its_fronts = (f"{each:.0f}" for each in columns)
        ratio = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        row = [tokens, cluster_tokens, ratio, engine, fronts, replica, its_fronts]
        rows.append(["streams" if stream else "whole answers", *row])
    head = f"`{' '.join(words)}` on {machine()}: {args.turns} turns of {args.requests} requests of {args.new_tokens} "
    head += (
        f"tokens from {args.clients} clients, of the plain server and of the cluster in turn; medians, and quartiles "
    )
    head += "of the ratio."
    names = "answers | `dflash serve`, tokens/s | `dflash cluster`, tokens/s | ratio of a turn | "
    names += "engine, µs of CPU a token | its fronts | replica | its fronts"
    return f"{head}\n\n{table(names, rows)}\n", True


def main() -> int:
    # Servers end with the script.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["kill", "gcs", "update", "scale", "throughput"])
    p.add_argument("--requests", type=int, default=200)
    p.add_argument("--clients", type=int, default=8)
    p.add_argument("--seeds", type=int, default=5, help="of kill")
    text = f"of kill (default: {', '.join(PARTS)})"
    p.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=text)
    p.add_argument("--versions", type=int, default=2, help="of update, after the first one")
    p.add_argument("--rounds", type=int, default=2, help="of scale")
    p.add_argument("--turns", type=int, default=6, help="of throughput")
    p.add_argument("--new-tokens", type=int, help="of the longest answers (default: 200; of throughput: 128)")
    p.add_argument("--out", type=Path, help="write the report here too")
    p.epilog = "Words after -- are further words of dflash cluster."
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = p.parse_args(sys.argv[1:at], argparse.Namespace(words=sys.argv[at + 1 :]))
    args.new_tokens = args.new_tokens or (128 if args.what == "throughput" else 200)
    what = {"kill": kill, "gcs": gcs, "update": update, "scale": scale, "throughput": throughput}
    report, is_right = what[args.what](args)
    print(report)
    if args.out:
        args.out.write_text(report)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
