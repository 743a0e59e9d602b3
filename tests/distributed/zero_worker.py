"""One rank of a gloo world that trains under stages of ZeRO; started by test_zero_gloo.py."""

from training_worker import main
from zero_cases import CASES

if __name__ == "__main__":
    main(CASES)
