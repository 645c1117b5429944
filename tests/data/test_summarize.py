"""``summarize`` on the wire, with a local model, and killed half-way."""

import contextlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from zoomkv.cli import main
from zoomkv.data.summarize import (
    INSTRUCTION,
    EndpointSummarizer,
    Failure,
    Journal,
    LocalSummarizer,
    summarize_file,
)
from zoomkv.data.traces import Segment, Trace, read_traces, write_traces

LONG = "word " * 60


class Endpoint:
    """An OpenAI-compatible server that notes what it was sent and answers as it is told to."""

    def __init__(self):
        self.bodies: list[dict] = []
        self.paths: Counter[str] = Counter()
        self.answer = lambda paragraph, tries: (200, f"summary of {paragraph.split()[0]}")
        self.before = lambda paragraph: None
        self.most_at_once = 0
        self._at_once = 0
        self._tries: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def paragraphs(self) -> list[str]:
        return [body["messages"][-1]["content"] for body in self.bodies]

    def reply(self, path: str, body: dict) -> tuple[int, dict]:
        paragraph = body["messages"][-1]["content"]
        with self._lock:
            self.bodies.append(body)
            self.paths[path] += 1
            self._tries[paragraph] += 1
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        self.before(paragraph)
        status, text = self.answer(paragraph, self._tries[paragraph])
        with self._lock:
            self._at_once -= 1
        if status != 200:
            return status, {"error": {"message": text}}
        finish = "length" if text == "cut" else "stop"
        message = {"role": "assistant", "content": text}
        return 200, {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        }


@pytest.fixture
def endpoint(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    endpoint = Endpoint()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, reply = endpoint.reply(self.path, body)
            content = json.dumps(reply).encode()
            with contextlib.suppress(ConnectionError):  # a client that was killed
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Retry-After-Ms", "1")
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *arguments):
            pass

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request, client_address):
            pass  # a client that was killed

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    endpoint.url = f"http://127.0.0.1:{server.server_port}/v1"
    yield endpoint
    server.shutdown()
    server.server_close()


def trace(*names: str, **others) -> Trace:
    return Trace(
        "the problem", tuple(Segment(f"{n} {LONG}".strip()) for n in names), "the end", **others
    )


def summaries(path) -> list[list[str | None]]:
    return [[segment.summary for segment in trace.segments] for trace in read_traces(path)]


