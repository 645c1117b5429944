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
    tokens = [BEGIN_OF_SUMMARY, END_OF_SUMMARY]
    tokenizer.add_tokens(tokens, special_tokens=True)
    return tokenizer.convert_tokens_to_ids(tokens)


def add_to_model(model: Any, tokenizer: Any, ids: list[int]) -> None:
    """Gives the delimiters rows in the embeddings, begun at the mean of related words.

    Spare rows of a padded vocabulary are used where there are any; the matrix never shrinks.

    Args:
        model: The base model, before adapters.
        tokenizer: With the delimiters added.
        ids: The delimiters' ids, ``[begin, end]``.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    if max(ids) >= rows:
        model.resize_token_embeddings(max(ids) + 1, mean_resizing=False)
    matrices = [model.get_input_embeddings().weight]
    head = model.get_output_embeddings()
    if head is not None and head.weight is not matrices[0]:
        matrices.append(head.weight)
    with torch.no_grad():
        for token, near in zip(ids, _NEAR.values(), strict=True):
            words = tokenizer(near, add_special_tokens=False)["input_ids"]
            for matrix in matrices:
                matrix[token] = matrix[words].mean(0)
