"""One rank of a gloo world that runs steps of several micro-batches; started by test_microbatches_gloo.py."""

from microbatch_cases import CASES
from training_worker import main, mesh

if __name__ == "__main__":
    main({name: lambda case=case: case(mesh()) for name, case in CASES.items()})
