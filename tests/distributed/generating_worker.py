"""One rank of a gloo world that makes tokens; started by test_generating_gloo.py."""

from functools import partial

from checks import main
from generating_models import MESHES, MODELS, as_one_device, every_way

if __name__ == "__main__":
    steps = {"tp4": 24, "dp2tp2": 24}  # four ranks
    cases = {
        f"{name}-{mesh}": partial(as_one_device, name, mesh, steps.get(mesh, 64)) for name in MODELS for mesh in MESHES
    }
    main({**cases, "every_way": every_way})
