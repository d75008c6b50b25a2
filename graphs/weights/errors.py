"""The one error of reading a model.

Owns `ModelError`, raised by everything between `--model` and a model in memory. Surprising rule: its message is for the
user alone; it names the file or field at fault and what to do instead.
"""

from __future__ import annotations


class ModelError(ValueError):
    """The model cannot be found, read or served; the message says what is wrong and how to mend it."""
