"""The model while it trains: a stock Qwen3Model, its start near look-up, and the probe."""

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import tables
import torch
import torch.nn.functional as F
from batches import FACTS, ID_DIGITS, NAME_FACTS, NO_DIGIT, UNKNOWN
from tokenizer import MAX_LENGTH
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)

WIDTH, MLP_WIDTH, LAYERS = 128, 256, 4
HEADS, KV_HEADS, HEAD_WIDTH = 4, 2, 64
GROUP = HEADS // KV_HEADS
ROPE_THETA = 1e5
PROBED_LAYER = 2  # the residual after so many blocks
ATTENTION_CHUNK = 192
EMBEDDING_SCALE = 0.1


class ChunkedAttention(torch.autograd.Function):
    """Causal attention for CPUs, some queries at a time, so that most of the masked half is never
    computed: with it a training step on 2,700 tokens takes half the time."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, _, length, width = q.shape
        q = (q * width**-0.5).reshape(batch * KV_HEADS, GROUP, length, width)
        k, v = k.flatten(0, 1), v.flatten(0, 1)
        future = torch.full((ATTENTION_CHUNK, ATTENTION_CHUNK), -math.inf, dtype=q.dtype).triu(1)
        out = torch.empty_like(q)
        shares = []
        for start in range(0, length, ATTENTION_CHUNK):
            end = min(start + ATTENTION_CHUNK, length)
            scores = q[:, :, start:end].flatten(1, 2) @ k[:, :end].mT
            scores.unflatten(1, (GROUP, -1))[..., start:] += future[: end - start, : end - start]
            shares.append(torch.softmax(scores, -1))
            out[:, :, start:end] = (shares[-1] @ v[:, :end]).unflatten(1, (GROUP, -1))
        ctx.save_for_backward(q, k, v, *shares)
        return out.view(batch, HEADS, length, width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, *shares = ctx.saved_tensors
        grad = grads[0].reshape(q.shape)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for index, share in enumerate(shares):
            start, end = index * ATTENTION_CHUNK, share.shape[-1]
            grad_out = grad[:, :, start:end].flatten(1, 2)
            grad_v[:, :end] += share.mT @ grad_out
            grad_share = grad_out @ v[:, :end].mT
            grad_scores = torch._softmax_backward_data(grad_share, share, -1, share.dtype)
            grad_q[:, :, start:end] = (grad_scores @ k[:, :end]).unflatten(1, (GROUP, -1))
            grad_k[:, :end] += grad_scores.mT @ q[:, :, start:end].flatten(1, 2)
        width = q.shape[-1]
        return tuple(
            t.view(grads[0].shape[0], -1, *t.shape[-2:])
            for t in (grad_q * width**-0.5, grad_k, grad_v)
        )


def chunked_attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, **_: Any
) -> tuple[Tensor, None]:
    """ChunkedAttention as transformers calls it."""
    out = ChunkedAttention.apply(q.to(v.dtype), k.to(v.dtype), v)
    return out.transpose(1, 2), None


AttentionInterface.register("chunked", chunked_attention)


def new_backbone(tokenizer: PreTrainedTokenizerFast, device: torch.device) -> Qwen3Model:
    """A randomly initialised model with the attention that suits the device."""
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=WIDTH,
        intermediate_size=MLP_WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_WIDTH,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="chunked" if device.type == "cpu" else "sdpa",
    )
    return Qwen3Model(config)


class Probe(nn.Module):
    """Reads a token's facts off its residual; only its gradient matters, it does not ship.

    Without it training stalls once a value stands further from the name than the next column:
    nothing else rewards a cell for knowing its row before some query can use that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, 1e-6)
        self.names = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NAME_FACTS))
        self.column = nn.Linear(WIDTH, len(tables.COLUMNS), bias=False)
        self.id_digits = nn.Linear(WIDTH, ID_DIGITS * (NO_DIGIT + 1), bias=False)

    def forward(self, residual: Tensor, facts: Tensor, embeddings: Tensor) -> Tensor:
        """-> the loss of each kind of fact."""
        x = self.norm(residual)
        guesses = [
            *(F.linear(name(x), embeddings).float() for name in self.names),
            self.column(x).float(),
            *self.id_digits(x).float().chunk(ID_DIGITS, -1),
        ]
        losses = []
        for kind in range(FACTS):
            target = facts[:, kind]
            known = (target != UNKNOWN).sum().clamp(min=1)
            total = F.cross_entropy(guesses[kind], target, ignore_index=UNKNOWN, reduction="sum")
            losses.append(total / known)
        return torch.stack(losses)


