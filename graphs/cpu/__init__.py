"""The CPU device: programs on one worker thread."""
