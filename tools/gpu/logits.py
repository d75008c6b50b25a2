"""Logits of every program against float32 on the CPU, and greedy texts against references.

Owns the frames that make a device tell its log-probabilities, and the comparison. Does not own tolerances' reasons
beyond what is said here. Surprising rule: each row draws one token over and over, forced by a bias that scores do not
see; so both devices go through the same contexts, however near a tie their logits come.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from flare.graphs.cuda.device import CudaDevice
from flare.graphs.cuda.plan import DType
from flare.graphs.frames import Completion, Sampling, TokenScore
from flare.machines.graph import GraphKind, GraphShape, Source, rectangular

from .models import OpenRuntime, Subject, on_cpu, on_gpu
from .player import Player, Text, playing, prompt_of
from .report import Finding

REFERENCES = Path(__file__).resolve().parents[2] / "tests" / "data" / "smollm2_135m_q4_1_greedy.json"

PROMPT = GraphShape(GraphKind.PREFILL, 1, 64)
PROGRAMS = (
    PROMPT,
    GraphShape(GraphKind.PREFILL, 4, 128),
    GraphShape(GraphKind.SCORED_PREFILL, 1, 64),
    GraphShape(GraphKind.MIXED, 4, 64, 2),
    *(GraphShape(GraphKind.DECODE, batch) for batch in (1, 2, 4)),
    *(rectangular(GraphKind.SPECULATIVE, 4, width, source=Source.COPY) for width in (2, 4)),
)
DRAFTED = (
    *(rectangular(GraphKind.SPECULATIVE, 4, width) for width in (1, 3)),
    rectangular(GraphKind.MIXED, 4, 3, 64, 1),
)
"""The same where something drafts."""

SCORES = 8
TURNS = 3
LIMITS: dict[DType, tuple[float, float]] = {"float32": (0.005, 0.0005), "bfloat16": (0.5, 0.08)}
"""The most that log-probabilities may differ by, in nats: any of them, and all in the mean."""

NEAR_TIE: dict[DType, float] = {"float32": 0.02, "bfloat16": 0.3}
"""A greedy text is compared to where the reference's two best logits come nearer than this."""


def programs_of(subject: Subject) -> tuple[GraphShape, ...]:
    """The graphs that show every program of a model."""
    return PROGRAMS if subject.draft is None else (*PROGRAMS, *DRAFTED)


def compare_logits(
    subject: Subject, open_runtime: OpenRuntime, dtypes: Sequence[DType], kind: type[CudaDevice] = CudaDevice
) -> Iterator[Finding]:
    """One row for each kind of program and type."""
    programs = programs_of(subject)
    with playing(on_cpu(subject), programs, subject.max_model_len) as player:
        wanted = scores_of(player, subject.config.vocab)
    for dtype in dtypes:
        device = on_gpu(subject, open_runtime(), programs, dtype, kind=kind)
        with playing(device, programs, subject.max_model_len) as player:
            given = scores_of(player, subject.config.vocab)
        for program, scores in wanted.items():
            yield _compared(f"{subject.name} {dtype} {program}", scores, given[program], *LIMITS[dtype])


def _compared(what: str, wanted: list[float], given: list[float], most: float, mean: float) -> Finding:
    if len(given) != len(wanted):
        return Finding("logits", what, f"{len(given)} scores", f"{len(wanted)} scores", ok=False)
    apart = [abs(one - other) for one, other in zip(wanted, given, strict=True)]
    worst, average = max(apart), sum(apart) / len(apart)
    value = f"worst {worst:.2g}, mean {average:.2g} nats of {len(apart)}"
    return Finding("logits", what, value, f"worst {most:g}, mean {mean:g}", worst <= most and average <= mean)


def scores_of(player: Player, vocab: int) -> dict[str, list[float]]:
    """What each of the player's graphs scores, by name."""
    return {shape.name: _SCENES[shape.kind](player, shape, vocab, at) for at, shape in enumerate(player.catalog)}


def _admit(player: Player, slot: int, tokens: int, seed: int, vocab: int, *, scored: bool = False) -> Text:
    seed = 64 * seed + slot
    forced = Sampling(temperature=0.0, logit_bias=((7 * seed % vocab, 100.0),))
    prompt = prompt_of(tokens, seed, vocab)
    return player.admit(
        slot, prompt, limit=32, sampling=forced, logprobs=SCORES, prompt_logprobs=SCORES if scored else None
    )


def _ready(player: Player, rows: int, seed: int, vocab: int) -> list[Text]:
    """Requests that have drawn their first token."""
    texts = [_admit(player, slot, 20 + 9 * slot, seed, vocab) for slot in range(rows)]
    player.read(texts, PROMPT)
    return texts


