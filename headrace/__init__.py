"""The composition root: command line, assembly of nodes, embedded bus, model fetch."""
