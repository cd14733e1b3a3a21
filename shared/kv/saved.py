"""A hand-off kept in a file: the blob of its whole prompt, and the request that it belongs to.

The safetensors file of the wire (shared.kv.layout) with two differences: it always begins at token 0, whatever part
of it travelled, and its metadata has one more field, `request`, which a manifest on the wire must not have. The
digest of the header covers that too. Whoever has the file has the prompt.
"""

from __future__ import annotations

from typing import BinaryIO

from pydantic import Field, ValidationError

from shared.errors import ManifestMismatch
from shared.kv.encoder import BlobEncoder
from shared.kv.header import header_fields
from shared.kv.layout import BlobLayout
from shared.kv.manifest import Manifest, token_hash
from shared.kv.progress import FirstTokens
from shared.kv.source import KvSource
from shared.wire import Count, Fingerprint, Wire, Work

REQUEST = "request"


class SavedRequest(Wire):
    """What a blob alone does not say, and a replay needs.

    worker: the prefill worker that computed the KV. sent_from: the first token whose KV travelled; decode held the
    ones before it. kv_wire: how it was quantised for that, if it was; the file's KV is exact.
    """

    work: Work
    model: str = Field(max_length=1024)
    worker: str = Field(max_length=128)
    fingerprint: Fingerprint
    sent_from: Count
    kv_wire: str | None = Field(default=None, max_length=32)


class SavedLayout(BlobLayout):
    """The layout of such a file. The manifest begins at token 0."""

    def __init__(self, manifest: Manifest, request: SavedRequest) -> None:
        super().__init__(manifest)
        self.request = request

    def metadata(self) -> dict[str, str]:
        """The manifest's fields, and `request`."""
        return self.manifest.to_metadata() | {REQUEST: self.request.to_json().decode()}


def write_saved(file: BinaryIO, layout: SavedLayout, source: KvSource, first: FirstTokens) -> None:
    """Write the whole file; memory as for a send. Raises OSError."""
    encoder = BlobEncoder(layout, source)
    file.writelines(encoder.header())
    for index in range(len(layout.manifest.chunks)):
        for batch in encoder.chunk(index):
            file.writelines(batch)
    file.write(encoder.trailer().of(first))


def parse_saved_header(
    content: bytes | bytearray,
) -> tuple[Manifest, dict[str, object], SavedRequest | None]:
    """As `shared.kv.header.parse_header`, and the request if the file names one.

    Raises also ManifestMismatch if that is no request, or not the one whose KV this is.
    """
    metadata, entries = header_fields(content)
    text = metadata.pop(REQUEST, None)
    manifest = Manifest.from_metadata(metadata)
    if text is None:
        return manifest, entries, None
    try:
        request = SavedRequest.model_validate_json(text if isinstance(text, str) else b"")
    except ValidationError as exc:
        raise ManifestMismatch("the request that the file names cannot be read") from exc
    work = request.work
    claims = {
        "token_hash": token_hash(work.token_ids) == manifest.token_hash,
        "num_tokens": len(work.token_ids) == manifest.num_tokens,
        "num_choices": work.num_choices == manifest.num_choices,
        "fingerprint": request.fingerprint.digest == manifest.fingerprint,
    }
    differing = [name for name, is_right in claims.items() if not is_right]
    if differing:
        raise ManifestMismatch(f"the KV is not of the request that the file names: {', '.join(differing)}")
    return manifest, entries, request
