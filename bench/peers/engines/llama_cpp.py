# mypy: disable-error-code="import-not-found"
"""llama.cpp by its own interface: sequences that share their cells, KV in float32 if told so.

`Llama.generate` keeps the prefix of the last sequence only. Here, what requests share and each
conversation is a sequence of its own, copied with `llama_memory_seq_cp`, which copies no KV.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp as api
import numpy as np

from bench.peers.engines.cases import KV_BYTES, THREADS, Answer, Request

BATCH = 2048
MAX_SEQUENCES = 64
SHARED = 0
"""The sequence of what requests share; the others are conversations, or last for a request."""


class Row(NamedTuple):
    """A token to compute, and whether its successor is asked for."""

    token: int
    position: int
    sequence: int
    is_last: bool


class LlamaCpp:
    """One pool of cells for all sequences; the model is a GGUF file, or a folder's `model.gguf`.

    As it comes, it has KV in float16 and flash attention; `float_kv` is what others compute with.
    """

    version = api.__version__

    def __init__(self, path: Path, float_kv: bool = True) -> None:
        api.llama_backend_init()
        file = path / "model.gguf" if path.is_dir() else path
        model = api.llama_model_load_from_file(str(file).encode(), api.llama_model_default_params())
        if not model:
            raise RuntimeError(f"llama.cpp could not load {file.name}")
        self.vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        params = api.llama_context_default_params()
        params.n_ctx = _tokens(model)
        params.n_batch = BATCH
        params.n_seq_max = MAX_SEQUENCES
        params.n_threads = params.n_threads_batch = THREADS
        if float_kv:
            params.type_k = params.type_v = api.GGML_TYPE_F32
            params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED  # slower over float32 KV
        params.kv_unified = True
        self.context = api.llama_init_from_model(model, params)
        if not self.context:
            raise RuntimeError("llama.cpp made no context")
        self.memory = api.llama_get_memory(self.context)
        self.batch = api.llama_batch_init(BATCH, 0, 1)
        self.forget()

    def forget(self) -> None:
        api.llama_memory_clear(self.memory, False)
        self.shared: list[int] = []
        self.conversations: dict[int, tuple[int, int]] = {}
        """The sequence of each, and its tokens."""
        self.free = list(range(1, MAX_SEQUENCES))

    def generate(self, requests: list[Request], max_tokens: int) -> list[Answer]:
        start = time.perf_counter()
        cached = [self._keep_shared(request) for request in requests]
        sequences, positions, new = [], [], []
        for request in requests:
            sequence, position = self._sequence_of(request)
            sequences.append(sequence)
            positions.append(position)
            new.append(request.tokens[position:])
        answers: list[list[int]] = [[] for _ in requests]
        first = 0.0
        for _ in range(max_tokens):
            tokens = self._compute(sequences, positions, new)
            first = first or time.perf_counter() - start
            for answer, token in zip(answers, tokens, strict=True):
                answer.append(token)
            positions = [at + len(some) for at, some in zip(positions, new, strict=True)]
            new = [[token] for token in tokens]
        for request, sequence, position in zip(requests, sequences, positions, strict=True):
            if request.conversation is None:
                api.llama_memory_seq_rm(self.memory, sequence, -1, -1)
                self.free.append(sequence)
            else:
                self.conversations[request.conversation] = sequence, position
        return [Answer(first, *rest) for rest in zip(answers, cached, strict=True)]

    def _keep_shared(self, request: Request) -> int:
        """Compute a request's shared prefix if missing; returns the tokens that were cached."""
        if request.conversation in self.conversations:
            return self.conversations[request.conversation][1]
        prefix = request.tokens[: request.shared]
        if prefix == self.shared:
            return len(prefix)
        api.llama_memory_seq_rm(self.memory, SHARED, -1, -1)
        self._compute([SHARED], [0], [prefix])
        self.shared = prefix
        return 0

    def _sequence_of(self, request: Request) -> tuple[int, int]:
        """A sequence that begins as the request does, and the tokens that are in it."""
        if request.conversation in self.conversations:
            return self.conversations[request.conversation]
        sequence = self.free.pop()
        if request.shared:
            api.llama_memory_seq_cp(self.memory, SHARED, sequence, 0, request.shared)
        return sequence, request.shared

    def _compute(
        self, sequences: list[int], positions: list[int], new: list[list[int]]
    ) -> list[int]:
        """Append `new` tokens to sequences at `positions`; returns what follows each."""
        rows = [
            Row(token, position + i, sequence, i == len(tokens) - 1)
            for sequence, position, tokens in zip(sequences, positions, new, strict=True)
            for i, token in enumerate(tokens)
        ]
        chosen = []
        for start in range(0, len(rows), BATCH):
            chunk = rows[start : start + BATCH]
            batch = self.batch
            batch.n_tokens = len(chunk)
            for i, row in enumerate(chunk):
                batch.token[i] = row.token
                batch.pos[i] = row.position
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = row.sequence
                batch.logits[i] = row.is_last
            failed = api.llama_decode(self.context, batch)
            if failed:
                raise RuntimeError(f"llama_decode returned {failed}")
            for i, row in enumerate(chunk):
                if row.is_last:
                    logits = api.llama_get_logits_ith(self.context, i)
                    chosen.append(int(np.ctypeslib.as_array(logits, (self.vocab,)).argmax()))
        return chosen


def _tokens(model: Any) -> int:
    """How many tokens' float32 keys and values are `KV_BYTES`; a multiple of 256, as it takes."""
    head = api.llama_model_n_embd(model) // api.llama_model_n_head(model)
    values = api.llama_model_n_layer(model) * api.llama_model_n_head_kv(model) * head * 2
    return int(KV_BYTES // (4 * values) // 256 * 256)
