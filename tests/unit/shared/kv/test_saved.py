"""Saved hand-offs: a blob that names its request, which the wire refuses."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from services.cli.kv_blob import NoBlob, check_blob
from shared.errors import ManifestMismatch
from shared.kv.manifest import Manifest, plan_chunks, token_hash
from shared.kv.saved import SavedLayout, SavedRequest, write_saved
from shared.kv.shape import KvShape
from shared.wire import Fingerprint, Sampling, Work
from tests.unit.shared.kv.blobs import Pool, decode, expected, first_tokens

SHAPE = KvShape(2, 1, 4, "F32")
TOKENS = list(range(10))
FINGERPRINT = Fingerprint(
    weights="w",
    config="c",
    tokenizer="t",
    dtype="float32",
    layout="l",
    rope="r",
    num_layers=2,
    num_kv_heads=1,
    head_dim=4,
)


def saved(token_ids: list[int]) -> tuple[SavedLayout, bytes]:
    """A file of ten tokens' KV whose request claims `token_ids`."""
    work = Work(
        request_id="r1",
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling=Sampling(max_tokens=4),
        timeout_s=1,
    )
    manifest = Manifest(
        fingerprint=FINGERPRINT.digest,
        handoff_id="h1",
        epoch=7,
        token_hash=token_hash(TOKENS),
        from_token=0,
        num_tokens=10,
        num_choices=1,
        shape=SHAPE,
        chunks=plan_chunks(0, 10, 4, SHAPE),
    )
    request = SavedRequest(work=work, model="m", worker="p0", fingerprint=FINGERPRINT, sent_from=3)
    layout, file = SavedLayout(manifest, request), io.BytesIO()
    write_saved(file, layout, Pool(SHAPE, num_tokens=10, seed=1).views(), first_tokens(1))
    return layout, file.getvalue()


def test_a_saved_file_is_sound_and_names_its_request(tmp_path: Path) -> None:
    """Every digest is right, the header's included, and the request is read back whole."""
    layout, content = saved(TOKENS)
    path = tmp_path / "saved"
    path.write_bytes(content)

    check = check_blob(path)

    assert (True, layout.request, layout.total_bytes) == (check.sound, check.saved, len(content))


def test_the_name_of_the_request_is_under_the_header_digest(tmp_path: Path) -> None:
    """A changed request is seen, also where it still reads well."""
    content = saved(TOKENS)[1]
    path = tmp_path / "saved"
    path.write_bytes(content.replace(b"p0", b"p1"))

    assert ("the header is damaged, or its digest is",) == check_blob(path).problems


def test_another_prompt_than_the_manifests_is_refused(tmp_path: Path) -> None:
    """KV of one prompt under the token ids of another is no saved hand-off."""
    path = tmp_path / "saved"
    path.write_bytes(saved([*TOKENS[:-1], 99])[1])

    with pytest.raises(NoBlob, match="not of the request that the file names: token_hash"):
        check_blob(path)


def test_the_wire_refuses_the_extra_field() -> None:
    """Token ids never travel with KV: a decode worker knows no such field."""
    with pytest.raises(ManifestMismatch, match="does not know"):
        decode(saved(TOKENS)[1], expected(num_tokens=10, shape=SHAPE), Pool(SHAPE, num_tokens=10))
