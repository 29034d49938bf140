"""Builds the tokenizer that a GGUF file's metadata describes, from parts of the tokenizers library.

The file has a vocabulary and the name of a rule that splits text before merging. Only the rules
below are accepted: with a wrong one the model would silently get other tokens than in training.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

from radixcache.errors import ModelError
from radixcache.runtime.checkpoints.gguf_file import GGUFFile
from radixcache.runtime.tokens.fast_tokenizer import FastTokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # types of tokens; 1 is any other
_SPACE = "\u2581"
_LONGEST_PIECE = 256

_END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA_3 = rf"{_SHORT}|\p{{N}}{{1,3}}|{_END}"
_QWEN_2 = rf"{_SHORT}|\p{{N}}|{_END}"
_QWEN_35 = _QWEN_2.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
_SEED = rf"{_SHORT}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_ENDING}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_EXAONE = _QWEN_2.replace(r"]?\p{L}+", r"]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+")
_EXAONE = _EXAONE.replace(r"]+[\r\n]*", r"]+[\r\n/]?")
_DEEPSEEK_3 = (
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KIMI_UPPER, _KIMI_LOWER = (rf"(?:(?!\p{{Han}})[{of}])" for of in (_UPPER, _LOWER))
_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}*{_KIMI_LOWER}+{_ENDING}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}+{_KIMI_LOWER}*{_ENDING}|\p{{N}}{{1,3}}|{_END}"
)
_CASED = (  # letters but for those that DeepSeek LLM's list lacks
    r"(?:(?![\u0560-\u0588\u10C7-\u10FF\u1C80-\u1C88\u2D00-\u2D2D\uA790-\uA7FA\uAB30-\uAB68"
    "\U00010570-\U000105bc\U00016e40-\U00016e7f\U0001d400-\U0001df2a]"
    r")[\p{Lu}\p{Ll}\p{Lt}])"
)
_LLM = (
    r"[\r\n]", rf"\s?{_CASED}+",
    r"\s?[!-/:-~\uFF01-\uFF0F\uFF1A-\uFF5E\u2018-\u201F\u3000-\u3002]+", r"\s+$",
    r"[\u0800-\u9FA5\uAC00-\uD7FF]+",
)  # fmt: skip
_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[\u0800-\u9FA5\uAC00-\uD7FF]+")
_DIGIT = (r"\p{N}",)
_DIGITS = r"\p{N}{1,3}"


class _Cut(NamedTuple):
    """How text is split before its bytes are merged.

    Attributes:
        pattern: matches the pieces.
        before: patterns that cut the text first, each the pieces of the one before.
        whole: a piece that is a token is not merged from its parts.
        composed: text is normalised to NFC.
        bos: a text begins with BOS if the file does not say.
    """

    pattern: str
    before: tuple[str, ...] = ()
    whole: bool = False
    composed: bool = False
    bos: bool = False


_RULES: list[tuple[_Cut, str]] = [
    (_Cut(_GPT_2), "default gpt-2 a.x-4.0 exaone4 granite-docling mellum trillion"),
    (_Cut(_GPT_2, composed=True), "olmo"),
    (_Cut(_GPT_2, before=_DIGIT), "smollm starcoder refact exaone codeshell mellum2"),
    (_Cut(_GPT_2, before=_DIGIT, composed=True), "command-r"),
    (
        _Cut(_LLAMA_3, whole=True, bos=True),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 lfm2 midm-2.0 pixtral",
    ),
    (_Cut(_LLAMA_3), "smaug-bpe dbrx chatglm-bpe"),
    (_Cut(_LLAMA_3, whole=True), "glm4"),
    (_Cut(_QWEN_2, composed=True), "qwen2"),
    (
        _Cut(_QWEN_2),
        "deepseek-r1-qwen stablelm2 bailingmoe bailingmoe2 hunyuan megrez solar-open",
    ),
    (_Cut(_QWEN_35, composed=True), "qwen35"),
    (_Cut(_SEED), "seed-coder"),
    (_Cut(_TEKKEN, whole=True, bos=True), "tekken"),
    (_Cut(_O200K), "gpt-4o llama4 kanana2 minimax-m2"),
    (_Cut(_O200K, before=(r"\d{1,3}(?=(?:\d{3})*\b)",)), "tiny_aya cohere2moe"),
    (_Cut(_EXAONE, composed=True), "exaone-moe"),
    (_Cut(_QWEN_2, before=(r"[^\n]+|\n+",)), "laguna"),
    (_Cut(_LLAMA_3, before=(_DIGITS,), whole=True), "minicpm5"),
    (
        _Cut(_DEEPSEEK_3, before=(_DIGITS, r"[\u4E00-\u9FA5\u3040-\u30FF]+")),
        "deepseek-v3 hunyuan-dense joyai-llm",
    ),
    (_Cut(r"\p{N}", before=_CODER), "deepseek-coder"),
    (_Cut(r"\p{N}+", before=_LLM), "deepseek-llm"),
    (_Cut(_KIMI), "kimi-k2"),
]
_CUTS = {name: cut for cut, names in _RULES for name in names.split()}
"""Rules for splitting text, by llama.cpp's names."""