def test_a_request_holds_the_instruction_and_one_paragraph(endpoint, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    short = Trace("p", (Segment(f"c {LONG}"), Segment("so it is")), "s", answer="4", id="x")
    done = Trace("p", (Segment("short", "given"), Segment(f"d {LONG}", "given too")), "s")
    write_traces(source, [trace("a", "b"), short, done])
    report = summarize_file(source, target, EndpointSummarizer(endpoint.url, "tiny"))
    assert sorted(endpoint.bodies, key=lambda body: body["messages"][1]["content"]) == [
        {
            "model": "tiny",
            "messages": [
                {"role": "system", "content": INSTRUCTION},
                {"role": "user", "content": paragraph},
            ],
            "max_tokens": 256,
            "temperature": 0,
        }
        for paragraph in (f"a {LONG}".strip(), f"b {LONG}".strip(), f"c {LONG}")
    ]
    assert endpoint.paths == {"/v1/chat/completions": 3}
    assert summaries(target) == [
        ["summary of a", "summary of b"],
        ["summary of c", None],
        ["given", "given too"],
    ]
    unsummarised = [
        Trace(t.problem, tuple(Segment(s.text) for s in t.segments), t.solution, t.answer, t.id)
        for t in read_traces(target)
    ]
    assert unsummarised[:2] == list(read_traces(source))[:2]
    assert (report.rows, report.summaries, report.failed) == (3, 3, [])
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.jsonl"]


def test_paragraphs_are_asked_for_at_once_and_only_once(endpoint, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_traces(source, [trace("a", "b", "c"), trace("a", "d", "e"), trace("f", "g", "b")])
    together = threading.Barrier(3, timeout=20)
    endpoint.before = lambda paragraph: together.wait() if paragraph[0] in "abcdef" else None
    progress = []
    report = summarize_file(
        source,
        target,
        EndpointSummarizer(endpoint.url, "tiny", concurrency=3),
        progress=lambda done, total: progress.append((done, total)),
    )
    assert sorted(paragraph[0] for paragraph in endpoint.paragraphs) == list("abcdefg")
    assert endpoint.most_at_once == 3
    assert report.summaries == 7
    assert progress == [(done, 7) for done in range(8)]
    assert summaries(target)[2] == ["summary of f", "summary of g", "summary of b"]


def test_busy_answers_are_tried_again(endpoint, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_traces(source, [trace("a", "b", "c")])
    statuses = {"a": [429, 429, 200], "b": [503, 500, 200], "c": [200]}
    endpoint.answer = lambda paragraph, tries: (statuses[paragraph[0]][tries - 1], "fine")
    report = summarize_file(source, target, EndpointSummarizer(endpoint.url, "tiny", retries=2))
    assert Counter(paragraph[0] for paragraph in endpoint.paragraphs) == {"a": 3, "b": 3, "c": 1}
    assert (report.failed, summaries(target)) == ([], [["fine"] * 3])


def test_what_fails_is_named_and_asked_for_again(endpoint, tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_traces(source, [trace("a", "b"), trace("c"), trace("d", "e"), trace("f")])
    bad = {"b": (503, "busy"), "d": (400, "no"), "e": (200, " \n"), "f": (200, "cut")}
    endpoint.answer = lambda paragraph, tries: bad.get(paragraph[0], (200, "fine"))
    command = ["summarize", str(source), str(target), "--endpoint", endpoint.url]
    command += ["--model", "tiny", "--retries", "1"]
    assert main(command) == 1
    captured = capsys.readouterr()
    assert captured.err.splitlines()[:4] == [
        f"{source}:1: paragraph 2: status 503",
        f"{source}:3: paragraph 1: status 400",
        f"{source}:3: paragraph 2: the summary is empty",
        f"{source}:4: paragraph 1: the summary is longer than 256 tokens",
    ]
    assert captured.out == f"{target}: 1 rows, 2 new summaries\n"
    assert summaries(target) == [["fine"]]
    assert Counter(paragraph[0] for paragraph in endpoint.paragraphs)["b"] == 2

    endpoint.bodies.clear()
    endpoint.answer = lambda paragraph, tries: (200, "now")
    assert main(command) == 0
    assert sorted(paragraph[0] for paragraph in endpoint.paragraphs) == ["b", "d", "e", "f"]
    assert summaries(target) == [["fine", "now"], ["fine"], ["now", "now"], ["now"]]
    assert not (tmp_path / "out.jsonl.journal").exists()

    assert main(command) == 2
    assert capsys.readouterr().err == (
        f"zoomkv: {target} exists already: remove it or choose another name\n"
    )


@pytest.mark.parametrize(
    ("status", "line"),
    [
        (401, "refuses the key (status 401): set OPENAI_API_KEY"),
        (403, "refuses the key (status 403): set OPENAI_API_KEY"),
        (404, "doesn't know the address or the model 'tiny': check --endpoint and --model"),
    ],
)
def test_a_wrong_key_or_model_is_one_clear_line(endpoint, tmp_path, capsys, status, line):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_traces(source, [trace(*"abcdefghijkl")])
    endpoint.answer = lambda paragraph, tries: (status, "no")
    arguments = ["--endpoint", endpoint.url, "--model", "tiny", "--parallel", "2"]
    assert main(["summarize", str(source), str(target), *arguments]) == 2
    assert capsys.readouterr().err == f"zoomkv: {endpoint.url} {line}\n"
    assert len(endpoint.bodies) <= 2
    assert not target.exists()


def test_an_endpoint_that_is_not_there(tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_traces(source, [trace("a")])
    url = "http://127.0.0.1:9/v1"
    arguments = ["--endpoint", url, "--model", "tiny", "--retries", "1"]
    assert main(["summarize", str(source), str(target), *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"zoomkv: nothing answers at {url}: run the same")


def test_a_slow_answer_is_a_failure_of_its_paragraph(endpoint, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_traces(source, [trace("a"), trace("b")])
    over = threading.Event()
    endpoint.before = lambda paragraph: over.wait(20) if paragraph[0] == "a" else None
    summarizer = EndpointSummarizer(endpoint.url, "tiny", retries=1, timeout=0.3)
    report = summarize_file(source, target, summarizer)
    over.set()
    assert report.failed == [f"{source}:1: paragraph 1: no answer in time"]
    assert summaries(target) == [["summary of b"]]


def test_a_bad_row_stops_before_anything_is_asked(endpoint, tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_traces(source, [trace("a")])
    with source.open("a") as file:
        file.write('{"problem": "p"}\n')
    command = ["summarize", str(source), str(target), "--endpoint", endpoint.url, "--model", "m"]
    assert main(command) == 2
    assert capsys.readouterr().err == f"zoomkv: {source}:2: 'thought' is missing\n"
    assert endpoint.bodies == [] and os.listdir(tmp_path) == ["in.jsonl"]
    assert main([*command, "--skip-bad"]) == 0
    assert "1 x 'thought' is missing" in capsys.readouterr().err


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_killed_and_started_again(endpoint, tmp_path, how):
    """However a run ends, no summary that was kept is asked for again, and no row is lost."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    traces = [trace(*(f"{row}-{number}" for number in range(5))) for row in range(8)]
    write_traces(source, traces)
    command = [sys.executable, "-m", "zoomkv", "summarize", str(source), str(target)]
    command += ["--endpoint", endpoint.url, "--model", "tiny", "--parallel", "3"]
    hold = threading.Event()
    served = threading.Semaphore(12)  # then the server stops answering
    endpoint.before = lambda paragraph: served.acquire(timeout=0) or hold.wait(60)
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        # What a shell starts in the background ignores it, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    journal = tmp_path / "out.jsonl.journal"
    deadline = time.monotonic() + 60
    while (
        len(endpoint.bodies) < 12 + 3  # three are under way, the others kept
        or not journal.exists()
        or journal.read_bytes().count(b"\n") < 12
    ):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(how)
    _, said = process.communicate(timeout=120)  # while three answers are still awaited
    assert (process.returncode, said) in [(-signal.SIGKILL, b""), (130, b"zoomkv: interrupted\n")]
    assert not target.exists()
    asked = list(endpoint.paragraphs)
    assert len(asked) == 12 + 3

    with journal.open("ab") as file:
        file.write(b'["torn')  # what a kill in the middle of a write leaves
    endpoint.bodies.clear()
    hold.set()
    endpoint.before = lambda paragraph: None
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert sorted(endpoint.paragraphs + asked[:12]) == sorted(
        segment.text for trace in traces for segment in trace.segments
    )
    assert summaries(target) == [
        [f"summary of {row}-{number}" for number in range(5)] for row in range(8)
    ]
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.jsonl"]


def test_a_torn_line_is_cut_off_before_the_journal_grows(tmp_path):
    path = tmp_path / "journal"
    with Journal(path, "tiny") as journal:
        journal.add("a", "1")
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:-1])
    with Journal(path, "tiny") as journal:
        assert journal["a"] == "1"
        journal.add("b", "2\u2028\n")
    with Journal(path, "tiny") as journal:
        assert (journal["a"], journal["b"], "c" in journal) == ("1", "2\u2028\n", False)
    with Journal(path, "other") as journal:
        assert "a" not in journal


def test_another_model_does_not_take_over_the_summaries(endpoint, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_traces(source, [trace("a", "b")])
    endpoint.answer = lambda paragraph, tries: (400 if paragraph[0] == "b" else 200, "first")
    summarize_file(source, target, EndpointSummarizer(endpoint.url, "one"))
    endpoint.answer = lambda paragraph, tries: (200, "second")
    summarize_file(source, target, EndpointSummarizer(endpoint.url, "two"))
    assert summaries(target) == [["second", "second"]]


def test_a_damaged_journal_is_named(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_traces(source, [trace("a")])
    (tmp_path / "out.jsonl.journal").write_text("nonsense\n")
    with pytest.raises(ValueError, match="out.jsonl.journal is damaged: remove it"):
        summarize_file(source, target, EndpointSummarizer("http://127.0.0.1:9/v1", "tiny"))


@pytest.fixture(scope="module")
def local():
    """A tiny random chat model over a vocabulary of letters, padding on the left."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = ["<pad>", "<end>", "<unk>", *map(chr, range(32, 127))]
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
        padding_side="left",
        chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}:",
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(letters),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=1.0,  # what is said depends on what was read
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval(), tokenizer


def test_local_batches_give_what_each_paragraph_gives_alone(local):
    model, tokenizer = local
    paragraphs = ["one", "a much longer paragraph of words", "two of them", "x"]
    model.generation_config.eos_token_id = [1, *range(3, 12)]  # random models rarely say <end>
    try:
        batched = dict(LocalSummarizer(model, tokenizer, "t", batch_size=3).summarize(paragraphs))
        alone = dict(LocalSummarizer(model, tokenizer, "t", batch_size=1).summarize(paragraphs))
    finally:
        model.generation_config.eos_token_id = 1
    assert batched == alone
    assert sorted(batched) == [0, 1, 2, 3]
    assert len(set(batched.values())) > 2, batched


def test_local_replies_end_at_the_end_token(local):
    model, tokenizer = local
    summarizer = LocalSummarizer(model, tokenizer, "t", max_tokens=5)
    prompts = []

    def generate(input_ids, attention_mask, max_new_tokens, **others):
        assert max_new_tokens == 5 and not others["do_sample"]
        kept = [ids[mask.bool()] for ids, mask in zip(input_ids, attention_mask, strict=True)]
        prompts.extend(tokenizer.decode(ids).replace(" ", "") for ids in kept)
        replies = torch.tensor([[40, 41, 1, 0, 0], [40, 41, 42, 43, 44], [1, 0, 0, 0, 0]])
        return torch.cat([input_ids, replies[: len(input_ids)]], dim=1)

    original, model.generate = model.generate, generate
    try:
        replies = dict(summarizer.summarize(["a", "bb", "ccc"]))
    finally:
        model.generate = original
    assert prompts == [f"{INSTRUCTION}{p}:".replace(" ", "") for p in ("a", "bb", "ccc")]
    assert replies[0].replace(" ", "") == tokenizer.decode([40, 41]).replace(" ", "")
    assert replies[1] == Failure("the summary is longer than 5 tokens")
    assert replies[2] == Failure("the summary is empty")


def test_a_model_without_a_chat_template_is_refused(local):
    model, tokenizer = local

    class Plain:
        chat_template = None

    with pytest.raises(ValueError, match="^base has no chat template"):
        LocalSummarizer(model, Plain(), "base")


def test_the_raw_sample_is_cut_into_paragraphs_worth_a_summary(endpoint, tmp_path):
    target = tmp_path / "out.jsonl"
    sample = Path(__file__).parents[2] / "data/samples/raw_traces.jsonl"
    report = summarize_file(sample, target, EndpointSummarizer(endpoint.url, "tiny"))
    assert report.failed == [] and report.rows == len(list(read_traces(sample)))
    by_id = {trace.id: trace.segments for trace in read_traces(target)}
    assert [len(by_id[name]) for name in ("tank", "primes", "train")] == [4, 5, 3]
    assert "```python" in by_id["primes"][3].text and "\n\n\nprint" in by_id["primes"][3].text
    assert by_id["tank"][3].summary is None  # "So 3 hours." needs none
    assert sum(segment.summary is None for segments in by_id.values() for segment in segments) == 3
