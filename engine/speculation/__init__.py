"""Guessing ids ahead, so that one step may give a sequence several. What is guessed never changes what is said.

`drafter` says what a guesser is, `lookup` and `model` are two, `gate` decides who guesses and how far, `speculator`
puts them to work for the core.
"""
