"""A tiny head on tiny texts: training, chains, counting, texts and the file."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from safetensors import safe_open

from flare.graphs.frames import Sampling
from flare.graphs.memory.pages import PAGE_TOKENS, KvPages
from flare.graphs.models.draft import EMBEDDING, HeadSource, load_draft_head
from flare.graphs.programs.decoder import Decoder, Span
from tests.graphs.programs_driver import Tensors
from tests.tiny_models import tiny_config, tiny_tensors
from tools.draft import work
from tools.draft.head import DraftHead, DraftWeights
from tools.draft.judge import acceptance, rounds_of
from tools.draft.learner import Learner, Plan, first_head, most_used
from tools.draft.optimizer import orthogonal
from tools.draft.prompts import asked_prompts, drawn_prompts, held_out_prompts, kept_questions
from tools.draft.texts import SHARD_TEXTS, Order, Text, Writer, load_texts, save_texts, shard_path, write_shards
from tools.draft.unroll import Batch, Target, unroll
from tools.draft.work import OutOfTime, Work

CONFIG = tiny_config(tie_embeddings=True)
SOURCE = Tensors({name: torch.ones_like(t) if "norm" in name else t / 3 for name, t in tiny_tensors(CONFIG).items()})
"""Norms of one, so that logits differ by a few nats."""

PLAN = Plan(steps=6, batch=60, vocabulary=64, depths=(1.0, 0.5, 0.5), chains=0.5, warmup=2)


FOLLOWS = torch.randperm(100, generator=torch.Generator().manual_seed(4))
"""The language of the texts: what follows each token."""


def written(seed: int, length: int, prompt: int) -> Text:
    """A greedy text, and residuals that say what comes next, not very clearly."""
    chance = torch.Generator().manual_seed(seed)
    tokens = [seed]
    while len(tokens) < length:
        tokens.append(int(FOLLOWS[tokens[-1]]))
    told = SOURCE.tensor(EMBEDDING)[tokens[1:]]
    residual = told + 0.05 * torch.randn(told.shape, generator=chance)
    return Text(torch.tensor(tokens, dtype=torch.int32), residual.half(), prompt, 0.0, seed)


TEXTS = [written(seed, 20 + 3 * seed, 5 + seed % 3) for seed in range(6)]


def learner(plan: Plan = PLAN) -> Learner:
    """A training at its beginning."""
    head = first_head(CONFIG, SOURCE, most_used(TEXTS, 128, CONFIG.vocab), TEXTS, plan.seed)
    return Learner(plan, head, Target(SOURCE, head), TEXTS)


def same_weights(one: Learner, other: Learner) -> bool:
    mine, theirs = one.head.weights.parts(), other.head.weights.parts()
    return all(torch.equal(mine[part], theirs[part]) for part in mine)


@pytest.fixture(scope="module")
def trained() -> Learner:
    """A training that was never interrupted."""
    made = learner()
    for _ in range(PLAN.steps):
        made.advance()
    return made


def test_training_goes_on_bit_for_bit(tmp_path: Path, trained: Learner) -> None:
    begun = learner()
    for _ in range(3):
        begun.advance()
    begun.save(tmp_path / "training.pt")
    resumed = learner()
    resumed.resume(tmp_path / "training.pt")
    while resumed.step < PLAN.steps:
        resumed.advance()
    assert same_weights(resumed, trained)
    assert not same_weights(begun, trained)


def test_a_checkpoint_is_of_its_plan_and_texts(tmp_path: Path, trained: Learner) -> None:
    trained.save(tmp_path / "training.pt")
    for other in (Plan(steps=7), Plan(steps=6, seed=2)):
        with pytest.raises(ValueError, match="remove it"):
            learner(other).resume(tmp_path / "training.pt")


def test_the_first_head_knows_what_a_line_can_tell() -> None:
    head = first_head(CONFIG, SOURCE, most_used(TEXTS, 128, CONFIG.vocab), TEXTS, 1)
    assert acceptance(head, Target(SOURCE, head), TEXTS, 2, 2).rates == (1.0, 1.0)


def test_a_head_learns_from_nothing() -> None:
    made = learner(Plan(steps=30, batch=60, vocabulary=64, depths=(1.0, 0.5)))
    with torch.no_grad():
        made.head.weights.fc.normal_(0, 0.05, generator=torch.Generator().manual_seed(3))
    assert acceptance(made.head, made.target, TEXTS, 2, 2).mean < 0.2
    for _ in range(made.plan.steps):
        made.advance()
    found = acceptance(made.head, made.target, TEXTS, 2, 2)
    assert found.rates[0] > 0.9 and found.rates[1] > 0.9


def test_a_chain_gives_what_the_runtime_gives(trained: Learner) -> None:
    """Guess by guess, each of a context of its own, through the paged decoder that serves the head."""
    head = replace(trained.head, weights=DraftWeights(**halves(trained.head)))
    with torch.no_grad():
        batch = Batch.of(TEXTS[:3], 3)
        guesses = list(unroll(head, trained.target, batch, 3))
        decoder, pages = served(head), torch.arange(2)
        for text, first in zip(batch.texts, batch.first, strict=False):
            tokens = text.tokens.long()
            for begin in range(text.prompt - 1, len(tokens) - 4):
                kv = KvPages.allocate(decoder.config, 2, torch.float32)
                span = Span(0, begin + 1, 0, pages[: begin // PAGE_TOKENS + 1])
                hidden = text.residual[: begin + 1].float()
                given = decoder.residual(tokens[1 : begin + 2], [span], kv, hidden)[-1:]
                for guess in guesses:
                    row = (guess.row == first + begin).nonzero()[0, 0]
                    torch.testing.assert_close(guess.given[row], given[0], rtol=1e-4, atol=1e-4)
                    assert guess.token[row] == tokens[begin + guess.depth + 1]
                    at = begin + guess.depth
                    span = Span(0, 1, at, pages[: at // PAGE_TOKENS + 1])
                    given = decoder.residual(tokens[at + 1 : at + 2], [span], kv, given)


def halves(head: DraftHead) -> dict[str, torch.Tensor]:
    """The weights as a file has them."""
    return {part: weight.detach().half().float() for part, weight in head.weights.parts().items()}


def served(head: DraftHead) -> Decoder:
    """The runtime's decoder of a head, in float32."""
    source = HeadSource(head.tensors(), SOURCE, EMBEDDING, head.kept)
    config = msgspec.structs.replace(CONFIG, layers=1, vocab=len(head.kept), tie_embeddings=False)
    return Decoder(config, source, 64, torch.float32, reads_hidden=True)


