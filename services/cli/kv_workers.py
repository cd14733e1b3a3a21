"""The commands of `handoff kv` that talk to workers: save and replay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli.kv_answer import Answer
from services.cli.kv_blob import BlobCheck, NoBlob, check_blob
from services.cli.kv_replay import CannotReplay, Replay
from services.cli.kv_save import save_handoff
from services.cli.kv_tables import verify_line
from services.cli.kv_text import megabytes, one_line
from services.cli.options import SecretFile
from services.cli.workers import WorkerProblem, secret_of
from shared.asgi.text import is_internal_id
from shared.models.error import ModelError
from shared.wire import Finish, Sent

Timeout = Annotated[
    float, typer.Option("--timeout", min=0.1, max=3600, help="Seconds a worker may be silent.")
]


def save(
    request: Annotated[str, typer.Argument(help="The answer's X-Request-Id.")],
    url: Annotated[str, typer.Option(help="The prefill worker that computed it, http://host:port.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write it. [default: REQUEST.safetensors]")
    ] = None,
    secret_file: SecretFile = None,
    timeout_s: Timeout = 30.0,
) -> None:
    """Fetch a hand-off that a prefill worker has kept: it does if HANDOFF_KV_SAVE_DIR is set there.

    The file holds KV and token ids of the whole prompt, also when only its last part travelled.
    """
    if not is_internal_id(request):
        raise typer.BadParameter("this is no request id")
    secret = secret_of(secret_file)
    target = output or Path(f"{request}.safetensors")
    try:
        check = save_handoff(url, secret, request, target, timeout_s)
    except (WorkerProblem, NoBlob) as exc:
        raise _failed(str(exc)) from exc
    except OSError as exc:
        raise _failed(f"{one_line(target)}: {exc.strerror}") from exc
    typer.echo(verify_line(target, check))


def replay(
    file: Annotated[Path, typer.Argument(help="A file that `handoff kv save` wrote.")],
    url: Annotated[str, typer.Option(help="Any decode worker of the same model, http://host:port.")],
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=2, max=1_000_000, help="Tokens of each choice, the first included. [default: as asked then]"
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model whose tokenizer makes text of the ids. [default: the file's, if it is here]"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object per line, as it comes.")] = False,
    secret_file: SecretFile = None,
    timeout_s: Timeout = 60.0,
) -> None:
    """Send a saved hand-off to a decode worker and tell what it decodes. The worker checks it like any other."""
    secret = secret_of(secret_file)
    try:
        check = check_blob(file)
        prepared = Replay.of(file, check)
        if prepared.saved.kv_wire is not None:
            wire = prepared.saved.kv_wire
            typer.echo(
                f"handoff: this KV travelled as {wire}; the replay sends it exact: tokens may differ",
                err=True,
            )
        answer = Answer(prepared.saved, prepared.first, model)
        _tell(as_json, {"first": answer.first_as_json()}, _first_line(check, prepared))
        for event in prepared.run(url, secret, max_tokens=max_tokens, timeout_s=timeout_s):
            if isinstance(event, Sent):
                _tell(as_json, {"sent": event.model_dump()}, _sent_line(event, prepared))
                if not as_json:
                    typer.echo(answer.begin(), nl=False)
            elif isinstance(event, Finish):
                _tell(as_json, answer.as_json() | {"finish": event.model_dump()}, answer.end(event))
            else:
                news = answer.add(event)
                _tell(
                    as_json,
                    {"tokens": [token.model_dump(exclude_none=True) for token in event]},
                    news,
                    nl=False,
                )
    except (NoBlob, CannotReplay, ModelError) as exc:
        raise _failed(f"{one_line(file)}: {exc}") from exc
    except WorkerProblem as exc:
        if not as_json:
            typer.echo()
        raise _failed(str(exc)) from exc


def _tell(as_json: bool, content: dict[str, Any], text: str, *, nl: bool = True) -> None:
    typer.echo(json.dumps(content) if as_json else text, nl=as_json or nl)


def _first_line(check: BlobCheck, replay: Replay) -> str:
    work = replay.saved.work
    kv = megabytes(check.layout.kv_bytes)
    return f"{work.request_id}: {len(work.token_ids)} tokens, {kv} of KV by {replay.saved.worker}"


def _sent_line(sent: Sent, replay: Replay) -> str:
    total = replay.layout.kv_bytes
    held = f"; decode held {megabytes(total - sent.kv_bytes)} of it already" if sent.kv_bytes < total else ""
    return f"sent {megabytes(sent.kv_bytes)} over {sent.transport} in {sent.transfer_s * 1e3:.1f} ms{held}\n"


def _failed(line: str) -> typer.Exit:
    typer.echo(f"handoff: {line}", err=True)
    return typer.Exit(1)
