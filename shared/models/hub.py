"""Checkpoints of the Hugging Face hub, in the hub's own cache. Its exceptions end here.

A repository that is cached whole is used as it is: no request, no revision check.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from tqdm.auto import tqdm

from shared.models.ending import ends_after_signal
from shared.models.error import ModelError
from shared.models.files import SMALL_FILES, WEIGHT_FILES, missing_files
from shared.models.store import Report

_CONNECT_WITHIN_S = 10.0


def is_offline() -> bool:
    """Whether the user forbids network use (HF_HUB_OFFLINE)."""
    return constants.is_offline_mode()


def cached_repository(repo_id: str, *, weights: bool) -> Path | None:
    """The cached snapshot of `repo_id` if every needed file is in it. Uses no network."""
    try:
        folder = Path(snapshot_download(repo_id, local_files_only=True, allow_patterns=_patterns(weights)))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return None if missing_files(folder, weights=weights) else folder


def hub_answers(within_s: float) -> bool:
    """Whether the hub answers an HTTP request in time.

    In a thread of its own, because no time-out covers a name look-up that hangs.
    """
    if is_offline():
        return False
    answered = threading.Event()
    done = threading.Event()

    def ask() -> None:
        try:
            httpx2.head(constants.ENDPOINT, timeout=within_s)
            answered.set()
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError):
            pass  # the answer is no
        finally:
            done.set()

    threading.Thread(target=ask, name="hub-probe", daemon=True).start()
    done.wait(within_s)
    return answered.is_set()


def fetch_repository(repo_id: str, *, weights: bool, report: Report) -> Path:
    """The newest snapshot of `repo_id`, downloaded where it is not cached. Raises ModelError."""
    if is_offline():
        raise ModelError(f"{repo_id} is not in the hub's cache, and HF_HUB_OFFLINE forbids to download it")
    if not hub_answers(_CONNECT_WITHIN_S):
        raise ModelError(f"{repo_id} is neither a local folder nor cached, and the hub does not answer")
    report(f"downloading {repo_id} from the hub")
    try:
        with ends_after_signal():
            folder = Path(
                snapshot_download(
                    repo_id,
                    allow_patterns=_patterns(weights),
                    tqdm_class=_progress(repo_id, report),
                )
            )
    except GatedRepoError as exc:
        raise ModelError(f"{repo_id} is gated on the hub: accept its terms there and set HF_TOKEN") from exc
    except (RepositoryNotFoundError, HFValidationError) as exc:
        raise ModelError(f"{repo_id} is neither a local folder nor a repository on the hub") from exc
    except (HfHubHTTPError, httpx2.HTTPError, OSError) as exc:
        reason = next(iter(str(exc).splitlines()), type(exc).__name__)
        raise ModelError(f"cannot download {repo_id} from the hub: {reason}") from exc
    if missing := missing_files(folder, weights=weights):
        raise ModelError(f"{repo_id} on the hub lacks {', '.join(missing)}")
    return folder


def _patterns(weights: bool) -> list[str]:
    return [*SMALL_FILES, *WEIGHT_FILES] if weights else list(SMALL_FILES)


def _progress(repo_id: str, report: Report) -> type[Any]:
    """A tqdm class that shows nothing itself and reports every tenth of the bytes."""

    class Progress(tqdm):  # type: ignore[type-arg,misc,unused-ignore]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **(kwargs | {"disable": True}))
            self._unit = kwargs.get("unit")
            self._got = 0.0

        def update(self, n: float | None = 1) -> None:
            self._got += n or 0
            if self._unit == "B" and self.total:
                tell(self._got / self.total, self.total)

    told = 0

    def tell(share: float, total_bytes: float) -> None:
        nonlocal told
        if (tenth := int(10 * share)) > told:
            told = tenth
            report(f"downloading {repo_id} from the hub, {tenth * 10} % of {total_bytes / 1e9:.1f} GB")

    return Progress