def start_embeddings(backbone: Qwen3Model, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Similar vectors for the spellings of a word; returns the direction that all tokens share."""
    weight = backbone.embed_tokens.weight
    nn.init.normal_(weight, 0, EMBEDDING_SCALE)
    spellings = defaultdict(list)
    for token, index in tokenizer.get_vocab().items():
        spellings[token.replace("\u0120", "").lower()].append(index)
    for word in sorted(spellings):
        if len(word) > 1:
            shared = torch.randn(WIDTH) * EMBEDDING_SCALE
            weight[spellings[word]] = 0.6 * weight[spellings[word]] + 0.8 * shared
    common = F.normalize(torch.randn(WIDTH), dim=0)
    weight += common * EMBEDDING_SCALE * WIDTH**0.5 / 2
    return common


def orthogonal(rows: int, columns: int) -> Tensor:
    size = max(rows, columns)
    return torch.linalg.qr(torch.randn(size, size))[0][:rows, :columns]


def noise(rows: int, columns: int, scale: float) -> Tensor:
    return scale * torch.randn(rows, columns) / columns**0.5


@torch.no_grad()
def start_near_lookup(backbone: Qwen3Model, tokenizer: PreTrainedTokenizerFast) -> None:
    """Initialise the heads as rough look-back and match heads, so that training need not find
    induction from nothing.

    Layer 0: head h looks h + 1 tokens back and writes what it reads under a rotation of its own.
    Layers 1 and 2, first pair of heads: wide windows over the last 12 and the last 40 tokens.
    The other heads match: their key is the token before (as moved by layer 0's first head), their
    query the token itself or the token before; they pass the matched token's content on.
    A look-back is a query and a key along the direction that all embeddings share, turned by the
    rotary angle of the offset; a match uses only the slow rotary pairs, which ignore distance.
    """
    common = start_embeddings(backbone, tokenizer)
    frequencies = backbone.rotary_emb.inv_freq
    slow = (frequencies < 0.02).float().repeat(2)
    unturned = torch.cat((torch.ones(HEAD_WIDTH // 2), torch.zeros(HEAD_WIDTH // 2)))

    def look_back(offset: float, fastest: float = math.inf) -> Tensor:
        turned = torch.cat((torch.cos(frequencies * offset), -torch.sin(frequencies * offset)))
        return torch.outer(turned * (frequencies < fastest).repeat(2), common)

    basis = orthogonal(WIDTH, WIDTH)
    content, beside = basis[:HEAD_WIDTH], basis[HEAD_WIDTH:]  # what layer 0 reads, where it writes
    moved = [beside.T @ orthogonal(WIDTH - HEAD_WIDTH, HEAD_WIDTH) for _ in range(HEADS)]
    moved_gain = (1.6, 0.8, 0.3, 0.3)

    for depth, block in enumerate(backbone.layers):
        attention = block.self_attn
        for norm in (attention.q_norm, attention.k_norm):
            norm.weight.fill_(1.5 if depth else 3.0)
        for matrix in (block.mlp.gate_proj, block.mlp.up_proj):
            matrix.weight.copy_(noise(MLP_WIDTH, WIDTH, 1.0))
        block.mlp.down_proj.weight.copy_(noise(WIDTH, MLP_WIDTH, EMBEDDING_SCALE / LAYERS**0.5))
        for pair in range(KV_HEADS):
            read = content if depth == 0 else orthogonal(WIDTH, WIDTH)[:HEAD_WIDTH]
            key = 1.5 * torch.outer(unturned, common) + noise(HEAD_WIDTH, WIDTH, 0.3)
            windowed = depth in (1, 2) and pair == 0
            if depth > 0 and not windowed:
                match = orthogonal(HEAD_WIDTH, HEAD_WIDTH) * slow[:, None]
                key = match @ moved[0].T + noise(HEAD_WIDTH, WIDTH, 0.15)
            for member in range(GROUP):
                head = pair * GROUP + member
                write, gain = read.T, 0.7
                if depth == 0:
                    query = 1.5 * look_back(head + 1) + noise(HEAD_WIDTH, WIDTH, 0.3)
                    write, gain = moved[head], moved_gain[head]
                elif windowed:
                    offset, fastest = ((7, 0.3), (22, 0.1))[member]
                    query = look_back(offset, fastest) + noise(HEAD_WIDTH, WIDTH, 0.5)
                    write = orthogonal(WIDTH, HEAD_WIDTH)
                else:
                    source = content if member == 0 else moved[0].T
                    query = match @ source + noise(HEAD_WIDTH, WIDTH, 0.15)
                rows = slice(head * HEAD_WIDTH, (head + 1) * HEAD_WIDTH)
                attention.q_proj.weight[rows] = query
                attention.o_proj.weight[:, rows] = EMBEDDING_SCALE * (
                    gain * (WIDTH / HEAD_WIDTH) ** 0.5 * write + noise(WIDTH, HEAD_WIDTH, 0.1)
                )
            rows = slice(pair * HEAD_WIDTH, (pair + 1) * HEAD_WIDTH)
            attention.k_proj.weight[rows] = key
            attention.v_proj.weight[rows] = read


def export(backbone: Qwen3Model, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a stock Qwen3ForCausalLM folder in bfloat16."""
    model = Qwen3ForCausalLM(backbone.config)
    model.model.load_state_dict(backbone.state_dict())
    model.tie_weights()
    model.generation_config.do_sample = False
    model.generation_config.max_new_tokens = 64
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
