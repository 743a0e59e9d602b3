"""One rank of a gloo world that makes values again in the backward; started by test_again_gloo.py."""

from again_cases import CASES
from training_worker import main, mesh

if __name__ == "__main__":
    main({name: lambda case=case: case(mesh()) for name, case in CASES.items()})
