"""What users change between calls of a sharded module, each against the unsharded model: in one process and under gloo.

Every case takes a mesh of two ranks and raises where the two differ. Run by test_states.py and training_worker.py.
"""

from __future__ import annotations

import state_asked  # noqa: F401  each registers its cases
import state_attached  # noqa: F401
import state_cases_accumulation  # noqa: F401
import state_cases_home  # noqa: F401
import state_cases_inputs  # noqa: F401
import state_cases_outputs  # noqa: F401
import state_decided  # noqa: F401
import state_edits  # noqa: F401
import state_experts  # noqa: F401
import state_files  # noqa: F401
import state_flags  # noqa: F401
import state_functions  # noqa: F401
import state_generate  # noqa: F401
import state_inputs  # noqa: F401
import state_kept  # noqa: F401
import state_missing  # noqa: F401
import state_outside  # noqa: F401
import state_serving  # noqa: F401
import state_tensors  # noqa: F401
import state_torch  # noqa: F401
import state_written  # noqa: F401
from state_harness import CASES

__all__ = ["CASES"]
