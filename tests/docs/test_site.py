"""The documentation site: it builds strictly, loads nothing from elsewhere, and works in a browser, also on a phone."""

from __future__ import annotations

import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

import ladder_residual
from tests.docs.pages import ROOT

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PHONE = 400
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("mkdocs", path=Path(sys.executable).parent) is None, reason="no mkdocs"),
]

# Opens every page as wide as a phone, then searches; posts what it saw, and every error, to the server it came from.
PROBE = """<!doctype html><iframe id="page" width="%(width)d" height="800" style="border: 0"></iframe>
<script>
const page = document.getElementById("page"), seen = {widths: {}, errors: [], found: []};
const sleep = ms => new Promise(done => setTimeout(done, ms));
setInterval(() => {  // before the page's own scripts, if we are quick; a script error is an event in any case
  const view = page.contentWindow;
  if (!view || view.watched || view.location.href === "about:blank") return;
  view.watched = true;
  const say = words => seen.errors.push(view.location.pathname + ": " + words);
  view.addEventListener("error", event => say(event.message || event.target.src || event.target.href), true);
  view.console.error = (...words) => say(words.join(" "));
}, 1);
const open = uri => new Promise(done => { page.onload = done; page.src = uri; });
(async () => {
  for (const uri of %(pages)s) {
    await open(uri); await sleep(100);
    seen.widths[uri] = page.contentDocument.documentElement.scrollWidth;
  }
  await open("/?q=all-reduce");
  for (let waited = 0; waited < 20000 && !seen.found.length; waited += 100) {
    await sleep(100);
    seen.found = [...page.contentDocument.querySelectorAll(".md-search-result__link")].map(link => link.getAttribute("href"));
  }
  await fetch("/seen", {method: "POST", body: JSON.stringify(seen)});
})();
</script>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(words, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_nothing_is_loaded_from_elsewhere(site):
    for file in site.rglob("*.html"):
        for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", file.read_text(encoding="utf-8")):
            assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", tag), (file, tag)


def test_the_reference_is_that_of_the_code(site):
    commands = (site / "reference" / "cli" / "index.html").read_text(encoding="utf-8")
    for name in ("ladder generate", "ladder bench overlap", "--max-new-tokens", "--calibration-tokens"):
        assert name in commands
    functions = (site / "reference" / "python" / "index.html").read_text(encoding="utf-8")
    for name in ladder_residual.__all__:
        if not name.startswith("_"):
            assert re.search(rf'<h3 id="ladder_residual\.[a-z._]+\.{name}"', functions), name


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_the_site_works_in_a_browser(site, tmp_path):
    pages = ["/" + file.parent.relative_to(site).as_posix().removeprefix(".") + "/" for file in site.rglob("index.html")]
    pages = [uri.replace("//", "/") for uri in pages]
    assert len(pages) > 30
    (site / "probe.html").write_text(PROBE % {"width": PHONE, "pages": json.dumps(pages)}, encoding="utf-8")
    seen: dict = {}
    posted = threading.Event()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.update(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()
            posted.set()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--remote-debugging-port=0",
        ]
        words = [CHROMIUM, *options, f"--user-data-dir={tmp_path}", f"http://127.0.0.1:{server.server_port}/probe.html"]
        browser = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            assert posted.wait(180), "the browser has not answered"
        finally:
            os.killpg(browser.pid, signal.SIGTERM)
            browser.wait(20)
            server.shutdown()
    assert seen["errors"] == []
    assert {uri: width for uri, width in seen["widths"].items() if width > PHONE} == {}
    assert set(seen["widths"]) == set(pages)
    # A section that has "all-reduce" and no other word that begins with "reduce".
    assert any(link.endswith("#one-all-reduce-each-way") for link in seen["found"]), seen["found"]