def read_tokenizer(file: GGUFFile) -> FastTokenizer:
    """The tokenizer of a GGUF file.

    Raises:
        ModelError: the file has no tokenizer, or one that is not supported here.
    """
    from tokenizers import AddedToken, processors

    tokens = file.array("tokenizer.ggml.tokens", str)
    types = file.array("tokenizer.ggml.token_type", int) or [1] * len(tokens)
    model, named = file.get("tokenizer.ggml.model", str), _named(file, tokens)
    if len(types) != len(tokens):
        raise ModelError(f"the GGUF file has {len(tokens)} tokens and {len(types)} types of tokens")
    if model == "gpt2":
        backend, bos = _byte_level(file, tokens)
    elif model == "llama":
        backend, bos = _sentencepiece(file, tokens, types, named), True
    elif model == "gemma4":
        backend, bos = _gemma4(file, tokens, named), True
    else:
        raise ModelError(f"the GGUF file has a tokenizer of model {model!r}, which is not read")
    added = [
        AddedToken(token, normalized=False, special=kind != _USER_DEFINED)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token
    ]
    backend.add_tokens(added)
    before = "bos_token" in named and file.get("tokenizer.ggml.add_bos_token", bool, bos)
    after = "eos_token" in named and file.get("tokenizer.ggml.add_eos_token", bool, False)
    if before or after:
        text = ["bos_token"] * before + ["$A"] + ["eos_token"] * after
        pieces = [
            {"id": name, "ids": [backend.token_to_id(token)], "tokens": [token]}
            for name, token in named.items()
        ]
        backend.post_processor = processors.TemplateProcessing(
            single=text, pair=[*text, *text[:-1], "$B"], special_tokens=pieces
        )
    return FastTokenizer(backend, _templates(file), named)


def _named(file: GGUFFile, tokens: list[str]) -> dict[str, str]:
    """The tokens with a role of their own, by transformers' names."""
    parts = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: file.get(f"tokenizer.ggml.{key}_token_id", int, -1) for name, key in parts.items()}
    return {f"{name}_token": tokens[at] for name, at in ids.items() if 0 <= at < len(tokens)}


def _templates(file: GGUFFile) -> str | dict[str, str] | None:
    """The chat template, or a dict of all by name."""
    default, prefix = "tokenizer.chat_template", "tokenizer.chat_template."
    found = {key.removeprefix(prefix): key for key in file.metadata if key.startswith(prefix)}
    found.pop("rerank", None)  # `Pooling.template`, which is for no chat
    if default in file.metadata:
        found = {"default": default, **found}
    templates = {name: file.get(key, str) for name, key in found.items()}
    return templates["default"] if [*templates] == ["default"] else templates or None


def _byte_level(file: GGUFFile, tokens: list[str]) -> tuple[Any, bool]:
    """A byte-level BPE, and whether texts begin with BOS."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = file.get("tokenizer.ggml.pre", str, "")
    if (cut := _CUTS.get(name)) is None:
        raise ModelError(f"the GGUF file cuts text by the rule {name!r}, which is not known here")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, _pairs(file), ignore_merges=cut.whole))
    patterns = (*cut.before, cut.pattern)
    steps: list[Any] = [pre_tokenizers.Split(Regex(one), "isolated") for one in patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if cut.composed:
        backend.normalizer = normalizers.NFC()
    return backend, cut.bos


def _sentencepiece(
    file: GGUFFile, tokens: list[str], types: list[int], named: dict[str, str]
) -> Any:
    """A BPE of characters, whose merges follow from the scores of tokens."""
    scores = file.array("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise ModelError(f"the GGUF file has {len(tokens)} tokens and {len(scores)} scores")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pieces = {
        token: score
        for token, score, kind in zip(tokens, scores, types, strict=True)
        if kind not in (_UNKNOWN, _CONTROL, _BYTE)
    }
    prefix = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    return _of_characters(vocabulary, _merges(pieces, vocabulary), named, prefix)


def _gemma4(file: GGUFFile, tokens: list[str], named: dict[str, str]) -> Any:
    """Like SentencePiece's, with merges of its own."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return _of_characters(vocabulary, _pairs(file), named, False)


def _pairs(file: GGUFFile) -> list[tuple[str, str]]:
    """The merges that the file has."""
    pairs = [merge.split(" ") for merge in file.array("tokenizer.ggml.merges", str)]
    merges = [(pair[0], pair[-1]) for pair in pairs if len(pair) == 2]
    if len(merges) < len(pairs) or not merges:
        raise ModelError("the GGUF file has merges that are no pairs, or none")
    return merges


def _of_characters(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], named: dict[str, str], prefix: bool
) -> Any:
    """A BPE of characters with byte fallback; U+2581 stands for a space, also before a text."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = named.get("unk_token")
    backend = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    spaces: list[Any] = [normalizers.Prepend(_SPACE)] if prefix else []
    backend.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", _SPACE)])
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return backend


def _merges(pieces: dict[str, float], ids: dict[str, int]) -> list[tuple[str, str]]:
    """The merges that make `pieces`, the best first, from SentencePiece's scores.

    Among merges with one result, the one with the longest left part is first, as in transformers.
    """
    if max(map(len, pieces), default=0) > _LONGEST_PIECE:
        raise ModelError(f"the GGUF file has a token of over {_LONGEST_PIECE} characters")
    with suppress(ImportError):  # the ingress of replicas has no torch
        from radixcache.kernels.native.library import problem
        from radixcache.kernels.native.merges import find_merges

        if problem() is None:
            return find_merges(pieces, [text for text in ids if text not in pieces])
    found = [
        (score, at, len(piece) - at, piece[:at], piece[at:])
        for piece, score in pieces.items()
        for at in range(1, len(piece))
        if piece[:at] in ids and piece[at:] in ids
    ]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [merge[3:] for merge in found]
