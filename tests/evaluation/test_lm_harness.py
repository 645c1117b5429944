"""Our class in lm-eval: its answers and scores against lm-eval's own class and slow loops."""

import inspect
import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lm_eval._cli.utils import key_val_to_dict
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tests.evaluation.lm_models import letters, save
from transformers import AutoModelForCausalLM

from zoomkv.caches.registry import names, options_of
from zoomkv.cli.parser import option
from zoomkv.evaluation import lm_harness
from zoomkv.evaluation.lm_harness import ZoomKVLM
from zoomkv.evaluation.lm_stopping import StopStrings, without_summaries
from zoomkv.export.artifact import Artifact
from zoomkv.generation import Generator, load
from zoomkv.spans.thoughts import (
    BEGIN_OF_SUMMARY,
    END_OF_SUMMARY,
    SUMMARY_INSTRUCTION,
    Delimiters,
)

PROMPTS = [
    "Question: what is 2 + 2?\nAnswer:",
    "A much longer prompt that names many things: a boat, a lamp, a river, and the way home.",
    "Why?",
    "One, two, three, four, five.",
    "The bus leaves at nine. When does it leave?",
]
BINDING = {"policy": "streaming_llm", "budget": 16, "n_sink": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def summarising(tmp_path_factory):
    return save(tmp_path_factory.mktemp("summarising"), summaries=True)


def theirs(folder, **options):
    return HFLM(pretrained=folder, device="cpu", dtype="float32", **options)


def ask(lm, prompts=PROMPTS, task="t", **settings):
    settings = {"until": [], "max_gen_toks": 20, **settings}
    requests = [
        Instance("generate_until", {}, (prompt, settings), 0, (task, number, 1))
        for number, prompt in enumerate(prompts)
    ]
    return lm.generate_until(requests, disable_tqdm=True)


def score(lm, pairs, task="t"):
    requests = [
        Instance("loglikelihood", {}, pair, 0, (task, number, 1))
        for number, pair in enumerate(pairs)
    ]
    return lm.loglikelihood(requests, disable_tqdm=True)


def alone(folder, prompt, tokens=20, policy="full", **options):
    generator = Generator(*load(folder), policy, chat=False, **options)
    return generator.generate(prompt, tokens)[0].text


# -- answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 3])
def test_full_answers_as_their_class_does(folder, batch_size):
    expected = ask(theirs(folder, batch_size=1))
    assert len(set(expected)) == len(PROMPTS)
    assert ask(ZoomKVLM(folder, batch_size=batch_size)) == expected


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_a_policy_answers_in_batches_as_it_answers_alone(folder, batch_size):
    expected = [alone(folder, prompt, **BINDING) for prompt in PROMPTS]
    assert expected != [alone(folder, prompt) for prompt in PROMPTS]
    assert ask(ZoomKVLM(folder, batch_size=batch_size, **BINDING)) == expected


def test_every_batch_has_a_new_cache_that_knows_its_prompt(folder, monkeypatch):
    lm = ZoomKVLM(folder, batch_size=2, **BINDING)
    made, new_cache = [], lm.new_cache

    def watched():
        made.append(new_cache())
        return made[-1]

    monkeypatch.setattr(lm, "new_cache", watched)
    ask(lm)
    assert len(made) == 3 and len({id(cache) for cache in made}) == 3
    # The longest first, so the prompts of a batch are of like length; the last token isn't fed.
    by_length = sorted(map(len, PROMPTS), reverse=True)
    batches = [by_length[:2], by_length[2:4], by_length[4:]]
    assert [cache.seen for cache in made] == [max(batch) + 19 for batch in batches]
    assert [sorted(cache.lengths.tolist(), reverse=True) for cache in made] == [
        [length + 19 for length in batch] for batch in batches
    ]


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("width", [1, 3])
def test_stop_strings_cut_as_theirs_do(folder, batch_size, width):
    whole = ask(ZoomKVLM(folder))
    until = [whole[0][7 : 7 + width], whole[3][4 : 4 + width]]
    expected = ask(theirs(folder), until=until)
    assert [len(text) for text in expected] != [len(text) for text in whole]
    assert ask(ZoomKVLM(folder, batch_size=batch_size), until=until) == expected


def test_a_row_that_a_stop_string_has_ended_stores_nothing_more(folder, monkeypatch):
    whole = ask(ZoomKVLM(folder), PROMPTS[:2])
    stop = whole[0][1:4]
    assert stop not in whole[0][:3] and stop not in whole[1]
    lm = ZoomKVLM(folder, batch_size=2)
    cache = lm.new_cache()
    monkeypatch.setattr(lm, "new_cache", lambda: cache)
    first, second = ask(lm, PROMPTS[:2], until=[stop])
    assert (first, second) == (whole[0][:1], whole[1])
    # Four tokens end with the stop string; behind them one padding id is read, which ends the row.
    stored = dict(zip(sorted(map(len, PROMPTS[:2])), sorted(cache.lengths.tolist()), strict=True))
    assert stored == {len(PROMPTS[0]): len(PROMPTS[0]) + 5, len(PROMPTS[1]): len(PROMPTS[1]) + 19}
    assert lm.get_model_info()["zoomkv"]["memory"]["t"]["tokens"] == 4 + 20


def test_the_prompt_holds_no_stop_string(folder):
    whole = ask(ZoomKVLM(folder), ["stop here"])[0]
    assert ask(ZoomKVLM(folder), ["stop here"], until=["stop", "here" + whole[:1]])[0] == whole


def test_sampling_reaches_the_model(folder, monkeypatch):
    lm = ZoomKVLM(folder)
    seen = {}

    def generate(**settings):
        seen.update(settings)
        return settings["input_ids"]

    monkeypatch.setattr(lm.model, "generate", generate)
    ask(lm, ["Why?"], do_sample=True, temperature=0.6, top_p=0.95, max_gen_toks=300)
    assert (seen["do_sample"], seen["temperature"], seen["top_p"]) == (True, 0.6, 0.95)
    assert seen["max_new_tokens"] == 300
    ask(lm, ["Why?"], temperature=1, do_sample=False, max_gen_toks=7)
    assert (seen["do_sample"], seen["temperature"], seen["max_new_tokens"]) == (False, None, 7)


def test_sampled_answers_are_those_of_the_seed(folder):
    lm = ZoomKVLM(folder, **BINDING)
    sampling = {"do_sample": True, "temperature": 1.5, "top_p": 0.95}
    generator = Generator(*load(folder), chat=False, **BINDING)
    torch.manual_seed(3)
    expected = generator.generate(PROMPTS[0], 20, **sampling)[0].text
    torch.manual_seed(3)
    assert ask(lm, PROMPTS[:1], **sampling) == [expected]
    torch.manual_seed(4)
    assert ask(lm, PROMPTS[:1], **sampling) != [expected]


@pytest.mark.parametrize("mark", ["id", "text"])
def test_a_thinking_models_answer_begins_behind_its_thought(folder, mark):
    whole = ask(ZoomKVLM(folder), PROMPTS[:1])[0]
    letter = next(letter for letter in whole[3:] if letter.strip())
    token = letters().convert_tokens_to_ids(letter) if mark == "id" else letter
    lm = ZoomKVLM(folder, think_end_token=token, enable_thinking=True)
    assert ask(lm, PROMPTS[:1])[0] == whole.rsplit(letter, 1)[1].lstrip()
    with pytest.raises(ValueError, match="think_end_token is required"):
        ZoomKVLM(folder, enable_thinking=True)


# -- summaries ----------------------------------------------------------------------------------

B, E = BEGIN_OF_SUMMARY, END_OF_SUMMARY


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("One.\n\n{B}1{E}\n\nTwo.\n\n{B}2{E}\n\nIt is 3.", "One.\n\nTwo.\n\nIt is 3."),
        ("It is 3.", "It is 3."),
        ("One.{B}1{E} Two.", "One. Two."),
        ("{B}1{E}\n\nTwo.", "\n\nTwo."),
        ("One.\n\n{B}1 and not clo", "One.\n\n"),
        ("One.\n\n{B}{E}\n\nTwo.", "One.\n\n\n\nTwo."),
        ("One.{E} Two.", "One. Two."),
        ("<summary>1</summary> Two.", "<summary>1</summary> Two."),
    ],
)
def test_summaries_are_taken_out_by_their_ids(summarising, written, expected):
    lm = ZoomKVLM(summarising)
    ids = lm.tokenizer.encode(written.replace("{B}", B).replace("{E}", E))
    assert lm.tok_decode(ids) == expected
    kept = ZoomKVLM(summarising, keep_summaries=True)
    assert kept.tok_decode(ids) == kept.tokenizer.decode(ids, skip_special_tokens=True)


