"""Whole instances on the in-memory bus in virtual time, storms over them, and their replay."""
