"""The simulated device: request rows, tokens and durations without a model, in virtual or in real time."""
