"""What surrounds the choices of an answer.

Owns an answer's identity, its usage, and JSON on one line. Does not own choices (`shapes`). Surprising rule: the model
of an answer is the canonical served name, whichever alias the client used.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class Envelope:
    """One answer: its id, its creation (Unix s), the model's name, and the tokens of its prompts, each counted once."""

    id: str
    created: int
    model: str
    prompt_tokens: int

    def fields(self, object_name: str) -> dict[str, object]:
        """The leading fields of the JSON object."""
        return {"id": self.id, "object": object_name, "created": self.created, "model": self.model}

    def usage(self, completion_tokens: int) -> dict[str, object]:
        """`usage`: the tokens of all choices together, a final eos or stop token among them."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
        }


def json_line(value: object) -> bytes:
    """JSON on one line for every reader: some split lines at U+0085, U+2028 and U+2029, which JSON may hold."""
    line = msgspec.json.encode(value)
    if b"\xe2\x80" in line or b"\xc2\x85" in line:
        line = line.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
        line = line.replace(b"\xc2\x85", b"\\u0085")
    return line
