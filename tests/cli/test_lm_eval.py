"""``zoomkv lm-eval``: their command with our class, its configs, whole runs on local files."""

import importlib.util
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import lm_eval
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.tasks import TaskManager
from tests.evaluation.lm_models import save

from zoomkv.cli import main
from zoomkv.evaluation import lm_harness
from zoomkv.evaluation.lm_harness import ZoomKVLM
from zoomkv.generation import Generator, load

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs" / "eval"
LOCAL = ROOT / "tests" / "evaluation" / "lm_tasks"
THEIR_TASKS = Path(lm_eval.__file__).parent / "tasks"
FAMILIES = [
    "aime", "gpqa", "gsm8k", "humaneval", "infinitebench", "longbench", "mbpp", "minerva_math",
    "ruler",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """The local tasks, with lm-eval's own folder and the data's written into them."""
    folder = tmp_path_factory.mktemp("tasks")
    for source in LOCAL.glob("*.yaml"):
        text = source.read_text(encoding="utf-8")
        text = text.replace("LM_EVAL", str(THEIR_TASKS)).replace("HERE", str(LOCAL))
        (folder / source.name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def quick(monkeypatch):
    """lm-eval without its 10,000 other tasks and its list of packages, which take seconds each."""
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    monkeypatch.setattr(sys, "argv", ["pytest"])


def run(model, folder, tasks, out, *words, **arguments):
    given = ",".join(f"{name}={value}" for name, value in arguments.items())
    argv = ["lm-eval", "--model", model, "--model_args", f"pretrained={folder},{given}".strip(",")]
    argv += ["--include_path", str(tasks), "--output_path", str(out), "--log_samples", *words]
    code = main(argv)
    results, samples = {}, {}
    for path in sorted(out.rglob("*.json*")):
        if path.name.startswith("results"):
            results = json.loads(path.read_text(encoding="utf-8"))
        else:
            lines = path.read_text(encoding="utf-8").splitlines()
            task = path.name.removeprefix("samples_").rpartition("_")[0]
            samples[task] = [json.loads(line) for line in lines]
    return code, results, samples


# -- the command --------------------------------------------------------------------------------


def test_help_is_theirs_and_light():
    code = """if True:
        import sys
        from zoomkv.cli import main
        try:
            main(["lm-eval", *sys.argv[1:]])
        except SystemExit as done:
            assert not done.code
        heavy = {"torch", "transformers", "lightning", "datasets"} & set(sys.modules)
        assert not heavy, heavy
    """
    for words in (["--help"], ["run", "--help"]):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "usage: lm-eval" in done.stdout


def test_wrong_usage_is_told_by_their_parser(capsys, monkeypatch):
    words = ["pytest"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as done:
        main(["lm-eval", "--tasks", "gsm8k", "--no-such-option", "1"])
    assert done.value.code == 2
    assert "unrecognized arguments: --no-such-option" in capsys.readouterr().err
    assert sys.argv is words


def test_a_missing_lm_eval_is_told(capsys, monkeypatch):
    monkeypatch.setattr("zoomkv.evaluation.lm_command.find_spec", lambda name: None)
    assert main(["lm-eval", "--help"]) == 2
    assert capsys.readouterr().err == (
        "zoomkv: lm-eval is not installed; run: pip install 'zoomkv[eval]'\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "zoomer"}, "unknown policy 'zoomer': did you mean 'zoomr'"),
        ({"policy": "h2o", "budgte": 8}, "did you mean 'budget'"),
    ],
    ids=["policy", "option"],
)
def test_bad_model_args_are_one_line(
    arguments, message, folder, tasks, tmp_path, quick, capsys, monkeypatch
):
    monkeypatch.setattr(lm_harness, "load", lambda *a: pytest.fail("loaded"))
    code, _, _ = run("zoomkv", folder, tasks, tmp_path, "--tasks", "local_niah", **arguments)
    last = capsys.readouterr().err.splitlines()[-1]
    assert code == 2 and last.startswith("zoomkv: ") and message in last


# -- whole runs on local files ------------------------------------------------------------------


def test_full_gives_what_their_own_model_gives(folder, tasks, tmp_path, quick, capsys):
    names = ["local_gsm8k", "local_math500", "local_niah", "local_choice"]
    options = ["--tasks", *names, "--apply_chat_template", "--system_instruction", "Be brief."]
    theirs = run("hf", folder, tasks, tmp_path / "hf", *options, "--device", "cpu", dtype="float32")
    ours = run("zoomkv", folder, tasks, tmp_path / "ours", *options, "--batch_size", "2")
    assert ours[0] == theirs[0] == 0
    assert sorted(ours[2]) == sorted(theirs[2]) == sorted(names)
    for name in names:
        for mine, other in zip(ours[2][name], theirs[2][name], strict=True):
            assert mine["arguments"] == other["arguments"]
            if name == "local_choice":
                assert mine["acc"] == other["acc"]
                mine, other = (
                    [float(score[0][0]) for score in sample["resps"]] for sample in (mine, other)
                )
                torch.testing.assert_close(
                    torch.tensor(mine), torch.tensor(other), atol=1e-4, rtol=0
                )
            else:
                assert mine["resps"] == other["resps"] and len(mine["resps"][0][0]) > 5
        scores = [
            {k: v for k, v in results["results"][name].items() if k != "alias"}
            for results in (ours[1], theirs[1])
        ]
        assert scores[0] == scores[1]
    memory = ours[1]["config"]["zoomkv"]["memory"]
    assert sorted(memory) == sorted(names)
    assert memory["local_gsm8k"]["answers"] == 3 and memory["local_niah"]["answers"] == 2
    assert memory["local_choice"]["answers"] == 9  # continuations
    assert "local_niah" in capsys.readouterr().out  # their table


def test_a_policys_accuracy_and_memory_stand_side_by_side(folder, tasks, tmp_path, quick):
    """Half of the needles are what this policy answers, and nothing that the full cache answers."""
    policy = {"policy": "streaming_llm", "budget": 64, "n_sink": 4}
    docs = [json.loads(line) for line in (LOCAL / "niah.jsonl").read_text().splitlines()]
    docs = [{**doc, "input": doc["input"][shift:]} for doc in docs for shift in (0, 9)]
    prompts = [f"{doc['input']} {doc['gen_prefix']}" for doc in docs]
    model = load(folder)
    held, whole = (
        [answer.text for answer in Generator(*model, chat=False, **options).generate(prompts, 24)]
        for options in (policy, {})
    )
    for number, doc in enumerate(docs):
        doc["outputs"] = [held[number][-12:] if number % 2 else "in no answer"]
        assert doc["outputs"][0].strip() and doc["outputs"][0].lower() not in whole[number].lower()
    data = tmp_path / "niah.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs), encoding="utf-8")
    text = (tasks / "local_niah.yaml").read_text(encoding="utf-8")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "local_niah.yaml").write_text(
        text.replace(str(LOCAL / "niah.jsonl"), str(data)), encoding="utf-8"
    )
    options = ["--tasks", "local_niah", "--batch_size", "4"]
    code, results, _ = run("zoomkv", folder, tmp_path / "tasks", tmp_path / "a", *options, **policy)
    assert code == 0
    assert results["results"]["local_niah"]["4096,none"] == 0.5
    config = results["config"]["zoomkv"]
    assert (config["policy"], config["options"]) == ("streaming_llm", {"budget": 64, "n_sink": 4})
    figures = config["memory"]["local_niah"]
    assert figures["answers"] == 4 and figures["tokens"] == 4 * 24
    row = 2 * 2 * 2 * 8 * 4  # K and V, layers, KV heads, head_dim, bytes
    assert 0 < figures["device_bytes_peak"] <= 4 * 64 * row
    assert 0 < figures["share_of_full"] < 64 / min(map(len, prompts))
    _, results, _ = run("zoomkv", folder, tmp_path / "tasks", tmp_path / "b", *options)
    assert results["results"]["local_niah"]["4096,none"] == 0
    assert results["config"]["zoomkv"]["memory"]["local_niah"]["share_of_full"] >= 1


@pytest.mark.slow
def test_the_command_as_a_user_starts_it(folder, tasks, tmp_path):
    words = [
        "--model", "zoomkv", "--model_args", f"pretrained={folder},policy=tova,budget=16",
        "--include_path", str(tasks), "--tasks", "local_math500", "--output_path", str(tmp_path),
    ]  # fmt: skip
    command = [sys.executable, "-m", "zoomkv", "lm-eval", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "|local_math500|" in done.stdout
    (path,) = tmp_path.rglob("results*.json")
    results = json.loads(path.read_text(encoding="utf-8"))
    assert results["config"]["zoomkv"]["memory"]["local_math500"]["answers"] == 2


# -- configs ------------------------------------------------------------------------------------

REASONING = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "max_new_tokens": 32768}
GREEDY = {"do_sample": False, "temperature": None, "top_p": None}
EXPECTED = {
    "gsm8k": ("gsm8k", {**GREEDY, "max_new_tokens": 512}),
    "math500": ("minerva_math500", REASONING),
    "aime24": ("aime24", REASONING),
    "aime25": ("aime25", REASONING),
    "gpqa_diamond": ("gpqa_diamond_cot_zeroshot", REASONING),
    "longbench": ("longbench_narrativeqa", {**GREEDY, "max_new_tokens": 128}),
    "ruler": ("niah_single_1", {**GREEDY, "max_new_tokens": 128}),
    "infinitebench": ("infinitebench_passkey", {**GREEDY, "max_new_tokens": 6}),
    "humaneval": ("humaneval", {**GREEDY, "max_new_tokens": 1024}),
    "mbpp": ("mbpp", {**GREEDY, "max_new_tokens": 512}),
}
"""For each config one task that it runs, and what reaches ``model.generate`` with it."""


@pytest.fixture(scope="module")
def their_index():
    """lm-eval's own files of the tasks that we have configs for; nothing is loaded."""
    folders = [str(THEIR_TASKS / family) for family in FAMILIES]
    return TaskManager(include_path=folders, include_defaults=False)


@pytest.fixture(scope="module")
def roomy(tmp_path_factory):
    return save(tmp_path_factory.mktemp("roomy"), max_position_embeddings=65536)


def started(monkeypatch, index, name, *words):
    """What lm-eval would evaluate, when it is started with a config of ours."""
    seen = {}
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **options: index)
    monkeypatch.setattr("lm_eval.simple_evaluate", lambda **settings: seen.update(settings))
    assert main(["lm-eval", "run", "--config", str(CONFIGS / f"{name}.yaml"), *words]) == 0
    return seen


