"""The sequence of lowering passes: from chosen layouts to a program on local tensors."""

from __future__ import annotations

from autoshard.passes.ir.assignment import Assignment
from autoshard.passes.ir.program import Program
from autoshard.passes.lower.blocks import hoisted
from autoshard.passes.lower.bucket import bucket
from autoshard.passes.lower.channels import channels_last
from autoshard.passes.lower.counted import counted
from autoshard.passes.lower.freed import freed
from autoshard.passes.lower.in_place import in_place
from autoshard.passes.lower.lowering import lower
from autoshard.passes.lower.parts import parted
from autoshard.passes.lower.precision import in_precision
from autoshard.passes.lower.tables import tables_together
from autoshard.passes.lower.together import together
from autoshard.passes.lower.travelling import travelling


def lowered(assignment: Assignment) -> Program:
    """The program of an assignment: redistributions are statements, merged where possible."""
    program = lower(assignment.graph, assignment)
    program = counted(program)
    program = in_precision(program)
    program = travelling(program)
    program = tables_together(program)
    program = together(program)
    program = hoisted(program)
    program = bucket(program)
    program = in_place(program)
    program = channels_last(program)
    program = parted(program)
    return freed(program)