LETTERS = st.text("ab 1.", min_size=1, max_size=6).filter(str.strip)


@given(parts=st.lists(st.tuples(LETTERS, LETTERS), max_size=4), solution=LETTERS)
def test_what_was_rendered_with_summaries_reads_as_without(parts, solution):
    tokenizer = letters(summaries=True)
    written = "".join(f"{text}\n\n{B}{summary}{E}\n\n" for text, summary in parts) + solution
    plain = "".join(f"{text}\n\n" for text, _ in parts) + solution
    read = without_summaries(
        tokenizer.encode(written), Delimiters.special(tokenizer), tokenizer.decode
    )
    # A paragraph's own leading blanks merge with the blank line before it.
    assert [line.strip() for line in read.split("\n")] == [
        line.strip() for line in plain.split("\n")
    ]


def test_textual_summaries_are_taken_out_too(folder):
    lm = ZoomKVLM(folder, textual_summaries=True)
    ids = lm.tokenizer.encode("One.\n\n<summary>1</summary>\n\nTwo.")
    assert lm.tok_decode(ids) == "One.\n\nTwo."


def test_no_stop_string_counts_within_a_summary(summarising):
    tokenizer = letters(summaries=True)
    lm = ZoomKVLM(summarising)
    prompt = torch.tensor([tokenizer.encode("Q:")])
    written = tokenizer.encode(f"One.{B}Q: 1{E} Q: Two")
    stops = StopStrings(tokenizer, ["Q:"], [1], 2, 1, lm._visible())
    careless = StopStrings(tokenizer, ["Q:"], [1], 2, 1)
    for size in range(1, len(written) + 1):
        ids = torch.cat([prompt, torch.tensor([written[:size]])], 1)
        stops(ids, None)
        careless(ids, None)
    outside = len(written) - len(" Two")
    assert stops.lengths == [outside] and careless.lengths == [7]


