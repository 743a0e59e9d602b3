"""Every error a user can meet. Each message says what, where, with which shapes, and what to do."""


class AutoshardError(Exception):
    """Base class of all errors raised on purpose by autoshard."""


class MeshError(AutoshardError, ValueError):
    """The mesh is malformed or does not fit the ranks that run."""


class LayoutError(AutoshardError, ValueError):
    """A placement or layout is malformed, or does not fit the tensor."""


class HintError(AutoshardError, ValueError):
    """A hint names nothing, or asks for something that cannot be met."""


class CaptureError(AutoshardError, RuntimeError):
    """The model cannot be captured without changing what it computes."""


class RuleError(AutoshardError, ValueError):
    """A sharding rule is malformed, missing (``strict=True``) or wrong."""


class PlanError(AutoshardError, RuntimeError):
    """No plan satisfies the constraints, or a given plan does not fit the model."""


class RuntimeMismatchError(AutoshardError, RuntimeError):
    """Ranks disagree on something they must agree on."""


class CommunicationError(AutoshardError, RuntimeError):
    """A collective cannot end: another rank failed, is gone, or does not come."""


class InitialiseError(AutoshardError, RuntimeError):
    """A model's initialisation cannot be recorded, or not be replayed."""
