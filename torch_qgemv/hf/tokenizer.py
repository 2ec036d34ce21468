"""Builds a transformers tokenizer from the `tokenizer.*` metadata of a GGUF file, without any other file.

Token types, defaults and the patterns that split text before merging are llama.cpp's (MIT); its tokenizer gives the
reference ids of the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

_SPACE = "\u2581"  # SentencePiece's visible space

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_QWEN35 = (  # combining marks belong to their letters
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# tokenizer.ggml.pre -> patterns applied one after the other; each cuts out its matches.
_SPLITS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    **dict.fromkeys(("gpt-2", "olmo", "mpt", "exaone4"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "smaug-bpe", "dbrx"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
}
# Here a piece of text that is a token as a whole becomes that token, whatever the merges give.
_IGNORE_MERGES = {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"}

# Control tokens that end a turn or a document in the models that have them; a file names only one of them.
_END_TEXTS = {
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
    *("</s>", "<eos>"),
}


@dataclass(frozen=True)
class _Vocabulary:
    """The `tokenizer.ggml.*` keys, with llama.cpp's defaults for those that a file leaves out."""

    metadata: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    @property
    def model(self) -> str:
        """Kind of vocabulary: "gpt2" is byte-level BPE, "llama" is SentencePiece."""
        return self.get("model", "none")

    @property
    def tokens(self) -> list[str]:
        tokens = self.get("tokens")
        if not tokens:
            raise ValueError("the file holds no vocabulary (tokenizer.ggml.tokens)")
        return tokens

    @cached_property
    def ids(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}

    def of_type(self, token_type: TokenType) -> list[str]:
        types = self.get("token_type", [])
        return [token for token, kind in zip(self.tokens, types, strict=False) if kind == token_type]

    def special_id(self, name: str) -> int | None:
        """Id of the bos, eos, eot, eom, unknown or padding token."""
        defaults = {"bos": 1, "eos": 2, "unknown": 0} if self.model == "llama" else {}
        index = self.get(f"{name}_token_id", defaults.get(name))
        if index is not None and not 0 <= index < len(self.tokens):
            raise ValueError(f"tokenizer.ggml.{name}_token_id is {index}, the vocabulary has {len(self.tokens)} tokens")
        return index

    def special_token(self, name: str) -> str | None:
        index = self.special_id(name)
        return None if index is None else self.tokens[index]

    def is_added(self, name: str) -> bool:
        """Whether the bos or eos token is put around every text."""
        default = name == "bos" and (self.model == "llama" or self.get("pre") in _IGNORE_MERGES)
        return self.get(f"add_{name}_token", default) and self.special_id(name) is not None


def build_tokenizer(metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer that a file's metadata describe: vocabulary, merges, special tokens and chat template.

    Raises ValueError if the file holds no vocabulary, NotImplementedError for a kind that isn't known here.
    """
    vocabulary = _Vocabulary(metadata)
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if vocabulary.model not in builders:
        raise NotImplementedError(f"tokenizer.ggml.model is {vocabulary.model!r}, supported: {', '.join(builders)}")
    # Filled through its backend: a Tokenizer handed to the constructor is copied, which takes seconds for large ones.
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()),
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        padding_side="left",  # what generation needs
    )
    builders[vocabulary.model](vocabulary, fast.backend_tokenizer)
    for token_type, special in ((TokenType.CONTROL, True), (TokenType.USER_DEFINED, False)):
        texts = vocabulary.of_type(token_type)
        fast.backend_tokenizer.add_tokens([AddedToken(text, normalized=False, special=special) for text in texts])
    fast.bos_token = vocabulary.special_token("bos")
    fast.eos_token = vocabulary.special_token("eos")
    fast.unk_token = vocabulary.special_token("unknown")
    fast.pad_token = vocabulary.special_token("padding")
    fast.backend_tokenizer.post_processor = _post_processor(vocabulary)
    return fast


def special_token_ids(metadata: Mapping[str, Any]) -> dict[str, int | None]:
    """bos_token_id, eos_token_id and pad_token_id, for a model's configuration."""
    vocabulary = _Vocabulary(metadata)
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{name}_token_id": vocabulary.special_id(key) for name, key in names.items()}


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Ids of every token that ends a generation: the file's end tokens, and control tokens known to end a turn."""
    vocabulary = _Vocabulary(metadata)
    named = [vocabulary.special_id(name) for name in ("eos", "eot", "eom")]
    types = vocabulary.get("token_type", [])
    known = [
        index
        for index, (text, kind) in enumerate(zip(vocabulary.tokens, types, strict=False))
        if kind == TokenType.CONTROL and text in _END_TEXTS
    ]
    return list(dict.fromkeys(index for index in named + known if index is not None))


def _byte_level(vocabulary: _Vocabulary, tokenizer: Tokenizer) -> None:
    pre = vocabulary.get("pre", "default")
    if pre not in _SPLITS:
        raise NotImplementedError(f"tokenizer.ggml.pre is {pre!r}, supported: {', '.join(_SPLITS)}")
    merges = [tuple(merge.split(" ", 1)) for merge in vocabulary.get("merges", [])]
    tokenizer.model = models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=pre in _IGNORE_MERGES)
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _SPLITS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()


def _sentencepiece(vocabulary: _Vocabulary, tokenizer: Tokenizer) -> None:
    add_space = vocabulary.get("add_space_prefix", True)
    tokenizer.model = models.BPE(
        vocab=vocabulary.ids,
        merges=_merges_by_score(vocabulary),
        unk_token=vocabulary.special_token("unknown"),
        fuse_unk=True,
        byte_fallback=True,
    )
    replace = [normalizers.Replace(" ", _SPACE)]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), *replace] if add_space else replace)
    strip = [decoders.Strip(" ", left=1)] if add_space else []
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours whose union has the best score: each way to cut a token is a merge."""
    scores = dict(zip(vocabulary.tokens, vocabulary.get("scores", []), strict=True))
    ranked = sorted(vocabulary.of_type(TokenType.NORMAL), key=scores.__getitem__, reverse=True)
    normal = set(ranked)
    return [
        (left, right)
        for token in ranked
        for cut in range(1, len(token))
        if (left := token[:cut]) in normal and (right := token[cut:]) in normal
    ]


def _post_processor(vocabulary: _Vocabulary) -> processors.TemplateProcessing:
    bos, eos = (vocabulary.special_token(name) if vocabulary.is_added(name) else None for name in ("bos", "eos"))
    single = [part for part in (bos, "$A", eos) if part]
    pair = single + [f"{part}:1" for part in (bos, "$B", eos) if part]
    specials = [(name, vocabulary.ids[name]) for name in (bos, eos) if name]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=specials)
