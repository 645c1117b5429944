"""From prompts to answers: batches, sampling, beams, turns, streams, and their figures."""

import threading
import warnings

import pytest
import torch
from tests.bases import make_base

from zoomkv.backbone.delimiters import add_to_tokenizer
from zoomkv.caches.registry import make_cache
from zoomkv.generation import Generator, load

PROMPTS = ["Step 1\n3+4=7", "What is the total after operation 3 of step 2?", "9"]
OPTIONS = {
    "full": {},
    "full_offloaded": {},
    "streaming_llm": {"budget": 96},
    "sumr": {"window": 16},
    "zoomr": {"window": 16},
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A base whose tokenizer has the delimiters, attached."""
    from zoomkv.backbone.delimiters import add_to_model

    model, tokenizer = load(make_base(tmp_path_factory.mktemp("base")))
    add_to_model(model, tokenizer)
    return model, tokenizer


@pytest.fixture
def generator(loaded):
    def make(policy="full", **options):
        return Generator(*loaded, policy, **(OPTIONS[policy] | options))

    return make


@pytest.mark.parametrize("policy", OPTIONS)
def test_a_batch_is_its_prompts_alone(generator, policy):
    make = generator(policy)
    together = make.generate(PROMPTS, 24)
    for prompt, answer in zip(PROMPTS, together, strict=True):
        [alone] = make.generate(prompt, 24)
        assert answer == alone


def test_the_full_cache_is_transformers_own(loaded, generator):
    model, tokenizer = loaded
    make = generator()
    text = make.render(PROMPTS[0])
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    plain = model.generate(input_ids=ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    assert make.generate(PROMPTS[0], 24)[0].ids == plain.tolist()


@pytest.mark.parametrize("policy", OPTIONS)
def test_sampling_beams_and_several_returns(generator, policy):
    make = generator(policy)
    assert len(make.generate(PROMPTS[:2], 12, num_beams=3)) == 2
    several = make.generate(
        PROMPTS[:2], 12, do_sample=True, num_beams=2, num_return_sequences=2, temperature=0.9
    )
    assert len(several) == 4
    torch.manual_seed(0)
    sampled = make.generate(PROMPTS[0], 12, do_sample=True, num_return_sequences=3)
    assert len({tuple(answer.ids) for answer in sampled}) > 1
    with pytest.raises(ValueError, match="no conversation to follow"):
        make.generate(["a", "b", "c"], follow=True)


def test_beams_are_transformers_own(loaded, generator):
    model, tokenizer = loaded
    make = generator()
    text = make.render(PROMPTS[0])
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    plain = model.generate(input_ids=ids, max_new_tokens=16, do_sample=False, num_beams=3)
    [ours] = make.generate(PROMPTS[0], 16, num_beams=3)
    assert ours.ids == plain[0, ids.shape[1] :].tolist()


def test_greedy_decoding_warns_of_nothing(generator):
    make = generator()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make.generate(PROMPTS[0], 2)


def end_early(loaded, monkeypatch, token):
    """Makes a token the end of text, so that rows end at different steps."""
    monkeypatch.setattr(loaded[0].generation_config, "eos_token_id", [token, 2])


@pytest.mark.parametrize("policy", OPTIONS)
def test_a_second_turn_is_a_fresh_run_over_both(loaded, generator, monkeypatch, policy):
    model, tokenizer = loaded
    options = {"budget": 4096} if policy == "streaming_llm" else {}
    make = generator(policy, **options)
    answers = make.generate(PROMPTS[:2], 20)
    ends = [answer.ids[6] for answer in answers]
    end_early(loaded, monkeypatch, ends[0])
    first = make.generate(PROMPTS[:2], 20)
    assert first[0].finished and len(first[0].ids) <= 7
    second = make.generate(["And then?", "Why?"], 12, follow=True)
    if policy in ("sumr", "zoomr"):
        return  # what they read of the first turn is their own affair
    for prompt, turn, answer, later in zip(
        PROMPTS, ["And then?", "Why?"], first, second, strict=False
    ):
        ids = tokenizer(make.render(prompt), add_special_tokens=False)["input_ids"] + answer.ids
        following = make._next_turn(turn, answer.ids[-1])
        ids += tokenizer(following, add_special_tokens=False)["input_ids"]
        fresh = model.generate(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=[ends[0], 2],
        )[0, len(ids) :].tolist()
        assert later.ids == fresh


def test_the_next_turn_closes_an_answer_that_was_cut_off(loaded, generator):
    make = generator()
    end = loaded[1].eos_token_id
    assert make._next_turn("b", 50).startswith("<|im_end|>\n<|im_start|>user\nb")
    assert make._next_turn("b", end).startswith("\n<|im_start|>user\nb")


@pytest.mark.parametrize("policy", OPTIONS)
def test_a_stream_is_the_answer(loaded, generator, policy):
    make = generator(policy)
    [answer] = make.generate(PROMPTS[0], 24)
    pieces = list(make.stream(PROMPTS[0], 24))
    ids = answer.ids[:-1] if answer.finished else answer.ids
    assert "".join(pieces) == loaded[1].decode(ids)
    assert len(pieces) > 1 and make.stats.tokens == len(answer.ids)


def test_a_stream_shows_delimiters_but_no_end_of_text(loaded, generator, monkeypatch):
    make = generator()
    begin, end = add_to_tokenizer(loaded[1])
    said = [70, begin, 71, end, 72, loaded[1].eos_token_id]

    def generate(input_ids, streamer, **options):
        streamer.put(input_ids)
        for token in said:
            streamer.put(torch.tensor([token]))
        streamer.end()
        return torch.cat([input_ids, torch.tensor([said])], 1)

    monkeypatch.setattr(loaded[0], "generate", generate)
    text = "".join(make.stream(PROMPTS[0]))
    assert "<|begin_of_summary|>" in text and "<|end_of_summary|>" in text
    assert "<|im_end|>" not in text


def test_a_reader_that_stops_ends_the_generation(generator):
    make = generator()
    stream = make.stream(PROMPTS[0], 2000, eos_token_id=[])
    next(stream)
    stream.close()
    assert make.cache.get_seq_length() < 1000
    assert not any("(work)" in thread.name for thread in threading.enumerate())


def test_an_error_in_the_stream_is_raised_where_it_is_read(generator):
    with pytest.raises(ValueError, match="the prompt is empty"):
        list(generator().stream("  "))


@pytest.mark.parametrize("policy", OPTIONS)
def test_stats_are_of_this_call(loaded, generator, policy):
    make = generator(policy)
    answers = make.generate(PROMPTS, 20)
    stats = make.stats
    assert stats.tokens == sum(len(answer.ids) for answer in answers)
    assert stats.tokens_per_second == pytest.approx(stats.tokens / stats.seconds)
    footprint = make.cache.footprint()
    assert stats.host_bytes == footprint.host_bytes
    assert stats.device_bytes_peak >= stats.device_bytes_mean > 0
    assert (stats.host_bytes > 10_000) == (policy in ("full_offloaded", "sumr", "zoomr"))
    assert stats.bytes_to_device == footprint.bytes_to_device  # a fresh cache
    make.generate(["a", "b", "c"], 4, follow=True)
    assert make.stats.bytes_to_host <= make.cache.footprint().bytes_to_host
    assert set(stats.to_dict()) >= {"tokens", "rows_mean", "agreeability"}


def test_one_token_only(generator):
    [answer] = generator("zoomr").generate(PROMPTS[0], 1)
    assert len(answer.ids) == 1


@pytest.mark.parametrize("prompts", ["", "  \n", ["ok", ""], []])
@pytest.mark.parametrize("chat", [True, False])
def test_an_empty_prompt_is_refused(generator, prompts, chat):
    with pytest.raises(ValueError, match="the prompt is empty|there is no prompt"):
        generator(chat=chat).generate(prompts)


@pytest.mark.parametrize(("new", "warned"), [(10, False), (5000, True)])
def test_more_than_the_model_has_positions_for(loaded, generator, monkeypatch, new, warned):
    make = generator()
    prompt = len(loaded[1](make.render("x"), add_special_tokens=False)["input_ids"])
    monkeypatch.setattr(loaded[0].config, "max_position_embeddings", prompt + 10)
    monkeypatch.setattr(loaded[0].generation_config, "eos_token_id", list(range(362)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make.generate("x", new)
    messages = [str(warning.message) for warning in caught]
    assert any(f"the prompt of {prompt} tokens" in text for text in messages) == warned


def test_bad_options_are_told_before_anything_is_generated(loaded):
    with pytest.raises(ValueError, match="did you mean 'zoomr'"):
        Generator(*loaded, "zommr")
    with pytest.raises(ValueError, match="window"):
        Generator(*loaded, "zoomr", window=-1)


def test_a_model_that_is_only_prompted_to_summarise(base):
    model, tokenizer = load(base)
    with pytest.raises(ValueError, match="the tokenizer has no token"):
        Generator(model, tokenizer, "zoomr")
    with pytest.raises(ValueError, match="policy 'snapkv' has no use for them"):
        Generator(model, tokenizer, "snapkv", textual_summaries=True)
    make = Generator(model, tokenizer, "zoomr", textual_summaries=True, system="Be brief.")
    assert make.render("hi").startswith("<|im_start|>system\nBe brief.\n\nThink step by step")
    assert make.generate("hi", 6)[0].ids


def test_a_prefix_cache_is_copied_not_shared(loaded):
    """One prompt, many questions: every answer as if it were the only one."""
    import copy

    model, tokenizer = loaded
    prefix = tokenizer("A ledger starts at 20. Step 1", return_tensors="pt")["input_ids"]
    cache = make_cache("zoomr", model, tokenizer, window=16)
    with torch.inference_mode():
        model(input_ids=prefix, cache=cache)
    answers = []
    for question in (" is", " then 7+1", " is"):
        ids = torch.cat([prefix, tokenizer(question, return_tensors="pt")["input_ids"]], 1)
        answers.append(
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                cache=copy.deepcopy(cache),
                max_new_tokens=8,
                do_sample=False,
            )[0].tolist()
        )
        assert cache.get_seq_length() == prefix.shape[1]
    assert answers[0] == answers[2] != answers[1]


def test_a_folder_that_is_neither(tmp_path):
    with pytest.raises(ValueError, match="neither an artifact of ours nor a model's folder"):
        load(str(tmp_path))
