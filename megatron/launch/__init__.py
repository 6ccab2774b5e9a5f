"""Who am I and whom do I start: ranks and addresses from the environment, launcher commands. Imports no torch."""
