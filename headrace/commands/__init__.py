"""One module per command; each imports what it needs when it runs, so that `headrace --help` stays quick."""