def test_the_file_loads(tmp_path: Path, trained: Learner) -> None:
    path = tmp_path / "heads" / "tiny.safetensors"
    trained.head.save(path, {"seed": "1"})
    draft = load_draft_head(path, CONFIG, SOURCE)
    loaded = DraftHead.of(draft, CONFIG)
    expected = halves(trained.head)
    assert all(torch.equal(weight, expected[part]) for part, weight in loaded.weights.parts().items())
    assert torch.equal(loaded.kept, trained.head.kept) and draft.reads_hidden
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_bytes_are_near(trained: Learner) -> None:
    plain, rounded = trained.head.weights.parts(), trained.head.in_bytes().weights.parts()
    for part, weight in plain.items():
        difference = weight.detach() - rounded[part].detach()
        assert float(difference.abs().max()) <= float(weight.detach().abs().max()) / 250


def test_rounds_begin_where_the_one_before_ended() -> None:
    assert list(rounds_of([2, 0, 1, 0, 0])) == [2, 0, 0]
    assert list(rounds_of([0, 1, 1])) == [0, 1]


def test_muon_makes_matrices_orthogonal() -> None:
    for shape in ((16, 48), (48, 16)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape, generator=torch.Generator().manual_seed(1))))
        assert float(values.min()) > 0.6 and float(values.max()) < 1.3


