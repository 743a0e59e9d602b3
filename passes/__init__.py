"""The compiler's passes: capture → propagate → redistribute → lower → codegen."""

if __name__ != "autoshard.passes":  # what it defines would exist twice
    raise ImportError(f"{__file__} is autoshard.passes: import it by this name")
