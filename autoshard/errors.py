"""Errors for users. Each message says what failed, where, with which shapes, and what to do."""


class AutoshardError(Exception):
    """Base class of all errors that autoshard raises on purpose."""

    untraceable = False
    """whether there is no program for a call, so that the module may still run eagerly"""
    is_internal = False
    """whether the cause is an error of autoshard itself"""


class MeshError(AutoshardError, ValueError):
    """The mesh is malformed or does not fit the ranks that run."""


class LayoutError(AutoshardError, ValueError):
    """A placement or layout is malformed, or does not fit the tensor."""


class HintError(AutoshardError, ValueError):
    """A hint matches nothing, or cannot be met."""


class CaptureError(AutoshardError, RuntimeError):
    """The model cannot be captured without changing what it computes."""


class SharedStateError(CaptureError):
    """The model's tensors cannot be taken over: something outside, or a view, would keep the old ones."""


class RuleError(AutoshardError, ValueError):
    """A sharding rule is malformed, missing (``strict=True``) or wrong."""


class PlanError(AutoshardError, RuntimeError):
    """No plan satisfies the constraints, or a given plan does not fit the model."""


class BudgetError(PlanError):
    """No plan within the memory budget was found; ``peak``: the least peak found, bytes per rank."""

    def __init__(self, text: str, peak: float) -> None:
        super().__init__(text)
        self.peak = peak

    def __reduce__(self) -> tuple[type, tuple[str, float]]:
        return type(self), (str(self), self.peak)


class RuntimeMismatchError(AutoshardError, RuntimeError):
    """Ranks disagree on something they must agree on."""


class CommunicationError(AutoshardError, RuntimeError):
    """A collective cannot complete: another rank failed, exited, or does not arrive."""


class InitialiseError(AutoshardError, RuntimeError):
    """A model's initialisation cannot be recorded or replayed."""
