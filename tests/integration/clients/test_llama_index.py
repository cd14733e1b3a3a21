"""llama-index's client for servers like OpenAI's. It needs an older openai package, so it lives apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.integration.clients.caches import client_cache
from tests.support.cluster import Cluster

PACKAGE = "llama-index-llms-openai-like==0.8.1"
SCRIPT = """
import json, sys
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

def model(is_chat_model):
    return OpenAILike(model="tiny", api_base=sys.argv[1], api_key="any", is_chat_model=is_chat_model,
                      context_window=4096, max_tokens=6, temperature=0, max_retries=0)

hi = [ChatMessage(role="user", content="hi")]
print(json.dumps({
    "chat": model(True).chat(hi).message.content,
    "chat_streamed": "".join(r.delta or "" for r in model(True).stream_chat(hi)),
    "complete": model(False).complete("Once upon").text,
    "complete_streamed": "".join(r.delta or "" for r in model(False).stream_complete("Once upon")),
}))
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_chat_and_completions_whole_and_streamed(pd: Cluster) -> None:
    """Both endpoints, by the calls that its pipelines make."""
    folder = client_cache(PACKAGE.replace("==", "-"))
    if not (folder / "llama_index").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), PACKAGE]
        installed = subprocess.run(command, capture_output=True, text=True, timeout=360, check=False)
        if installed.returncode != 0:
            pytest.skip(f"pip cannot install {PACKAGE}: {installed.stderr.strip()[-200:]}")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, f"{pd.url}/v1"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": str(folder), "NO_PROXY": "127.0.0.1"},
    )

    assert 0 == done.returncode, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["chat"] == told["chat_streamed"]
    assert told["complete"] == told["complete_streamed"]
    assert told["chat"]
    assert told["complete"]