def test_rows_end_one_by_one_and_special_tokens_end_them_too(summarising):
    tokenizer = letters(summaries=True)
    rows = ["abcd", f"ab{E}d", "ab<end><pad>"]
    ids = torch.tensor([tokenizer.encode(row) for row in rows])
    stops = StopStrings(tokenizer, ["cd", E], [1], 0, 3)
    told = [stops(ids[:, :size], None).tolist() for size in range(1, 5)]
    assert told == [[False] * 3, [False] * 3, [False, True, True], [True] * 3]
    assert stops.lengths == [4, 3, 3]


# -- log-likelihood -----------------------------------------------------------------------------

PAIRS = [
    ("Question: what is 2 + 2?\nAnswer:", " 4"),
    ("Question: what is 2 + 2?\nAnswer:", " 22 or so"),
    ("The bus leaves at nine. When does it leave?", " At nine."),
    ("Question: what is 2 + 2?\nAnswer:", " 5"),
    ("Why?", "x"),
    ("", "From nothing"),
]


def close(got, expected):
    assert [greedy for _, greedy in got] == [greedy for _, greedy in expected]
    torch.testing.assert_close(
        torch.tensor([value for value, _ in got]),
        torch.tensor([value for value, _ in expected]),
        atol=1e-4,
        rtol=0,
    )


@pytest.mark.parametrize("batch_size", [1, 2, 6])
def test_full_scores_as_their_class_does(folder, batch_size):
    greedy = (PROMPTS[0], ask(ZoomKVLM(folder), PROMPTS[:1], max_gen_toks=6)[0])
    pairs = [*PAIRS, greedy]
    expected = score(theirs(folder), pairs)
    assert [is_greedy for _, is_greedy in expected].count(True) == 1
    close(score(ZoomKVLM(folder, batch_size=batch_size), pairs), expected)


def test_long_contexts_lose_their_beginning_as_in_their_class(folder):
    options = {"max_length": 24}
    close(score(ZoomKVLM(folder, **options), PAIRS), score(theirs(folder, **options), PAIRS))
    with pytest.raises(ValueError, match="continuation of 26 tokens"):
        score(ZoomKVLM(folder, **options), [("a", "b" * 26)])


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(
    "policy",
    [
        BINDING,
        {"policy": "snapkv", "budget": 20, "window": 4, "recent": 4, "count_prefix": True},
        {"policy": "sekv", "budget": 0.5, "window": 4, "width": 8, "min_span": 4, "max_span": 8},
    ],
    ids=lambda options: options["policy"],
)
def test_a_policy_scores_what_a_plain_loop_and_a_masked_full_cache_say(folder, policy, batch_size):
    lm = ZoomKVLM(folder, batch_size=batch_size, **policy)
    contexts = [PROMPTS[1], PROMPTS[1], PROMPTS[4]]
    pairs = list(zip(contexts, [" home, they say.", " a boat", " At nine o'clock."], strict=True))
    loops = [_loop(lm, *pair) for pair in pairs]
    got = score(lm, pairs)
    close(got, [(value, False) for value, _ in loops])
    assert (
        max(abs(a - b) for (a, _), (b, _) in zip(got, score(ZoomKVLM(folder), pairs), strict=True))
        > 1e-2
    )
    if policy["policy"] != "sekv":  # which reads rows that it has rebuilt
        close(
            got,
            [
                (_masked(folder, lm, *pair, seen), False)
                for pair, (_, seen) in zip(pairs, loops, strict=True)
            ],
        )


