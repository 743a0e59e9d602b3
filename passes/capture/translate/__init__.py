"""Translation of an exported fx program into a graph, and graph rewrites; fx types end here."""
