"""What a client on the edge loads: all of `baffle join --model` over the link, and nothing of Flower or PyTorch."""

import subprocess
import sys

import pytest

pytest.importorskip("onnxruntime")

FOREIGN = ("flwr", "google", "httpx", "http.client", "asyncio", "torch", "onnx", "rich", "cryptography.x509")

CLIENT = """
import sys
import baffle.cli.main, baffle.cli.join, baffle.cli.log
import baffle.network.equipment, baffle.network.keys, baffle.network.member, baffle.network.link.client
import baffle.network.edge, baffle.plan
print(*sys.modules)
"""


def test_a_client_on_the_edge_loads_nothing_that_it_does_not_need() -> None:
    done = subprocess.run([sys.executable, "-c", CLIENT], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "onnxruntime" in loaded
    assert "websockets" in loaded
    assert loaded.isdisjoint(FOREIGN)
