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