def test_the_kept_tokens_are_the_most_used() -> None:
    text = Text(torch.tensor([9, 9, 9, 7, 7, 5, 4], dtype=torch.int32), torch.zeros(6, 2), 3, 0.0, 0)
    assert most_used([text], 2, 10).tolist() == [4, 7]
    assert most_used([text], 5, 10).tolist() == [0, 1, 4, 5, 7]
    assert most_used([text], 5, 3).tolist() == [0, 1, 2]


def test_no_prompt_comes_twice_nor_is_held_out() -> None:
    drawn = list(itertools.islice(drawn_prompts(3), 3000))
    held_out = held_out_prompts()
    assert drawn == list(itertools.islice(drawn_prompts(3), 3000))
    assert len(set(drawn)) == 3000 and len(set(held_out)) == len(held_out) == 100
    assert not set(drawn) & set(held_out)
    assert not [turn for prompt in drawn for _, turn in prompt if "{topic}" in turn or "{person}" in turn]


def orders(count: int) -> list[Order]:
    """Prompts of several lengths, greedy and drawn in turn."""
    settings = [Sampling(temperature=i % 2 / 1.0, seed=i) for i in range(count)]
    return [Order(i, tuple(range(1, 4 + i % 5)), setting) for i, setting in enumerate(settings)]


def test_texts_are_written_again_the_same(tmp_path: Path) -> None:
    count = SHARD_TEXTS
    done: list[int] = []
    for folder, lanes in (("whole", 3), ("resumed", 4)):
        writer = Writer(CONFIG, SOURCE, (2,), lanes, 6)
        if folder == "resumed":
            write_shards(writer, tmp_path / folder, orders(count), lambda: len(done) > 20, lambda: done.append(1))
            assert not list((tmp_path / folder).glob("*.safetensors"))
        write_shards(writer, tmp_path / folder, orders(count), lambda: False, lambda: None)
        writer.close()
    whole, resumed = (load_texts(shard_path(tmp_path / folder, 0)) for folder in ("whole", "resumed"))
    assert len(whole) == len(resumed) == SHARD_TEXTS
    for one, other in zip(whole, resumed, strict=True):
        assert torch.equal(one.tokens, other.tokens) and torch.equal(one.residual, other.residual)
        assert len(one.tokens) - one.prompt == 6 or one.tokens[-1] == 2


def test_asked_questions_are_read_as_they_were_written() -> None:
    (held,) = held_out_prompts()[0]
    written = [" Why not?\nTell me. ", "Why not?\nTell me.", "?!", held[1], "How is a\u2028line broken?"]
    assert kept_questions(written) == ["Why not?\\nTell me.", "How is a\u2028line broken?"]
    asked = asked_prompts()
    assert len(asked) == len(set(asked)) and not set(asked) & set(held_out_prompts())
    assert any("\n" in content for ((_, content),) in asked) and all(len(turns) == 1 for turns in asked)


def test_a_slice_that_is_over_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "open_model", lambda *_: SimpleNamespace(config=CONFIG, weights=SOURCE))

    def call(minutes: float) -> Work:
        return Work(tmp_path, minutes, torch.get_num_threads())

    with pytest.raises(ValueError, match="there are no texts"):
        call(60).train(PLAN)
    for folder in (*work.WRITTEN, "held-out-0.0", "held-out-0.7"):
        (tmp_path / folder).mkdir()
        save_texts(tmp_path / folder / "texts-00000.safetensors", TEXTS)
    with pytest.raises(OutOfTime):
        call(0).train(PLAN)
    with pytest.raises(ValueError, match="step 1 of 6; train first"):
        call(60).deliver(PLAN, tmp_path / "head.safetensors")
    call(60).train(PLAN)
    call(60).deliver(PLAN, tmp_path / "head.safetensors")
    with safe_open(tmp_path / "head.safetensors", framework="pt") as file:
        facts = file.metadata()
    assert facts["steps"] == "6" and facts["model"].endswith(".gguf") and "temperature 0.7" in facts["held_out"]
