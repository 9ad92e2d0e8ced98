"""The session stream of an engine's scheduler: steps in, answers out."""
