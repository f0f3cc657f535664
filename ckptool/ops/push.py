"""A Hugging Face folder into a repository of the Hub, in one commit."""

from __future__ import annotations

import contextlib
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptool.core.plan import Result
from ckptool.errors import AccessError, NotFoundError, StorageError, TargetExistsError, UsageError
from ckptool.formats.hf_folder import HfSource, is_weight_file
from ckptool.ops.model_card import CARD_NAME, Origin, make_card
from ckptool.storage.files import Place
from ckptool.storage.hub_calls import LOG_IN, asked, hub_calls, is_offline, status_of
from ckptool.storage.place import files_below, local_path

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
MAIN = "main"


@dataclass(frozen=True)
class PushTarget:
    """Where to push to, as a person says it. `private` is about a repository that is made."""

    repo: str
    branch: str = MAIN
    private: bool = False
    message: str = ""


@dataclass(frozen=True)
class _Found:
    """A repository before the push. `head` is the branch's commit, "" where there is no such branch yet."""

    is_there: bool
    head: str
    files: tuple[str, ...]


class Push:
    """A push that was looked into: nothing is in its way. `upload` carries it out."""

    def __init__(
        self, target: PushTarget, *, overwrite: bool = False, origin: Origin | None = None, show_progress: bool = False
    ) -> None:
        """Raises UsageError, AccessError, and TargetExistsError when there are weights that may not be overwritten."""
        self.target = target
        self._origin = origin
        self._show_progress = show_progress
        self.commit = ""
        if not _REPO_ID.fullmatch(target.repo):
            raise UsageError(
                f"{target.repo!r} is no repository of the Hub", hint="write USER/NAME or ORGANISATION/NAME"
            )
        if is_offline():
            raise UsageError("HF_HUB_OFFLINE is set, so nothing can be pushed", hint="unset it")
        self._found = _look(target)
        self._check_rights()
        weights = [name for name in self._found.files if is_weight_file(name)]
        if weights and not overwrite:
            raise TargetExistsError(
                f"{target.repo} already has weights on its branch {target.branch}",
                hint="push to another one with --branch, or replace them with --overwrite (the history keeps them)",
            )
        #: In a line, what `upload` does.
        self.plan = self._describe(weights)

    @property
    def url(self) -> str:
        from huggingface_hub import constants

        branch = "" if self.target.branch == MAIN else f"/tree/{self.target.branch}"
        return f"{constants.ENDPOINT}/{self.target.repo}{branch}"

    def _describe(self, weights: Sequence[str]) -> str:
        repo, branch = self.target.repo, self.target.branch
        if not self._found.is_there:
            return f"a new repository {repo} on the Hub, {'private' if self.target.private else 'public'}"
        if not self._found.head:
            return f"a new branch {branch} of {repo} on the Hub"
        old = sum(not name.endswith(".json") for name in weights)
        return f"a commit on {branch} of {repo} on the Hub" + (
            f" in the place of {old} files of weights" if old else ""
        )

    def upload(self, folder: Path) -> None:
        """Bring up what is not there yet, then make it visible in one commit; the old weights go in the same commit.

        Raises StorageError, AccessError. Files that came up before an error are not sent again by the next attempt.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

        repo, branch = self.target.repo, self.target.branch
        names = list(files_below(folder))
        with hub_calls(repo, branch, self._show_progress), _without_warnings():
            api = HfApi()
            head = self._found.head or self._make_branch(api)
            card = make_card(repo, folder, self._origin, self._present_card(head))
            additions = [CommitOperationAdd(name, str(folder / name)) for name in names if name != CARD_NAME]
            stale = [name for name in self._found.files if is_weight_file(name) and name not in names]
            operations: list[Any] = [
                *additions,
                CommitOperationAdd(CARD_NAME, card.encode()),
                *(CommitOperationDelete(name) for name in stale),
            ]
            message = self.target.message or self._message()
            try:
                done = api.create_commit(repo, operations, commit_message=message, revision=branch, parent_commit=head)
                self.commit = done.oid
            except Exception as error:
                self.commit = self._committed_after_all(api, error, head, additions)

    def _message(self) -> str:
        if self._origin is None:
            return "Upload model"
        step = f", step {self._origin.step:,}" if self._origin.step else ""
        return f"Upload {self._origin.checkpoint}{step}"

    def _check_rights(self) -> None:
        """Refuse now what the Hub would refuse after the work is done."""
        from huggingface_hub import HfApi, get_token

        repo = self.target.repo
        if get_token() is None:
            raise AccessError(f"pushing to {repo} needs a Hub token with write access", hint=LOG_IN)
        me = asked(repo, None, lambda: HfApi().whoami())
        if me.get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise AccessError(f"the Hub token can only read, and pushing to {repo} writes", hint=LOG_IN)
        spaces = [str(me.get("name")), *(str(org.get("name")) for org in me.get("orgs", []))]
        if not self._found.is_there and repo.partition("/")[0] not in spaces:
            raise AccessError(
                f"there is no repository {repo} that you can see, and it can't be made: you are {spaces[0]}",
                hint=f"push to {spaces[0]}/{repo.partition('/')[2]}, or ask to be let into the organisation",
            )

    def _make_branch(self, api: Any) -> str:
        """The repository, the branch, or both; returns the commit that the push goes on from."""
        repo, branch = self.target.repo, self.target.branch
        if not self._found.is_there:
            api.create_repo(repo, private=self.target.private, exist_ok=True)
        if branch != MAIN:
            api.create_branch(repo, branch=branch, exist_ok=True)
        info = api.model_info(repo, revision=branch)
        self._found = _Found(True, str(info.sha), _names(info))
        return self._found.head

    def _present_card(self, head: str) -> str | None:
        """The card that the branch has; None without one. One that the Hub made with the repository is empty."""
        if CARD_NAME not in self._found.files:
            return None
        from huggingface_hub import hf_hub_download

        path = hf_hub_download(self.target.repo, CARD_NAME, revision=head)
        return Path(path).read_text(encoding="utf-8", errors="replace")

    def _committed_after_all(self, api: Any, error: Exception, head: str, additions: list[Any]) -> str:
        """The commit, when it was made and only its answer got lost; else the error is raised."""
        if status_of(error) == 412:
            raise StorageError(
                f"something else was pushed to {self.target.repo} meanwhile", hint="look at it, then try again"
            ) from None
        if status_of(error) is not None:
            raise error
        info = api.model_info(self.target.repo, revision=self.target.branch, files_metadata=True)
        large = {file.rfilename: file.lfs.sha256 for file in info.siblings if file.lfs}
        weights = [
            add for add in additions if is_weight_file(add.path_in_repo) and not add.path_in_repo.endswith(".json")
        ]
        ours = {add.path_in_repo: add.upload_info.sha256.hex() for add in weights}
        if info.sha == head or not ours.items() <= large.items():
            raise error
        return str(info.sha)


def push(
    folder: Place,
    repo: str,
    *,
    branch: str = MAIN,
    private: bool = False,
    message: str = "",
    overwrite: bool = False,
    dry_run: bool = False,
    show_progress: bool = False,
) -> Result:
    """Push the model in a Hugging Face folder to the Hub repository `repo`, in one commit on `branch`.

    A repository or branch that is not there is made; weights that are there are only replaced with `overwrite`. The
    folder's README.md is its card. Raises a CkptoolError when the folder is not whole, besides what `Push` raises.
    """
    start = time.monotonic()
    local = local_path(folder, "pushing")
    if not local.is_dir():
        raise NotFoundError(f"no such folder: {local}", hint="ckptool export --to hf --push exports and pushes")
    with contextlib.closing(HfSource(local)) as source:
        num_bytes = source.manifest.num_bytes
    pushing = Push(PushTarget(repo, branch, private, message), overwrite=overwrite, show_progress=show_progress)
    if not dry_run:
        pushing.upload(local)
    details = {"num_bytes": num_bytes, **push_details(pushing)}
    notes = (pushing.plan,) if dry_run else ()
    return Result("push", pushing.url, None, not dry_run, time.monotonic() - start, notes, details=details)


def push_details(pushing: Push | None) -> dict[str, Any]:
    """What `--json` says of a push, if there is one; `commit` is "" before it is made."""
    if pushing is None:
        return {"push": None}
    target, plan = pushing.target, pushing.plan
    what = {"repo": target.repo, "branch": target.branch, "url": pushing.url, "plan": plan, "commit": pushing.commit}
    return {"push": what}


def _look(target: PushTarget) -> _Found:
    from huggingface_hub import HfApi, errors

    repo, branch = target.repo, target.branch

    def info(revision: str | None) -> Any:
        try:
            return HfApi().model_info(repo, revision=revision)
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
            if isinstance(error, errors.GatedRepoError):
                raise
            return None

    there = asked(repo, None, lambda: info(None))
    if there is None:
        return _Found(False, "", ())
    if target.private and not there.private:
        raise UsageError(f"{repo} is there and public, and --private is about new ones", hint="see its settings")
    found = asked(repo, branch, lambda: info(branch))
    return _Found(True, str(found.sha) if found else "", _names(found) if found else ())


def _names(info: Any) -> tuple[str, ...]:
    return tuple(sibling.rfilename for sibling in info.siblings or [])


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """The library warns of what it thinks of a card's metadata, and of deleting and adding in one commit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
