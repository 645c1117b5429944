"""The two summary tokens, added to a tokenizer and a model."""

from __future__ import annotations

from typing import Any

import torch

from zoomkv.spans.thoughts import BEGIN_OF_SUMMARY, END_OF_SUMMARY

_NEAR = {BEGIN_OF_SUMMARY: " begin summary", END_OF_SUMMARY: " end summary"}


def add_to_tokenizer(tokenizer: Any) -> list[int]:
    """Adds the summary delimiters as special tokens, unless they are there.

    Returns:
        Their ids, ``[begin, end]``.
    """
    tokens = list(_NEAR)
    tokenizer.add_tokens(tokens, special_tokens=True)
    return tokenizer.convert_tokens_to_ids(tokens)


def add_to_model(model: Any, tokenizer: Any) -> list[int]:
    """Adds the delimiters to a base, with rows that begin at the mean of related words.

    Delimiters that the tokenizer has already were learnt with the base, and keep their rows. Spare
    rows of a padded vocabulary are used where there are any; the matrix never shrinks.

    Args:
        model: The base model, before adapters.
        tokenizer: As it was loaded with the model; gets the delimiters too.

    Returns:
        Their ids, ``[begin, end]``.
    """
    known = tokenizer.get_vocab()
    ids = add_to_tokenizer(tokenizer)
    rows = model.get_input_embeddings().weight.shape[0]
    if max(ids) >= rows:
        model.resize_token_embeddings(max(ids) + 1, mean_resizing=False)
    matrices = [model.get_input_embeddings().weight]
    head = model.get_output_embeddings()
    if head is not None and head.weight is not matrices[0]:
        matrices.append(head.weight)
    with torch.no_grad():
        for token, (text, near) in zip(ids, _NEAR.items(), strict=True):
            if text in known:
                continue
            words = tokenizer(near, add_special_tokens=False)["input_ids"]
            for matrix in matrices:
                matrix[token] = matrix[words].mean(0)
    return ids
