"""Models of the hub, from a server that speaks as the hub does."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

COMMIT = "0" * 40
FILES = {
    "config.json": json.dumps(
        {
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 256,
        }
    ).encode(),
    "model.safetensors": b"never asked for",
}


@pytest.fixture
def hub():
    """(its address, the paths that were asked for) of a hub with one model, ``someone/their-model``."""
    asked = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self, body=True):
            asked.append(self.path)
            if self.path.startswith("/api/models/someone/their-model"):
                files = [
                    {"type": "file", "path": name, "rfilename": name, "oid": COMMIT, "size": len(FILES[name])} for name in FILES
                ]
                said = files if "/tree/" in self.path else {"id": "someone/their-model", "sha": COMMIT, "siblings": files}
                return self.answer(json.dumps(said).encode(), body, {"Content-Type": "application/json"})
            if self.path == f"/someone/their-model/resolve/{COMMIT}/config.json":
                held = FILES["config.json"]
                return self.answer(held, body, {"ETag": f'"{hashlib.sha1(held).hexdigest()}"', "X-Repo-Commit": COMMIT})
            self.answer(b"{}", body, {"X-Error-Code": "RepoNotFound"}, 404)

        def do_HEAD(self):
            self.do_GET(body=False)

        def answer(self, held, body, headers, status=200):
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(held))}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(held)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", asked
    server.shutdown()
    server.server_close()


def plan(name, address, home):
    words = [sys.executable, "-m", "ladder_residual", "plan", "--model", name]
    environment = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE" and "proxy" not in key.lower()}
    environment |= {"HF_ENDPOINT": address, "HF_HOME": str(home)}
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)


def test_a_plan_fetches_config_json_alone_and_needs_no_hub_afterwards(hub, tmp_path):
    address, asked = hub
    done = plan("someone/their-model", address, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "someone/their-model on" in done.stdout
    assert any(path.endswith("config.json") for path in asked)
    assert not any("safetensors" in path for path in asked)
    offline = plan("someone/their-model", "http://127.0.0.1:9", tmp_path)
    assert (offline.returncode, offline.stdout) == (0, done.stdout)


def test_a_model_that_the_hub_does_not_have(hub, tmp_path):
    done = plan("someone/thier-model", hub[0], tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: someone/thier-model is neither a local directory nor a model on the hub that you may read"
    )
    assert len(done.stderr.splitlines()) == 1


def test_a_hub_that_cannot_be_reached(tmp_path):
    done = plan("someone/their-model", "http://127.0.0.1:9", tmp_path)
    assert done.returncode == 2
    assert "the hub cannot be reached (127.0.0.1: Connection refused): give the path of a directory" in done.stderr
    assert len(done.stderr.splitlines()) == 1
