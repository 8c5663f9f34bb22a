"""The engine: sequences, a pure scheduler, runners and the step loop. Synchronous; knows nothing of the bus."""