def _numbers(scores: Sequence[TokenScore]) -> Iterator[float]:
    for score in scores:
        yield score.logprob
        yield from (logprob for _, logprob in score.top)


def _told(completion: Completion, most: int | None = None) -> list[float]:
    """All scores of a frame; of each lane's tokens the first `most`."""
    numbers: list[float] = []
    for result in completion.results:
        numbers.extend(_numbers((result.scores or ())[:most]))
        numbers.extend(_numbers(result.prompt_scores or ()))
    return numbers


def _prompts(player: Player, shape: GraphShape, vocab: int, seed: int) -> list[float]:
    tokens = shape.prefill_tokens // shape.batch
    texts = [_admit(player, slot, tokens - slot, seed, vocab) for slot in range(shape.batch)]
    return _told(player.play(shape, [(text, text.chunk(tokens)) for text in texts]))


def _scored(player: Player, shape: GraphShape, vocab: int, seed: int) -> list[float]:
    """Two chunks, so that one reads what the other left."""
    text, numbers = _admit(player, 0, shape.prefill_tokens * 3 // 2, seed, vocab, scored=True), []
    while text.sent < len(text.prompt):
        numbers.extend(_told(player.play(shape, [(text, text.chunk(shape.prefill_tokens))])))
    return numbers


def _decoded(player: Player, shape: GraphShape, vocab: int, seed: int) -> list[float]:
    texts, numbers = _ready(player, shape.batch, seed, vocab), list[float]()
    for _ in range(TURNS):
        numbers.extend(_told(player.play(shape, [(text, text.turn()) for text in texts])))
    return numbers


def _rounds(player: Player, shape: GraphShape, vocab: int, seed: int) -> list[float]:
    """Copies of the forced token are all accepted. What a draft proposes is its own affair: the first token counts."""
    texts = _ready(player, shape.batch, seed, vocab)
    copies = shape.source is Source.COPY
    lanes = []
    for text in texts:
        proposals = [text.tokens[-1]] * (shape.width - 1) if copies else None
        lanes.append((text, text.turn(width=shape.width, proposals=proposals)))
    return _told(player.play(shape, lanes), None if copies else 1)


def _mixed(player: Player, shape: GraphShape, vocab: int, seed: int) -> list[float]:
    rows = shape.batch - shape.prompt_rows
    texts = _ready(player, rows, seed, vocab)
    tokens = shape.prefill_tokens // shape.prompt_rows
    fresh = [_admit(player, rows + at, tokens - at, seed, vocab) for at in range(shape.prompt_rows)]
    lanes = [(text, text.chunk(tokens)) for text in fresh] + [(text, text.turn(width=shape.width)) for text in texts]
    return _told(player.play(shape, lanes), 1)


_SCENES = {
    GraphKind.PREFILL: _prompts,
    GraphKind.SCORED_PREFILL: _scored,
    GraphKind.DECODE: _decoded,
    GraphKind.SPECULATIVE: _rounds,
    GraphKind.MIXED: _mixed,
}


def compare_texts(
    subject: Subject,
    open_runtime: OpenRuntime,
    dtypes: Sequence[DType],
    kind: type[CudaDevice] = CudaDevice,
    references: Path = REFERENCES,
) -> Iterator[Finding]:
    """Greedy texts, all at once, against `references`: those of the default model by another program in float32."""
    cases = json.loads(references.read_text(encoding="utf-8"))
    decode = GraphShape(GraphKind.DECODE, subject.slots)
    for dtype in dtypes:
        device = on_gpu(subject, open_runtime(), (PROMPT, decode), dtype, kind=kind)
        sure = {name: _sure(case, NEAR_TIE[dtype]) for name, case in cases.items()}
        wrong = []
        with playing(device, (PROMPT, decode), subject.max_model_len) as player:
            names = list(cases)
            texts = [
                player.admit(slot, cases[name]["ids"], limit=max(1, sure[name])) for slot, name in enumerate(names)
            ]
            player.read(texts, PROMPT)
            while running := [text for text in texts if not text.ended]:
                player.play(decode, [(text, text.turn()) for text in running])
        for name, text in zip(names, texts, strict=True):
            if text.tokens[: sure[name]] != cases[name]["out"][: sure[name]]:
                wrong.append(name)
        total = sum(sure[name] for name in names)
        value = f"{len(names) - len(wrong)} of {len(names)} texts, {total} tokens" + "".join(
            f"; not {n!r}" for n in wrong
        )
        yield Finding("greedy texts", f"{subject.name} {dtype}", value, "all", not wrong)


def _sure(case: dict[str, list[float]], near: float) -> int:
    """Tokens before the first near tie."""
    gaps = case["gaps"]
    return next((at for at, gap in enumerate(gaps) if gap < near), len(gaps))
