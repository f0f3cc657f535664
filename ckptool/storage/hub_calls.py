"""Calls of the Hugging Face Hub through huggingface_hub: its many errors as ours, without the URLs in its own words."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ckptool.errors import AccessError, CkptoolError, NotFoundError, StorageError
from ckptool.storage.store import retried

Value = TypeVar("Value")

LOG_IN = "`hf auth login`, or set HF_TOKEN"


@contextmanager
def hub_calls(repo: str, revision: str | None = None, show_progress: bool = False) -> Iterator[None]:
    """Calls about a repository, whose errors become one of ours. Nothing is tried again.

    The library's warnings are kept quiet meanwhile: they name the URLs of its requests, and those of uploads and
    downloads are signed.
    """
    with _quiet(show_progress):
        try:
            yield
        except Exception as error:
            if explained := final_error(error, repo, revision) or _other_error(error, repo, revision):
                raise explained from None
            raise


def asked(repo: str, revision: str | None, call: Callable[[], Value], show_progress: bool = False) -> Value:
    """The answer to one call about a repository; what another attempt may put right is tried again."""

    def attempt() -> Value:
        with _quiet(show_progress):
            try:
                return call()
            except Exception as error:
                if final := final_error(error, repo, revision):
                    raise final from None
                raise

    return retried(attempt, f"hf://{repo}")


def is_offline() -> bool:
    """True when HF_HUB_OFFLINE says that only the cache is to be used."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def final_error(error: BaseException, repo: str, revision: str | None = None) -> CkptoolError | None:
    """One of our errors for what another attempt doesn't change; None for anything else."""
    from huggingface_hub import constants, errors

    if isinstance(error, CkptoolError):
        return error
    at = f" at revision {revision}" if revision else ""
    status = status_of(error)
    if isinstance(error, errors.GatedRepoError):
        return AccessError(
            f"{repo} is gated: its owner grants access on request",
            hint=f"ask for access at {constants.ENDPOINT}/{repo}, then {LOG_IN}",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return NotFoundError(f"{repo} has no revision {revision!r}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return NotFoundError(
            f"{repo} is neither a local path nor a Hub repository that you can see",
            hint=f"check the spelling; for a private repository {LOG_IN} first",
        )
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return NotFoundError(f"{repo}{at} lacks a file that was asked for")
    is_local = isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled)
    if is_local and status is None:
        return NotFoundError(
            f"{repo}{at} is not in the local Hub cache, and the Hub can't be reached",
            hint="go online once (unset HF_HUB_OFFLINE), with --local-cache, or give a local folder",
        )
    if isinstance(error, errors.HFValidationError):
        return NotFoundError(f"{repo} is neither a local path nor a valid Hub repository id")
    if status == 401:
        return AccessError(f"the Hub does not accept your token for {repo}", hint=f"{LOG_IN} anew")
    if status == 403:
        return AccessError(f"your token may not do this with {repo}", hint=f"check the token's rights; {LOG_IN}")
    return None


def status_of(error: BaseException) -> int | None:
    """The HTTP status of the Hub's answer, also where the library raises another error from it."""
    found = getattr(getattr(error, "response", None), "status_code", None)
    return found if found is not None or error.__cause__ is None else status_of(error.__cause__)


def _other_error(error: Exception, repo: str, revision: str | None) -> CkptoolError | None:
    """For what failed although it might have worked; None for what has nothing to do with the network."""
    at = f" at revision {revision}" if revision else ""
    if (status := status_of(error)) is not None:
        return StorageError(f"the Hub answered {status} for {repo}{at}", hint="try again later")
    # The HTTP library under huggingface_hub differs between versions; its connection errors share these names.
    names = {name for cause in _causes(error) for name in (base.__name__ for base in type(cause).__mro__)}
    if names & {"ConnectionError", "TimeoutError", "TransportError", "RequestException"}:
        return StorageError(
            f"can't reach the Hub for {repo}",
            hint="check the network; with HF_HUB_OFFLINE=1 what is in the cache is used",
        )
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


@contextmanager
def _quiet(show_progress: bool = False) -> Iterator[None]:
    """Without the library's warnings; with its progress bars only where they are wanted, and on a terminal."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    hide = not (show_progress and sys.stderr.isatty()) and not are_progress_bars_disabled()
    logger.setLevel(logging.ERROR)
    if hide:
        disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if hide:
            enable_progress_bars()
