"""`python -m bench.replay`: traces of real services against the policies and the index, in virtual time."""