def _ids(lm, text):
    return lm.tokenizer.encode(text, add_special_tokens=False)


@torch.inference_mode()
def _loop(lm, context, continuation):
    """One pair alone: the context as a prompt, then token by token; and what could be read."""
    context, continuation = _ids(lm, context), _ids(lm, continuation)
    cache = lm.new_cache()
    cache.set_eos([])
    cache.expect_prompt(len(context))
    logits = lm.model(torch.tensor([context]), cache=cache).logits
    total, readable = 0.0, []
    for token in continuation:
        total += float(logits[0, -1].log_softmax(-1)[token])
        # A policy may make room when the step begins; what it reads is told while it runs.
        logits, seen = _stepped(lm, cache, token)
        readable.append(seen)
    return total, readable


def _stepped(lm, cache, token):
    seen = []
    prepare = cache.prepare

    def told(step):
        prepare(step)
        seen.append([cache.readable(layer)[0] for layer in range(len(cache.layers))])

    cache.prepare = told
    try:
        logits = lm.model(torch.tensor([[token]]), cache=cache).logits
    finally:
        del cache.prepare
    return logits, seen[0]


@torch.inference_mode()
def _masked(folder, lm, context, continuation, readable):
    """One dense forward in which each continuation token sees what the policy let it read."""
    context, continuation = _ids(lm, context), _ids(lm, continuation)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    size, start = len(context) + len(continuation), len(context)
    heads = model.config.num_attention_heads
    seen = torch.ones(size, size, dtype=torch.bool).tril().expand(2, heads, size, size).clone()
    for step, layers in enumerate(readable):
        for layer, rows in enumerate(layers):  # [1 or Hkv, longest]
            row = rows[:, : start + step].repeat_interleave(heads // len(rows), 0)
            seen[layer, :, start + step, : start + step] = row
    assert not seen.all((0, 1)).tril().equal(torch.ones(size, size, dtype=torch.bool).tril())
    handles = [
        layer.self_attn.register_forward_pre_hook(_mask_of(seen[number]), with_kwargs=True)
        for number, layer in enumerate(model.model.layers)
    ]
    logits = model(torch.tensor([context + continuation])).logits[0].log_softmax(-1)
    for handle in handles:
        handle.remove()
    return sum(float(logits[start - 1 + i, token]) for i, token in enumerate(continuation))


def _mask_of(seen):
    def hook(module, args, kwargs):
        bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        return args, kwargs | {"attention_mask": bias[None]}

    return hook


def test_contexts_that_recur_are_read_once(folder, monkeypatch):
    lm = ZoomKVLM(folder, batch_size=3)
    read = []
    forward = type(lm.model).forward

    def watched(self, input_ids, **kwargs):
        read.append(tuple(input_ids.shape))
        return forward(self, input_ids, **kwargs)

    monkeypatch.setattr(type(lm.model), "forward", watched)
    same = PROMPTS[0]
    score(lm, [(same, "ab"), (same, "cd"), (same, "e")])
    assert read == [(1, len(same)), (3, 1)]


def test_a_row_that_is_scored_to_its_end_stores_nothing_more(folder, monkeypatch):
    lm = ZoomKVLM(folder, batch_size=3)
    cache = lm.new_cache()
    monkeypatch.setattr(lm, "new_cache", lambda: cache)
    pairs = [("same", "a"), ("same", "bcd<end>e"), ("one more", "fg")]
    score(lm, pairs)
    # The last token of a continuation is scored, not read; an end of text within one is a token.
    assert sorted(cache.lengths.tolist()) == [4, 4 + 4, 8 + 1]


def test_scores_that_no_policy_has_touched_say_so(folder, caplog):
    with caplog.at_level(logging.WARNING, "lm_eval.zoomkv"):
        score(ZoomKVLM(folder, **BINDING), PAIRS[:3])
        score(ZoomKVLM(folder), PAIRS)
        assert not caplog.messages
        score(ZoomKVLM(folder, policy="h2o", budget=16), PAIRS)
    assert len(caplog.messages) == 1 and "policy 'h2o' left all contexts whole" in caplog.text


def test_what_makes_no_sense_is_refused(folder, summarising):
    lm = ZoomKVLM(summarising, policy="zoomr", window=8)
    with pytest.raises(ValueError, match="task 't': policy 'zoomr' drops nothing but what"):
        score(lm, PAIRS)
    rolling = [Instance("loglikelihood_rolling", {}, ("text",), 0, ("wiki", 0, 1))]
    with pytest.raises(ValueError, match="task 'wiki': the perplexity of a whole text"):
        ZoomKVLM(folder).loglikelihood_rolling(rolling)


# -- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "zoomer"}, "unknown policy 'zoomer': did you mean 'zoomr'"),
        ({"policy": "h2o", "budgte": 4}, "--model_args budgte: no option of policy 'h2o' nor of"),
        ({"policy": "h2o", "budgte": 4}, "did you mean 'budget'"),
        ({"precison": "bf16"}, "did you mean 'precision'"),
        ({"dtype": "bfloat16"}, "write precision=bf16"),
        ({"batch_size": "auto"}, "--batch_size auto: give a whole number"),
        ({"keep_summaries": "no"}, "--model_args keep_summaries=no: write true or false"),
        ({"textual_summaries": 0}, "--model_args textual_summaries=0: write true or false"),
        ({"batch_size": 0}, "--batch_size 0: give a whole number"),
        ({"max_batch_size": 8}, "--max_batch_size goes with"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(map(str, value.items())),
)
def test_bad_settings_are_told_before_the_model_is_loaded(options, message, monkeypatch):
    monkeypatch.setattr(lm_harness, "load", lambda *a: pytest.fail("loaded"))
    with pytest.raises(ValueError) as error:
        ZoomKVLM("nowhere", **options)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_bad_values_are_told_at_once(folder):
    with pytest.raises(ValueError, match="policy 'streaming_llm': budget=7.5: a share"):
        ZoomKVLM(folder, policy="streaming_llm", budget=7.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_gen_toks": 5000}, "task 't' asks for 5000 new tokens, and the model has 2048"),
        ({"do_sample": True, "temperature": 0.0}, "do_sample=true goes with a temperature"),
        ({"num_beams": 2}, "no beams"),
    ],
    ids=["length", "temperature", "beams"],
)
def test_what_a_task_can_not_have_is_refused(folder, settings, message):
    with pytest.raises(ValueError, match=message):
        ask(ZoomKVLM(folder), **settings)


