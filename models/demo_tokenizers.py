"""Tokenizers of the real classes with a small vocabulary made here, because the hub may be out of reach."""

from __future__ import annotations

import itertools
from typing import Any

# Each becomes one token; every other word falls apart into shorter pieces.
_FREQUENT = (
    "a an the of in on at by with and photo picture painting drawing cat dog bird horse fish fox house tree "
    "forest river mountain lake sea sky sun moon star cloud city street car boat train person man woman child "
    "face red green blue yellow orange purple black white gray golden small big old new bright dark soft detailed "
    "high low quality blurry winter summer morning night light water fire snow flower"
)
WORDS = _FREQUENT.split()


def clip_tokenizer(length: int) -> Any:
    """A byte-level BPE tokenizer of class CLIPTokenizer: any text has tokens, of which at most `length` are kept."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    alphabet = sorted(ByteLevel.alphabet())
    vocabulary = dict.fromkeys(alphabet + [character + "</w>" for character in alphabet])
    merges: dict[tuple[str, str], int] = {}  # pair to rank; the lowest is merged first
    for word in WORDS:
        pieces = _merged([*word[:-1], word[-1:] + "</w>"], merges)
        joined = pieces[0]
        for piece in pieces[1:]:
            merges[joined, piece] = len(merges)
            joined += piece
            vocabulary[joined] = None
    vocabulary |= dict.fromkeys(("<|startoftext|>", "<|endoftext|>"))
    ids = {token: i for i, token in enumerate(vocabulary)}
    return CLIPTokenizer(vocab=ids, merges=list(merges), model_max_length=length)


def _merged(pieces: list[str], merges: dict[tuple[str, str], int]) -> list[str]:
    """What byte-pair encoding makes of `pieces` with the merges there are."""
    while pairs := [pair for pair in itertools.pairwise(pieces) if pair in merges]:
        i = list(itertools.pairwise(pieces)).index(min(pairs, key=merges.__getitem__))
        pieces = [*pieces[:i], pieces[i] + pieces[i + 1], *pieces[i + 2 :]]
    return pieces


def t5_tokenizer(length: int) -> Any:
    """A unigram tokenizer of class T5Tokenizer; characters beyond ASCII become the unknown token.

    Scores are log probabilities: frequent words first, single characters far below any word.
    """
    from transformers import T5TokenizerFast

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -6.0)]
    pieces += [(f"▁{word}", -4.0 - 0.01 * rank) for rank, word in enumerate(WORDS)]
    pieces += [(chr(code), -10.0) for code in range(ord("!"), ord("~") + 1)]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=length)


def text_tokenizer() -> tuple[Any, int]:
    """A byte-level BPE tokenizer that takes any text and gives it back; a space belongs to the word after it.

    Returns:
        The tokenizer, and the number of the first token that is a whole word: special tokens, bytes and parts of words
        come before.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
    space = "\u0120"  # how a space is written in a vocabulary of bytes
    pieces = dict.fromkeys((*special, *sorted(pre_tokenizers.ByteLevel.alphabet())))
    merges: dict[tuple[str, str], int] = {}
    for word in WORDS:
        parts = _merged([space, *word], merges)
        joined = parts[0]
        for part in parts[1:]:
            merges[joined, part] = len(merges)
            joined += part
            pieces[joined] = None
    whole = [space + word for word in WORDS]
    order = [piece for piece in pieces if piece not in whole] + whole
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(order)}, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=special[0],
        eos_token=special[1],
        pad_token=special[1],
        additional_special_tokens=list(special[2:]),
    )
    return fast, len(order) - len(whole)
