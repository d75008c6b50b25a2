"""The native program: a whole step in one call that holds no interpreter lock.

Owns the weights in their packed formats, the working memory, and the records of pointers that the C++ side reads
(native/step.cpp). Does not own state rows, buffers or pages; it borrows them. Surprising rule: the C++ side owns no
memory that a replay uses; all of it is torch tensors held here.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from ..memory.pages import PAGE_TOKENS, KvPages
from ..models.config import ModelConfig
from ..models.draft import EMBEDDING, EMBEDDING_NORM, FINAL_NORM, FUSE, HIDDEN_NORM, DraftModel
from ..models.rope import rotary_table
from ..models.source import WeightSource
from ..programs.buffers import StepBuffers
from ..programs.decoder import head_name, layer_names
from ..programs.rows import ALTERNATIVES_MAX, LOGIT_BIAS_MAX, STOP_TOKENS_MAX, WAITING_MAX, StateRows
from .pack import GROUP, LANES, PackedLinear, interleaved_halves, pack_linear

QUERIES = 16
LOGITS_ROWS = 16
UNLIMITED_WINDOW = 1 << 30

Record = TypeVar("Record", bound=ctypes.Structure)

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class _Linear(ctypes.Structure):
    _fields_ = _fields(_PTR, "data bias") + _fields(_I64, "blocks groups nibble")


class _Layer(ctypes.Structure):
    _fields_ = _fields(_Linear, "qkv output gate_up down") + _fields(_PTR, "input_norm mlp_norm query_norm key_norm")


class _Model(ctypes.Structure):
    _fields_ = [
        *_fields(_I64, "hidden layers heads kv_heads head_dim intermediate vocab window"),
        ("norm_eps", ctypes.c_double),
        ("layer", ctypes.POINTER(_Layer)),
        *_fields(_Linear, "embedding head"),
        *_fields(_PTR, "final_norm rotary"),
        ("fuse", _Linear),
        *_fields(_PTR, "embedding_norm hidden_norm kept"),
    ]


class _Rows(ctypes.Structure):
    _fields_ = [
        *_fields(_PTR, "pending committed remaining ended page_table"),
        ("table_pages", _I64),
        *_fields(_PTR, "stop_tokens stop_count"),
        ("stop_tokens_max", _I64),
        *_fields(_PTR, "temperature top_k top_p min_p seed presence frequency repetition"),
        *_fields(_PTR, "bias_tokens bias_values bias_count"),
        ("bias_max", _I64),
        *_fields(_PTR, "logprobs prompt_logprobs drafted waiting waiting_tokens waiting_hidden"),
        ("waiting_max", _I64),
    ]


class _Buffers(ctypes.Structure):
    _fields_ = [
        *_fields(_PTR, "slot start rows emits prefill_row"),
        ("prompts_max", _I64),
        *_fields(_PTR, "seen history_tokens history_counts"),
        ("history_max", _I64),
        *_fields(_PTR, "banned_count banned banned_rows"),
        ("banned_max", _I64),
        *_fields(_PTR, "tokens targets count verified token"),
        ("width_max", _I64),
        *_fields(_PTR, "logprob top_tokens top_logprobs"),
        *_fields(_PTR, "row_logprob row_top_tokens row_top_logprobs"),
        ("alternatives_max", _I64),
        *_fields(_PTR, "survival confidence draft_probabilities"),
        *_fields(_I64, "slots depth_max"),
    ]


class _Activations(ctypes.Structure):
    _fields_ = [*_fields(_PTR, "codes scale scaled_sum correction"), ("groups", ctypes.c_int)]


class _Space(ctypes.Structure):
    _fields_ = [
        *_fields(_PTR, "keys values"),
        ("pages", _I64),
        *_fields(_PTR, "x qkv attended logits thread_scratch"),
        *_fields(_I64, "rows_max logits_rows scratch_floats"),
        *_fields(_Activations, "narrow heads wide last fused"),
    ]


def unsupported(config: ModelConfig) -> str | None:
    """Why the native program cannot run this model, in words for people; None if it can."""
    for name, value in (
        ("hidden", config.hidden),
        ("head_dim", config.head_dim),
        ("intermediate", config.intermediate),
    ):
        if value % GROUP:
            return f"the fast programs need {name} to be a multiple of {GROUP}; this model's is {value}"
    return None


@dataclass(frozen=True, slots=True)
class _Weights:
    """Packed weights of the whole model, kept alive for the pointers into them."""

    layers: list[tuple[PackedLinear, PackedLinear, PackedLinear, PackedLinear]]
    norms: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]]
    embedding: PackedLinear
    head: PackedLinear
    final_norm: torch.Tensor
    rotary: torch.Tensor
    fuse: PackedLinear | None = None
    fused_norms: tuple[torch.Tensor, torch.Tensor] | None = None
    kept: torch.Tensor | None = None

    @classmethod
    def load_draft(cls, draft: DraftModel, target: _Weights, positions: int) -> _Weights:
        """The weights of a draft; a head has its target's embedding."""
        if not draft.reads_hidden:
            return cls.load(draft.config, draft.source, positions)
        own = cls.load(draft.config, draft.source, positions, target.embedding)
        norms = draft.source.tensor(EMBEDDING_NORM), draft.source.tensor(HIDDEN_NORM)
        fuse = pack_linear(draft.source, (FUSE.removesuffix(".weight"),), False)
        return replace(own, fuse=fuse, fused_norms=norms, kept=draft.kept)

    @classmethod
    def load(
        cls, config: ModelConfig, source: WeightSource, positions: int, embedding: PackedLinear | None = None
    ) -> _Weights:
        """Pack a model's weights, but for an `embedding` that is packed already."""
        layers, norms = [], []
        for index in range(config.layers):
            names = layer_names(index)
            layers.append(
                (
                    pack_linear(source, names.qkv, config.qkv_bias),
                    pack_linear(source, names.output, config.output_bias),
                    pack_linear(source, names.gate_up, config.mlp_bias, interleaved_halves),
                    pack_linear(source, names.down, config.mlp_bias),
                )
            )
            query, key = (source.tensor(n) for n in names.head_norms) if config.qk_norm else (None, None)
            norms.append((source.tensor(names.input_norm), source.tensor(names.mlp_norm), query, key))
        embedding = embedding or pack_linear(source, (EMBEDDING.removesuffix(".weight"),), False)
        head = embedding if config.tie_embeddings else pack_linear(source, (head_name(config),), False)
        final_norm = source.tensor(FINAL_NORM)
        return cls(layers, norms, embedding, head, final_norm, rotary_table(config, positions))


