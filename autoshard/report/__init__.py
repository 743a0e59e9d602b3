"""Records of plans, and reports on them in numbers and words; pictures are in ``viz``."""
