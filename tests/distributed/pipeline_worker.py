"""One rank of a gloo world that runs steps in pipeline stages; started by test_pipeline_gloo.py."""

import torch.distributed as dist
from harness import ideal
from pipeline_cases import CASES
from training_worker import main

MESHES = {2: {"pp": 2}, 4: {"pp": 2, "tp": 2}}

if __name__ == "__main__":
    main({name: lambda case=case: case(ideal(MESHES[dist.get_world_size()])) for name, case in CASES.items()})
