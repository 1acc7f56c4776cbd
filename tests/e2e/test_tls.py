"""A service whose frontends answer by TLS, as the launcher starts it: both ports, probes, clients, drain."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest

from tests.authority import Authority, needs_openssl
from tests.e2e.service import MODEL, ROOT, launch

pytestmark = [pytest.mark.service, needs_openssl]


def test_the_launcher_and_clients_speak_tls(checkpoint: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.sign("service")
    environment = {
        "TESSERA_TLS_CERT": str(cert),
        "TESSERA_TLS_KEY": str(authority.encrypt(key, "open sesame")),
        "TESSERA_TLS_KEY_PASSWORD": "open sesame",
    }
    with launch(
        "agg.sh", checkpoint, tmp_path / "log", workers=1, frontends=2, environment=environment
    ) as running:
        url, *own = (plain.replace("http:", "https:") for plain in (running.url, *running.frontend_urls))
        assert f"ready at {url}" in running.log.read_text()
        with httpx.Client(verify=authority.client, timeout=60) as http:
            for each in (url, *own):
                health = http.get(f"{each}/health").json()
                assert (health["status"], health["frontends"]) == ("ready", 2)
            client = openai.OpenAI(
                base_url=f"{url}/v1",
                api_key="none",
                http_client=openai.DefaultHttpxClient(verify=authority.client),
            )
            with client:
                assert len(client.embeddings.create(model=MODEL, input=["a", "b"]).data) == 2
            check = [sys.executable, str(ROOT / "deploy/docker/healthcheck"), f"{url}/live"]
            subprocess.run(check, check=True, timeout=180)
            with pytest.raises(httpx.TransportError):
                httpx.get(f"{running.url}/live")
            # With a connection that is open and idle, whose client looks at it no more.
            running.script.send_signal(signal.SIGINT)
            running.script.wait(timeout=60)
        assert "open sesame" not in running.log.read_text()
