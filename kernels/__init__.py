"""One folder per op: the contract in `__init__.py`, the obvious torch version in `reference.py`. Importing is cheap."""
