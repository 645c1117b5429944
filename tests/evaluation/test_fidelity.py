"""Agreement with the full cache: zero where nothing is dropped, and what a loop finds elsewhere."""

from typing import Any

import pytest
import torch

import zoomkv
from zoomkv.caches.registry import make_cache
from zoomkv.evaluation.fidelity import fidelity, full_log_probs


@pytest.fixture
def model(tiny_llama: Any) -> Any:
    model = tiny_llama()
    zoomkv.attach(model)
    return model


TEXTS = [([21, 22, 23, 24, 25], list(range(30, 60))), ([40, 41], list(range(70, 90)))]
PROMPTS, ANSWERS = [text[0] for text in TEXTS], [text[1] for text in TEXTS]


def test_reference_is_the_distribution_that_each_token_was_drawn_from(model: Any) -> None:
    for text, found in zip(TEXTS, full_log_probs(model, PROMPTS, ANSWERS), strict=True):
        prompt, answer = text
        for number in range(len(answer)):
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *answer[:number]]])).logits[0, -1]
            torch.testing.assert_close(found[number], logits.log_softmax(-1), atol=1e-5, rtol=1e-5)


def test_a_cache_that_drops_nothing_agrees(model: Any) -> None:
    reference = full_log_probs(model, PROMPTS, ANSWERS)
    cache = make_cache("streaming_llm", model, budget=500)
    found = fidelity(model, cache, PROMPTS, ANSWERS, reference, pad_id=0)
    assert [len(kl) for kl in found.kl] == [30, 20]
    assert torch.cat(found.kl).abs().max() < 1e-5
    assert torch.cat(found.same).all()
    assert found.summary()["top1"] == 1


def test_one_that_drops_rows_equals_a_loop_over_each_text_alone(model: Any) -> None:
    reference = full_log_probs(model, PROMPTS, ANSWERS)
    cache = make_cache("streaming_llm", model, budget=8)
    seen: list[tuple[int, int]] = []
    found = fidelity(model, cache, PROMPTS, ANSWERS, reference, 0, lambda *at: seen.append(at))
    assert seen[-1] == (30, 30)
    for row, (prompt, answer) in enumerate(TEXTS):
        cache = make_cache("streaming_llm", model, budget=8)
        cache.expect_prompt(len(prompt))
        with torch.no_grad():
            logits = model(torch.tensor([prompt]), cache=cache).logits[0, -1]
            for number, token in enumerate(answer):
                policy, full = logits.log_softmax(-1), reference[row][number]
                expected = sum(
                    p.exp() * (p - q) for p, q in zip(full.double(), policy.double(), strict=True)
                )
                assert float(found.kl[row][number]) == pytest.approx(float(expected), abs=1e-5)
                assert bool(found.same[row][number]) == (policy.argmax() == full.argmax())
                logits = model(torch.tensor([[token]]), cache=cache).logits[0, -1]
    assert found.summary()["kl"] > 1e-4  # something was lost, and it shows
