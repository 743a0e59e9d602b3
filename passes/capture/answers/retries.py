"""Other ways to a program where the plain trace fails: with other answers to what the model asks about values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autoshard.errors import CaptureError
from autoshard.passes.capture.answers.questions import Exported
from autoshard.passes.capture.exported.attributes import WrittenError
from autoshard.passes.capture.refusals.explain import is_data_dependent


@dataclass(frozen=True)
class Retry:
    """Another way to a program where those before it failed."""

    applies: Callable[[CaptureError], bool]
    """whether to the first one's error"""
    export: Callable[[], Exported | None]
    """None: it has nothing to offer"""
    says: str
    """what introduces its own error"""


def tried(first: Callable[[], Exported], *retries: Retry) -> Exported:
    """What ``first`` gives, or where it fails the first of ``retries`` that applies and offers something."""
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
    """Whether ``error`` came of a question about the value of a tensor."""
    return is_data_dependent(error.__cause__ or error)
