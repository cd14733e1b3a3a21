"""The official client for Node: a stream and an error, in a script of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration.clients.caches import client_cache
from tests.support.cluster import Cluster

VERSION = "7.59.0"
SCRIPT = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "any", maxRetries: 0 });
const messages = [{ role: "user", content: "hi" }];
const options = { model: "tiny", messages, max_tokens: 6, temperature: 0 };
const whole = await client.chat.completions.create(options);
let text = "";
let usage = null;
const stream = { ...options, stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create(stream)) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
let error = null;
try {
  await client.chat.completions.create({ ...options, model: "other" });
} catch (e) {
  error = { status: e.status, code: e.code, kind: e.constructor.name };
}
const asked = { model: "tiny", input: "hi", max_output_tokens: 6, temperature: 0 };
const response = await client.responses.create(asked);
console.log(JSON.stringify({
  whole: whole.choices[0].message.content, text, error,
  tokens: usage.completion_tokens, response: response.output_text,
}));
"""


@pytest.fixture(scope="module")
def package() -> Path:
    """A folder with the client in it, installed once."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    folder = client_cache(f"openai-node-{VERSION}")
    if not (folder / "node_modules" / "openai").is_dir():
        command = [
            "npm",
            "install",
            "--silent",
            "--no-audit",
            "--no-fund",
            "--prefix",
            str(folder),
            f"openai@{VERSION}",
        ]
        installed = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        if installed.returncode != 0:
            pytest.skip(f"npm cannot install the client: {installed.stderr.strip()[-200:]}")
    return folder


def test_streams_and_errors_are_understood(pd: Cluster, package: Path) -> None:
    """`for await` over a stream, the usage chunk, a status with its code, the newer API."""
    script = package / "check.mjs"
    script.write_text(SCRIPT)
    done = subprocess.run(
        ["node", str(script), f"{pd.url}/v1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=package,
    )

    assert 0 == done.returncode, done.stderr
    told = json.loads(done.stdout)
    assert told["whole"] == told["text"] == told["response"]
    assert 6 == told["tokens"]
    assert {"status": 404, "code": "model_not_found", "kind": "NotFoundError"} == told["error"]