def members(index, name):
    """The tasks behind the name of a task or of a group."""
    config = index.task_index[name].cfg
    if "group" not in config:
        return [name]
    return [task for part in config["task"] for task in members(index, part)]


@pytest.mark.parametrize("name", list(EXPECTED))
def test_a_config_starts_tasks_that_exist_with_a_policy_that_exists(
    name, monkeypatch, their_index, quick
):
    seen = started(monkeypatch, their_index, name)
    (task, _) = EXPECTED[name]
    assert seen["model"] == "zoomkv"
    assert task in [each for part in seen["tasks"] for each in members(their_index, part)]
    loaded = []
    monkeypatch.setattr(lm_harness, "load", lambda *a: loaded.append(a) or pytest.fail("enough"))
    with pytest.raises(pytest.fail.Exception):  # names and batches are checked before
        ZoomKVLM(**seen["model_args"], batch_size=seen["batch_size"], device=seen["device"])
    assert loaded[0][:2] == (seen["model_args"]["pretrained"], "bf16")


@pytest.mark.parametrize("name", list(EXPECTED))
def test_a_configs_sampling_reaches_the_model(name, monkeypatch, their_index, roomy, quick):
    seen = started(monkeypatch, their_index, name)
    task, expected = EXPECTED[name]
    # As lm-eval does: the config's settings update the task's own.
    settings = their_index.task_index[task].cfg["generation_kwargs"] | (seen["gen_kwargs"] or {})
    lm = ZoomKVLM(roomy)
    reached = {}

    def generate(**settings):
        reached.update(settings)
        return settings["input_ids"]

    monkeypatch.setattr(lm.model, "generate", generate)
    request = Instance("generate_until", {}, ("Why?", settings), 0, (task, 0, 1))
    lm.generate_until([request], disable_tqdm=True)
    assert {key: reached[key] for key in expected} == expected
    stops = reached["stopping_criteria"][1]
    assert bool(stops._stops) is not (
        expected is REASONING or task in ("niah_single_1", "longbench_narrativeqa")
    )


