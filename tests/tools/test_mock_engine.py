"""A server whose device is a clock answers as others do, and says what its engine has done."""

import json
import sys

import httpx

from tools.mock_runner import MockDevice
from tools.server_process import ServerProcess, free_port, is_ready


def test_a_server_with_a_mock_device_answers_and_leaves_its_figures(tmp_path):
    figures, port = tmp_path / "figures.json", free_port()
    device = MockDevice(slots=2, positions=128, round_s=0.001, tokens=4, figures=str(figures))
    command = [sys.executable, "-m", "tools.mock_engine", "--bundled", "--port", str(port)]
    with ServerProcess(command, port, device.environment) as server:
        server.wait_until(lambda: is_ready(server.url))
        body = {"prompt": "def f(", "max_tokens": 21, "ignore_eos": True, "regex": "(?s:.){1,1000}"}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()
        assert answer["usage"]["completion_tokens"] == 21
        assert server.stop() == 0
    found = json.loads(figures.read_text())
    assert found["samples"][-1][3] >= 6
    assert len(found["gaps"]) >= found["samples"][-1][4] > 0
