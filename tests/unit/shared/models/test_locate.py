"""Models are found where the user means, with no more network than needed."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from huggingface_hub import constants

from shared.models.error import ModelError
from shared.models.hub import hub_answers
from shared.models.locate import AUTO, DEFAULT_REPOSITORY, Located, find, forget_auto, locate
from shared.models.offline import offline_model
from shared.models.prepare import ensure_checkpoint, ensure_tokenizer, model_name
from tests.support.fake_hub import COMMIT, FakeHub, fake_hub
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_model import build_tiny_model


@pytest.fixture(autouse=True)
def _own_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty hub cache, and a hub that refuses connections unless a test starts one."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that has the default repository."""
    with fake_hub(DEFAULT_REPOSITORY, build_tiny_model(tmp_path / "upstream")) as hub:
        files = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        yield hub


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any name look-up or connection fails the test."""

    def refuse(*args: object) -> NoReturn:
        pytest.fail(f"network used: {args}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def _put_offline_model(cache: Path, tmp_path: Path) -> Path:
    """Put a small file where the offline model lies once it is fetched."""
    path = cache / offline_model().entry
    path.parent.mkdir(parents=True)
    return write_gguf(build_tiny_model(tmp_path / "offline"), path)


@pytest.mark.usefixtures("no_network")
def test_a_local_folder_or_file_needs_no_network(tmp_path: Path) -> None:
    """Paths are resolved with zero name look-ups, relative ones too."""
    folder = build_tiny_model(tmp_path / "tiny")
    path = write_gguf(folder, tmp_path / "tiny-q8.gguf")
    assert Located("tiny", folder) == locate(str(folder), tmp_path / "cache", print)
    assert Located("tiny-q8", path) == locate(str(path), tmp_path / "cache", print)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("./nowhere", "is neither a folder, nor a .gguf file, nor the id of a hub model"),
        ("/nowhere/x.gguf", "cannot read /nowhere/x.gguf: No such file"),
        ("a b", "is neither a folder"),
        ("", "no model is named"),
        ("{}/empty", "is no checkpoint folder: config.json, tokenizer.json, model.safetensors is missing"),
        ("{}/text", "is neither a checkpoint folder nor a GGUF file"),
        ("{}/text.gguf", "is neither a checkpoint folder nor a GGUF file"),
    ],
)
def test_what_is_no_model_is_one_clear_line(tmp_path: Path, model: str, says: str) -> None:
    """Wrong paths and other files are told apart, without network."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("text")
    (tmp_path / "text.gguf").write_text("text")
    with pytest.raises(ModelError) as caught:
        locate(model.format(tmp_path), tmp_path / "cache", print)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_hub_model_is_downloaded_once_and_then_used_without_network(
    tmp_path: Path, hub: FakeHub, request: pytest.FixtureRequest
) -> None:
    """The first start downloads; the next finds it in the hub's cache and asks nobody."""
    told: list[str] = []
    first = locate(DEFAULT_REPOSITORY, tmp_path / "cache", told.append)
    weights = (hub.folder / "model.safetensors").read_bytes()
    assert weights == (first.path / "model.safetensors").read_bytes()
    assert f"downloading {DEFAULT_REPOSITORY} from the hub" == told[0]
    request.getfixturevalue("no_network")
    assert first == locate(DEFAULT_REPOSITORY, tmp_path / "cache", print)
    folder = ensure_checkpoint(DEFAULT_REPOSITORY, "float32", tmp_path / "cache", print)
    assert (COMMIT, DEFAULT_REPOSITORY) == (folder.name, model_name(folder))


def test_the_router_downloads_only_small_files(tmp_path: Path, hub: FakeHub) -> None:
    """Without weights no weights are asked for; a worker that comes later gets the rest."""
    folder = ensure_tokenizer(DEFAULT_REPOSITORY, tmp_path / "cache", print)
    assert not any("safetensors" in path for path in hub.requests)
    assert (folder / "tokenizer.json").is_file()
    assert find(DEFAULT_REPOSITORY, tmp_path / "cache") is None
    assert folder == ensure_checkpoint(DEFAULT_REPOSITORY, "float32", tmp_path / "cache", print)