def test_the_papers_settings_are_in_the_configs(their_index, monkeypatch, quick):
    configs = {
        name: EvaluatorConfig.load_yaml_config(CONFIGS / f"{name}.yaml") for name in EXPECTED
    }
    assert configs["gsm8k"]["num_fewshot"] == 50
    assert configs["ruler"]["metadata"]["max_seq_lengths"][:2] == [4096, 8192]
    for name in ("gsm8k", "longbench", "ruler", "infinitebench"):
        assert configs[name]["model_args"]["budget"] == 0.1
    zoomr = {"policy": "zoomr", "window": 512, "consensus": 2, "top_k": 2}
    for name in ("math500", "aime25", "gpqa_diamond"):
        assert zoomr.items() <= configs[name]["model_args"].items()
    for name in ("math500", "aime24", "aime25", "gpqa_diamond"):
        assert configs[name]["apply_chat_template"] is True
        assert configs[name]["model_args"]["think_end_token"] == "</think>"


BOXED = [
    ("14", "Since $x = 2$ and $y = 7$, the answer is\n\\[\n\\boxed{14}\n\\]"),
    ("14", "\\boxed{14}"),
    ("\\frac{1}{2}", "As $1 + 1 = 2$, we get $\\boxed{\\dfrac12}$."),
    ("\\left( 3, \\frac{\\pi}{2} \\right)", "It is $\\boxed{(3, \\frac{\\pi}{2})}$."),
    ("[2,5)", "**Answer:** \\(\\boxed{[2, 5)}\\)"),
]


