"""An exported program and its inputs: names, pytrees, snapshots of attributes, symbolic shapes."""