def test_a_repository_that_is_not_there_is_one_clear_line(tmp_path: Path, hub: FakeHub) -> None:
    """The hub's answer "not found" is told as such."""
    with pytest.raises(
        ModelError, match=r"^nobody/nothing is neither a local folder nor a repository on the hub$"
    ):
        locate("nobody/nothing", tmp_path / "cache", print)


def test_a_failed_download_is_one_clear_line(tmp_path: Path, hub: FakeHub) -> None:
    """A hub that lists a repository and refuses its files leaves no model that could be found later."""
    hub.refuses_files = True
    with pytest.raises(ModelError, match=r"^cannot download [^\n]*$"):
        locate(DEFAULT_REPOSITORY, tmp_path / "cache", print)
    assert find(DEFAULT_REPOSITORY, tmp_path / "cache") is None


@pytest.mark.usefixtures("no_network")
def test_offline_and_not_cached_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HF_HUB_OFFLINE is obeyed and named."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ModelError, match=r"^a/b is not in the hub's cache, and HF_HUB_OFFLINE forbids [^\n]*$"
    ):
        locate("a/b", tmp_path / "cache", print)


def test_an_unreachable_hub_is_one_clear_line(tmp_path: Path) -> None:
    """A hub that refuses connections is told in one line that names the model."""
    with pytest.raises(
        ModelError, match=r"^a/b is neither a local folder nor cached, and the hub does not answer$"
    ):
        locate("a/b", tmp_path / "cache", print)


def test_a_silent_hub_does_not_hold_up_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that accepts connections and says nothing counts as no answer when the time is up."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert not hub_answers(0.2)


def test_auto_takes_the_hub_model_when_the_hub_answers(tmp_path: Path, hub: FakeHub) -> None:
    """Both sides agree: a router that asks for the tokenizer gets the same model."""
    located = locate(AUTO, tmp_path / "cache", print)
    assert DEFAULT_REPOSITORY == located.name
    assert located.path == ensure_tokenizer(AUTO, tmp_path / "cache", print)


def test_auto_keeps_its_choice(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Without a hub the offline model is used, and from then on without asking, until `auto` is to choose anew."""
    cache = tmp_path / "cache"
    path = _put_offline_model(cache, tmp_path)
    assert find(AUTO, cache) is None
    told: list[str] = []
    assert Located(offline_model().name, path) == locate(AUTO, cache, told.append)
    assert [f"the hub cannot be reached; the offline model {offline_model().name} is used"] == told
    hub = request.getfixturevalue("hub")
    assert path == locate(AUTO, cache, print).path
    assert [] == hub.requests
    forget_auto(cache)
    assert DEFAULT_REPOSITORY == locate(AUTO, cache, print).name


def test_auto_falls_back_when_the_download_fails(tmp_path: Path, hub: FakeHub) -> None:
    """A hub that answers and then fails is as good as none; the reason is told."""
    hub.refuses_files = True
    path = _put_offline_model(tmp_path / "cache", tmp_path)
    told: list[str] = []
    assert path == locate(AUTO, tmp_path / "cache", told.append).path
    assert any(line.startswith(f"cannot download {DEFAULT_REPOSITORY}") for line in told)


@pytest.mark.usefixtures("no_network")
def test_a_choice_whose_model_is_gone_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the chosen file was deleted, `auto` looks again instead of failing for ever."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "auto.json").write_text(json.dumps({"model": DEFAULT_REPOSITORY}))
    assert find(AUTO, cache) is None
    path = _put_offline_model(cache, tmp_path)
    assert path == locate(AUTO, cache, print).path