def scored(family, answer, text):
    """What lm-eval's own scoring says of a text."""
    path = THEIR_TASKS / family / "utils.py"
    spec = importlib.util.spec_from_file_location(f"their_{family}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    doc = {"solution": f"So it is $\\boxed{{{answer}}}$.", "answer": answer}
    return module.process_results(doc, [text])


boxed = pytest.mark.parametrize(("answer", "text"), BOXED, ids=range(len(BOXED)))


@boxed
def test_the_task_without_extras_misses_boxed_answers(answer, text):
    """Why the config names another one."""
    assert scored("hendrycks_math", answer, text) == {"exact_match": 0}


@boxed
def test_the_configs_task_finds_boxed_answers(answer, text):
    pytest.importorskip("math_verify")
    config = EvaluatorConfig.load_yaml_config(CONFIGS / "math500.yaml")
    assert (config["tasks"], config["num_fewshot"]) == (["minerva_math500"], 0)
    assert scored("minerva_math", answer, text)["math_verify"] == 1
    wrong = text.replace("boxed{", "boxed{77 + ")
    assert scored("minerva_math", answer, wrong)["math_verify"] == 0


def test_words_on_the_command_line_win_over_a_config(monkeypatch, their_index, quick):
    words = ["--model_args", "pretrained=smollm2-135m,policy=h2o,budget=64", "--limit", "8"]
    seen = started(monkeypatch, their_index, "gsm8k", *words)
    assert seen["model_args"] == {"pretrained": "smollm2-135m", "policy": "h2o", "budget": 64}
    assert (seen["limit"], seen["num_fewshot"]) == (8, 50)
