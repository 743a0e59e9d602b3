"""From an exported fx program to the graph: names, canonical forms, regions. fx types end here."""