class NativeStep:
    """A `StepProgram` in C++. Raises OSError if the library cannot be loaded.

    `logits` float32[LOGITS_ROWS, blocks of 16 over vocab] holds the raw logits of the rows projected last, for tests.
    `residual` float32[rows, hidden] is the residual stream after the last layer, before the final norm, of the rows
    that ran last: those of prompts in order, then one for each decoding lane that had not ended.
    """

    def __init__(
        self,
        library: Path,
        config: ModelConfig,
        source: WeightSource,
        rows: StateRows,
        buffers: StepBuffers,
        kv: KvPages,
        threads: int,
        draft: DraftModel | None = None,
        draft_kv: KvPages | None = None,
    ) -> None:
        self.rows = rows
        self.buffers = buffers
        self.kv = kv
        self._held: list[object] = []
        self.residual = torch.zeros(len(buffers.tokens), config.hidden)
        max_model_len = rows.page_table.shape[1] * PAGE_TOKENS
        weights = _Weights.load(config, source, max_model_len)
        self._held.append((weights, draft_kv))
        self._library = _bind(library)
        most = len(buffers.tokens)
        self.logits = torch.zeros(LOGITS_ROWS, weights.head.blocks * LANES)
        target = self._space(config, kv, self.residual, self.logits, max_model_len, threads, fuses=False)
        drafts: tuple[_Model | None, _Space | None] = None, None
        if draft is not None and draft_kv is not None:
            lanes = len(buffers.slot)
            own = _Weights.load_draft(draft, weights, max_model_len)
            self._held.append(own)
            residual = torch.zeros(max(most + lanes, lanes * (WAITING_MAX + 1)), draft.config.hidden)
            logits = torch.zeros(lanes, own.head.blocks * LANES)
            self._held += [residual, logits]
            drafts = (
                self._model(draft.config, own),
                self._space(draft.config, draft_kv, residual, logits, max_model_len, threads, fuses=draft.reads_hidden),
            )
        records = (
            self._model(config, weights),
            target,
            *drafts,
            _pointers(
                _Rows,
                rows,
                table_pages=rows.page_table.shape[1],
                stop_tokens_max=STOP_TOKENS_MAX,
                bias_max=LOGIT_BIAS_MAX,
                waiting_max=WAITING_MAX,
            ),
            _pointers(
                _Buffers,
                buffers,
                prompts_max=len(buffers.prefill_row),
                history_max=buffers.history_tokens.shape[1],
                banned_max=STOP_TOKENS_MAX,
                width_max=buffers.token.shape[1],
                alternatives_max=ALTERNATIVES_MAX,
                slots=buffers.confidence.shape[1],
                depth_max=buffers.confidence.shape[2],
            ),
        )
        pointers = [None if record is None else ctypes.byref(record) for record in records]
        self._step: int | None = self._library.flare_open(*pointers, threads)

    def step(
        self, lanes: int, scored: bool = False, depth: int = 0, target_rows: int = 0, rejects: bool = False
    ) -> int:
        """See `StepProgram.step`."""
        return int(self._library.flare_step(self._step, lanes, scored, depth, target_rows, rejects))

    def close(self) -> None:
        """See `StepProgram.close`."""
        if self._step is not None:
            self._library.flare_close(self._step)
            self._step = None

    def _model(self, config: ModelConfig, weights: _Weights) -> _Model:
        layers = (_Layer * config.layers)()
        for record, linears, norms in zip(layers, weights.layers, weights.norms, strict=True):
            record.qkv, record.output, record.gate_up, record.down = (_linear(linear) for linear in linears)
            record.input_norm, record.mlp_norm, record.query_norm, record.key_norm = (_address(norm) for norm in norms)
        self._held.append(layers)
        return _Model(
            hidden=config.hidden,
            layers=config.layers,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate,
            vocab=config.vocab,
            window=config.sliding_window or UNLIMITED_WINDOW,
            norm_eps=config.norm_eps,
            layer=layers,
            embedding=_linear(weights.embedding),
            head=_linear(weights.head),
            final_norm=_address(weights.final_norm),
            rotary=_address(weights.rotary),
            fuse=_linear(weights.fuse) if weights.fuse is not None else _Linear(),
            embedding_norm=_address(weights.fused_norms[0]) if weights.fused_norms else None,
            hidden_norm=_address(weights.fused_norms[1]) if weights.fused_norms else None,
            kept=_address(weights.kept),
        )

    def _space(
        self,
        config: ModelConfig,
        kv: KvPages,
        residual: torch.Tensor,
        logits: torch.Tensor,
        max_model_len: int,
        threads: int,
        *,
        fuses: bool,
    ) -> _Space:
        """Working memory for as many rows as `residual` has, with logits of as many as `logits` has. `fuses`: each row
        begins with an embedding and a hidden state."""
        rows, logits_width = len(residual), logits.shape[1]
        query_width = config.heads * config.head_dim
        scratch = max(QUERIES * (config.head_dim + max_model_len + PAGE_TOKENS), logits_width, config.hidden)
        scratch += -scratch % LANES
        return _Space(
            keys=_address(kv.keys),
            values=_address(kv.values),
            pages=kv.keys.shape[1],
            x=residual.data_ptr(),
            qkv=self._floats(rows, query_width + 2 * config.kv_heads * config.head_dim),
            attended=self._floats(rows, query_width),
            logits=logits.data_ptr(),
            thread_scratch=self._floats(threads, scratch),
            rows_max=rows,
            logits_rows=len(logits),
            scratch_floats=scratch,
            narrow=self._activations(rows, config.hidden),
            heads=self._activations(rows, query_width),
            wide=self._activations(rows, config.intermediate),
            last=self._activations(len(logits), config.hidden),
            fused=self._activations(rows if fuses else 0, 2 * config.hidden),
        )

    def _floats(self, *shape: int) -> int:
        return self._keep(torch.zeros(*shape))

    def _activations(self, rows: int, width: int) -> _Activations:
        rows += -rows % LANES  # whole tiles, as `Activations` lays rows out
        groups = width // GROUP
        return _Activations(
            codes=self._keep(torch.zeros(rows, width, dtype=torch.int8)),
            scale=self._floats(rows, groups),
            scaled_sum=self._floats(rows, groups),
            correction=self._keep(torch.zeros(rows, groups, dtype=torch.int32)),
            groups=groups,
        )

    def _keep(self, tensor: torch.Tensor) -> int:
        self._held.append(tensor)
        return tensor.data_ptr()


def _bind(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.flare_open.restype = ctypes.c_void_p
    library.flare_open.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_int]
    library.flare_step.restype, library.flare_step.argtypes = _I64, [ctypes.c_void_p] + [ctypes.c_int] * 5
    library.flare_close.restype, library.flare_close.argtypes = None, [ctypes.c_void_p]
    return library


def _address(tensor: torch.Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def _linear(packed: PackedLinear) -> _Linear:
    return _Linear(_address(packed.data), _address(packed.bias), packed.blocks, packed.groups, packed.nibble)


def _pointers(kind: type[Record], tensors: StateRows | StepBuffers, **numbers: int) -> Record:
    """A record whose pointer fields are the tensors of the same names."""
    fields = [field[0] for field in kind._fields_ if field[0] not in numbers]
    return kind(**{name: _address(getattr(tensors, name)) for name in fields}, **numbers)
