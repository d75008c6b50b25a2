"""What is handed to a device, and what comes back.

Owns the frozen records of the device boundary: `Frame` in, `Completion` out. No torch here: the simulated device
imports this. Surprising rule: a frame carries a request's sampling settings and page table only once, in the `binding`
of its first frame; from then on they are device state of the slot, so that decode queued behind decode needs nothing
from the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flare.machines.graph import GraphShape
from flare.machines.ids import Fence, PageId, RequestHandle
from flare.machines.request import EndReason, ImageWindow


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn, all inside the program. Randomness depends on (seed, position) only.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `seed` is in [0, 2**63). `logit_bias` is
    added to raw logits. Penalties need `History` with every frame.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def penalised(self) -> bool:
        """Whether drawing depends on what the row has seen, so that each frame must carry a `History`."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True)
class Binding:
    """The device state of a fresh generation.

    `pages` holds the pages for its prompt and all tokens that it may still produce, in order. `stop_tokens` end the row
    on the device (eos among them, unless ignored). `output_limit` tokens end it by length. `logprobs`: number of
    alternatives to report beside each sampled token (0: the sampled token alone; None: nothing);
    `prompt_logprobs` likewise for scored prefill. `initialize`, `windows` and `spans` are those of
    `RequestSpec`: the row must be initialized first, where images are read, and what one chunk consumes whole.
    """

    pages: tuple[PageId, ...]
    sampling: Sampling
    stop_tokens: tuple[int, ...]
    output_limit: int
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    initialize: bool = False
    windows: tuple[ImageWindow, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class History:
    """What only the host knows of a row: distinct token ids seen, int32[n]; how often each was output,
    int32[n] (0: in the prompt alone); and token ids that may not be drawn for the next `banned_for` tokens (eos under
    `min_tokens`)."""

    token_ids: NDArray[np.int32]
    output_counts: NDArray[np.int32]
    banned: tuple[int, ...] = ()
    banned_for: int = 1


@dataclass(frozen=True, slots=True)
class StageInput:
    """What a state operation does for a row, beyond its kind.

    `retires`: the row is over here once a snapshot is done; with a `state_row`, so that it can be resumed elsewhere.
    `state_row` is where a snapshot puts the row's exact state, or what a restore or resume takes it from and leaves
    empty; None where no state row is involved. A terminal snapshot with one moves the row there, to be resumed.
    `operation` is the index of an image operation within its window. `tokens` int32[n] are the prompt tokens whose
    state a restore without a state row brings back from the cache.
    """

    state_row: int | None = None
    operation: int = 0
    tokens: NDArray[np.int32] | None = None
    retires: bool = False


@dataclass(frozen=True, slots=True)
class LaneInput:
    """One request in a frame.

    Prompt lane: `tokens` int32[n] are consumed from position `start`, and the last of the prompt (`emits`) samples the
    first output token. `target` is the token that follows the chunk (scored prefill of a chunk that is not the last
    scores it); None at the end of the prompt. Decode lane: `tokens` is None, and the row's pending token is read from
    device state; `width` target positions are verified, the pending token among them (1 without speculation), at most
    where the program allocates rows; `proposals` int32[n <= width - 1] are given to a program of copies.
    Lane of a stage: `stage` says what is to be done with the row's state, and `start` is the prompt position where the
    row stands: 0 before a prefix is restored, that of the saved state where a state row is restored or resumed.
    """

    handle: RequestHandle
    start: int
    emits: bool
    tokens: NDArray[np.int32] | None = None
    target: int | None = None
    binding: Binding | None = None
    history: History | None = None
    width: int = 1
    proposals: NDArray[np.int32] | None = None
    stage: StageInput | None = None


@dataclass(frozen=True, slots=True)
class Frame:
    """One replay of a prepared graph over `lanes` (at most `shape.batch` of them). `allocates`: it shares out its
    target rows itself, below the widths of the lanes."""

    fence: Fence
    shape: GraphShape
    lanes: tuple[LaneInput, ...]
    allocates: bool = False


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Natural-log probability of one token under the raw logits, and the best alternatives, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class LaneResult:
    """What a frame did for one lane.

    `committed` counts the context tokens of the row after this frame: prompt tokens consumed plus output tokens drawn
    (the pending one included). `tokens` are the output tokens drawn; a stop token is among them. `ended` says that the
    row ended with them. `scores` line up with `tokens`; None where nothing was asked or drawn. So a decode row that had
    already ended returns an unchanged counter, no tokens, and None for `ended` and `scores`. `prompt_scores` line up
    with positions start+1 .. start+n of a scored chunk (the first prompt token has no score; the last chunk has no
    score beyond the prompt). `verified` counts the target positions of a decode lane; `survival` has the products of
    min(1, p/q) of its verified prefixes, where the program draws by rejection.
    """

    handle: RequestHandle
    committed: int
    tokens: tuple[int, ...] = ()
    ended: EndReason | None = None
    scores: tuple[TokenScore, ...] | None = None
    prompt_scores: tuple[TokenScore, ...] | None = None
    verified: int = 0
    survival: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A frame that ended. `device_ns` is the program's own time (0: not measured). `error` None means success; else
    `results` is empty and the frame changed nothing that a later frame of other requests reads. `lost`: the device has
    died of it, and will run no other.

    `confidence` float32[2, request_slots, draft_capacity] comes from a program that proposes: plane 0 the conditional
    probability of each proposal, plane 1 the joint one of each prefix (docs/scheduling.md, "Confidence")."""

    fence: Fence
    device_ns: int
    results: tuple[LaneResult, ...]
    error: str | None = None
    confidence: NDArray[np.float32] | None = None
    lost: bool = False
