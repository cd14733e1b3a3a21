"""Options that several commands share. Light: `handoff --help` loads this."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SecretFile = Annotated[
    Path | None,
    typer.Option(
        envvar="HANDOFF_SECRET_FILE",
        exists=True,
        dir_okay=False,
        help="File with the workers' shared secret; or set HANDOFF_SECRET.",
    ),
]
