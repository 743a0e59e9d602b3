"""What was decided: the plan, how it is described, how it is reported."""
