"""HiGHS in a process in which another library solved something first."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import highspy, numpy as np
from autoshard.passes.search.exact.milp import highs_solver, run_highs, solve_core

def knapsack(highs):
    for worth in (3.0, 4.0, 5.0):
        highs.addVar(0.0, 1.0)
    for column, worth in enumerate((3.0, 4.0, 5.0)):
        highs.changeColCost(column, -worth)
        highs.changeColIntegrality(column, highspy.HighsVarType.kInteger)
    highs.addRow(0.0, 3.5, 3, np.arange(3), np.array([1.0, 2.0, 2.5]))
    return highs

other = knapsack(highspy.Highs())
other.setOptionValue("threads", 2)
other.setOptionValue("output_flag", False)
print(other.run() == highspy.HighsStatus.kOk, end=" ")
print(knapsack(highs_solver()).run() == highspy.HighsStatus.kError, end=" ")  # so it is run as follows
mine = knapsack(highs_solver())
run_highs(mine)
print(mine.getInfo().objective_function_value, end=" ")
print(solve_core([((0,), np.array([2.0, 1.0])), ((0, 1), np.array([[0.0, 3.0], [4.0, 2.0]]))], [2, 2]).exact)
"""


@pytest.mark.slow
def test_after_a_solver_of_another_number_of_threads() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True True -8.0 True"
