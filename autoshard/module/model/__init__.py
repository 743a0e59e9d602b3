"""The model behind a sharded module: submodules, state, and what users see of them."""