def test_a_model_that_must_be_told_to_summarise_is_told(folder):
    lm = ZoomKVLM(folder, textual_summaries=True)
    user = {"role": "user", "content": "Why?"}
    told = lm.apply_chat_template([user])
    assert told == f"[system]{SUMMARY_INSTRUCTION}[user]Why?[assistant]"
    told = lm.apply_chat_template([{"role": "system", "content": "Be brief."}, user])
    assert told == f"[system]Be brief.\n\n{SUMMARY_INSTRUCTION}[user]Why?[assistant]"
    assert len(ask(lm, [told])) == 1
    with pytest.raises(ValueError, match="add --apply_chat_template"):
        ask(lm, ["Why?"])
    assert ZoomKVLM(folder).apply_chat_template([user]) == "[user]Why?[assistant]"


def test_no_policy_has_an_option_that_the_model_has():
    parameters = inspect.signature(ZoomKVLM.__init__).parameters.values()
    own = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    taken = {name: sorted(own & set(options_of(name))) for name in names()}
    assert not any(taken.values()), taken


@pytest.mark.parametrize("text", ["64", "0.1", "true", "false", "None", "null", "exact", "True"])
def test_options_are_typed_as_our_own_command_types_them(text, folder, monkeypatch):
    seen = []
    monkeypatch.setattr(lm_harness, "_check_names", lambda policy, options: seen.append(options))
    monkeypatch.setattr(lm_harness, "load", lambda *a: pytest.fail("far enough"))
    with pytest.raises(pytest.fail.Exception):
        ZoomKVLM(folder, **key_val_to_dict(f"window={text}"))
    _, expected = option(f"window={text}")
    assert seen == [{"window": expected}] and type(seen[0]["window"]) is type(expected)


