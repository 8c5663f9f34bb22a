"""Actors on a bus: everything that makes messages arrive, time pass and processes live. Never imports torch."""
