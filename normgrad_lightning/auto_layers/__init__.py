"""Which layers `"auto"` takes: seen at work, placed in the graph, chosen."""
