"""The search for a layout of every definition and every use: a cost network and its prices."""
