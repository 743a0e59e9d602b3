"""Retries of a failed trace, with other answers to questions about tensor values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autoshard.errors import CaptureError
from autoshard.passes.capture.answers.questions import Exported
from autoshard.passes.capture.exported.attributes import WrittenError
from autoshard.passes.capture.refusals.explain import is_data_dependent


@dataclass(frozen=True)
class Retry:
    """A fallback for a failed trace."""

    applies: Callable[[CaptureError], bool]
    """whether it may help against the first trace's error"""
    export: Callable[[], Exported | None]
    """traces; None: no program"""
    says: str
    """prefix of its error message"""


def tried(first: Callable[[], Exported], *retries: Retry) -> Exported:
    """The program of ``first``, else of the first of ``retries`` that applies and succeeds."""
    try:
        return first()
    except WrittenError:
        raise
    except CaptureError as error:
        failed = error
    for retry in retries:
        try:
            found = retry.export() if retry.applies(failed) else None
        except CaptureError as error:
            if str(error) == str(failed):
                continue
            raise CaptureError(f"{failed}\n{retry.says}: {error}") from error
        if found is not None:
            return found
    raise failed


def asks(error: CaptureError) -> bool:
    """Whether ``error`` arose from a question about a tensor's value."""
    return is_data_dependent(error.__cause__ or error)
