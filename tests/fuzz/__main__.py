"""`python -m tests.fuzz TARGET SECONDS`: feed a target what a coverage-guided fuzzer makes of a right input.

Exit status 0 if nothing was found. A finding is kept beside the corpus, which is thrown away at the end.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["shared.kv"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    """Never returns: the fuzzer ends the process."""
    name, seconds = sys.argv[1], int(sys.argv[2])
    target, seed = TARGETS[name]
    corpus = Path(tempfile.mkdtemp(prefix=f"handoff-fuzz-{name}-"))
    (corpus / "right").write_bytes(seed)
    options = [f"-max_total_time={seconds}", "-max_len=8192", "-timeout=10", "-rss_limit_mb=2048"]
    atheris.Setup([sys.argv[0], *options, f"-artifact_prefix={corpus}/found-", str(corpus)], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