def test_an_artifact_brings_its_policy_and_options(summarising, monkeypatch):
    artifact = Artifact("zoomr", summarising, {}, {}, options={"window": 8, "top_k": 1})
    monkeypatch.setattr(lm_harness, "is_artifact", lambda path: True)
    monkeypatch.setattr(lm_harness, "read_artifact", lambda path: artifact)
    lm = ZoomKVLM(summarising, window=9)
    assert (lm.policy, lm.options) == ("zoomr", {"window": 9, "top_k": 1})
    other = ZoomKVLM(summarising, policy="h2o", budget=32)
    assert (other.policy, other.options) == ("h2o", {"budget": 32})


def test_the_device_that_their_command_asks_for_may_be_missing(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ZoomKVLM(folder, device="cuda:0").device.type == "cpu"
    with pytest.raises(ValueError, match="device 'cup'"):
        ZoomKVLM(folder, device="cup")


# -- memory -------------------------------------------------------------------------------------


def test_memory_is_reported_by_task(folder, monkeypatch):
    lm = ZoomKVLM(folder, batch_size=2, **BINDING)
    steps = {}
    generate = lm.model.generate

    def watched(**settings):
        cache, counts = settings["cache"], steps.setdefault(lm._task, [])
        criteria = settings["stopping_criteria"]
        inner = criteria[0].__class__.__call__

        class Watching(criteria[0].__class__):
            def __call__(self, *args, **kwargs):
                counts.append((cache.footprint().device_bytes, int(cache.lengths.sum())))
                return inner(self, *args, **kwargs)

        criteria[0] = Watching(criteria[0].memory, cache)
        return generate(**settings)

    monkeypatch.setattr(lm.model, "generate", watched)
    requests = [
        Instance("generate_until", {}, (prompt, {"until": [], "max_gen_toks": 20}), 0, (task, 0, 1))
        for task, prompt in zip("abaab", PROMPTS, strict=True)
    ]
    answers = lm.generate_until(requests, disable_tqdm=True)
    assert answers == ask(ZoomKVLM(folder, **BINDING))
    memory = lm.get_model_info()["zoomkv"]["memory"]
    assert list(memory) == ["a", "b"]
    row = 2 * 2 * 2 * 8 * 4  # K and V, layers, KV heads, head_dim, bytes
    for task, figures in memory.items():
        held, rows = zip(*steps[task], strict=True)
        prompts = [p for t, p in zip("abaab", PROMPTS, strict=True) if t == task]
        assert figures["answers"] == figures["truncated"] == len(prompts)
        assert figures["tokens"] == 20 * len(prompts)
        assert figures["prompt_tokens"] == sum(map(len, prompts))
        assert figures["device_bytes_mean"] == sum(held) / len(held)
        assert figures["device_bytes_peak"] == max(held)
        assert figures["full_bytes_mean"] == row * sum(rows) / len(rows)
        assert figures["full_bytes_peak"] == row * max(rows)
        assert figures["share_of_full"] == sum(held) / (row * sum(rows)) < 0.7
        assert figures["bytes_to_device"] == figures["bytes_to_host"] == 0


def test_the_full_cache_is_all_of_itself(folder):
    lm = ZoomKVLM(folder)
    ask(lm, max_gen_toks=60)
    score(lm, PAIRS, task="scored")
    memory = lm.get_model_info()["zoomkv"]["memory"]
    assert 1 <= memory["t"]["share_of_full"] < 1.5  # the slack of its buffers
    assert memory["scored"]["tokens"] == sum(len(continuation) for _, continuation in PAIRS)
    assert memory["scored"]["truncated"] == 0
    moving = ZoomKVLM(folder, policy="full_offloaded")
    ask(moving)
    figures = moving.get_model_info()["zoomkv"]["memory"]["t"]
    assert figures["bytes_to_host"] > 0 and figures["bytes_to_device"] > 0


def test_only_answers_that_were_cut_off_count_as_such(folder):
    whole = ask(ZoomKVLM(folder), PROMPTS[:2])
    lm = ZoomKVLM(folder, batch_size=2)
    stop = whole[0][3:6]
    assert stop not in whole[1]
    ask(lm, PROMPTS[:2], until=[stop])
    figures = lm.get_model_info()["zoomkv"]["memory"]["t"]
    assert (figures["answers"], figures["truncated"]) == (2, 1)
