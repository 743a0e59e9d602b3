"""The compiler's passes: capture → propagate → redistribute → lower → codegen, each a function of frozen data."""
