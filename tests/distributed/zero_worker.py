"""One rank of a gloo world that trains under stages of ZeRO; started by test_zero_gloo.py."""

import prefetch_cases
import zero_cases
from training_worker import main

if __name__ == "__main__":
    main(zero_cases.CASES | prefetch_cases.CASES)
