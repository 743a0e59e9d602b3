"""How plans come about: what is wished, a program described, a plan followed, the stages of a pipeline."""
