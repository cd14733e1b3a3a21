"""`python -m tests.fuzz TARGET SECONDS`: feed a target what a coverage-guided fuzzer makes of a right input.

Exit status 0 if nothing was found. The corpus stays under build/fuzz, and the next run goes on from it; what was
found lies beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["shared.kv"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    """Never returns: the fuzzer ends the process."""
    name, seconds = sys.argv[1], int(sys.argv[2])
    target, seed = TARGETS[name]
    corpus = Path("build") / "fuzz" / name
    corpus.mkdir(parents=True, exist_ok=True)
    (corpus / "right").write_bytes(seed)
    options = [f"-max_total_time={seconds}", "-max_len=8192", "-timeout=10", "-rss_limit_mb=2048"]
    atheris.Setup([sys.argv[0], *options, f"-artifact_prefix={corpus}.found-", str(corpus)], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
