"""``zoomkv fit``, ``export`` and ``generate``, one after the other."""

import json

import pytest
import yaml

from zoomkv.cli import main


@pytest.fixture
def config(base, tmp_path):
    """A config of a training that takes a second."""
    settings = {
        "seed_everything": 1,
        "trainer": {
            "accelerator": "cpu",
            "max_steps": 2,
            "max_epochs": -1,
            "logger": False,
            "log_every_n_steps": 1,
            "default_root_dir": str(tmp_path / "run"),
            "callbacks": [
                {
                    "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                    "init_args": {"every_n_train_steps": 1, "save_last": True},
                }
            ],
        },
        "model": {
            "class_path": "zoomkv.training.summary_sft.SummarySFT",
            "init_args": {
                "base": base,
                "lora": {"r": 4},
                "generation": {"max_new_tokens": 4, "batch_size": 2},
            },
        },
        "data": {
            "class_path": "zoomkv.data.module.SummaryData",
            "init_args": {
                "train": [
                    {
                        "class_path": "zoomkv.data.sources.LedgerSource",
                        "init_args": {"count": 6, "steps": [3, 3]},
                    }
                ],
                "val": {
                    "class_path": "zoomkv.data.sources.LedgerSource",
                    "init_args": {"count": 2, "seed": 2, "steps": [3, 3]},
                },
                "prompts": 1,
                "batch_size": 2,
            },
        },
    }
    path = tmp_path / "fit.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return str(path)


def run(capfd, *words):
    """Exit code, stdout, and the last line of stderr."""
    code = main([str(word) for word in words])
    told = capfd.readouterr()
    return code, told.out, (told.err.strip().splitlines() or [""])[-1]


def test_fit_validate_export_generate(capfd, config, tmp_path):
    code, out, _ = run(capfd, "fit", "--config", config)
    assert (code, out) == (0, "")  # stdout is for results
    last = next((tmp_path / "run").rglob("last.ckpt"))
    code, _, _ = run(capfd, "validate", "--config", config, "--ckpt_path", last)
    assert code == 0
    code, out, _ = run(capfd, "export", tmp_path / "run", tmp_path / "artifact")
    assert (code, out) == (0, f"{tmp_path / 'artifact'}\n")
    manifest = json.loads((tmp_path / "artifact" / "zoomkv.json").read_text())
    assert manifest["training"]["steps"] == 2 and manifest["method"] == "zoomr"
    for policy, option in [("zoomr", "window=16"), ("full_offloaded", "host_precision=auto")]:
        words = ("generate", tmp_path / "artifact", "--policy", policy, "--option", option)
        code = main([*map(str, words), "--prompt", "2+2?", "--max-new-tokens", "8", "--stats"])
        told = capfd.readouterr()
        assert code == 0 and told.out.strip()
        assert "tokens a second" in told.err and "device KV, mean" in told.err

    # Going on, and what would be swallowed.
    more = ("fit", "--config", config, "--ckpt_path", last, "--trainer.max_steps", "3")
    assert run(capfd, *more)[0] == 0
    code, _, line = run(capfd, *more, "--model.init_args.optimizer.lr", "0.5")
    assert code == 2 and line.startswith("zoomkv: model.optimizer.lr: 0.5 is given, but the check")
    code, _, line = run(capfd, *more, "--data.init_args.batch_size", "1")
    assert code == 2 and line.startswith("zoomkv: data: the examples, batch size")
    torn = tmp_path / "torn.ckpt"
    torn.write_bytes(last.read_bytes()[:1000])
    code, _, line = run(capfd, "fit", "--config", config, "--ckpt_path", torn)
    assert code == 2 and "torn.ckpt" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", "x", "--policy", "zoomr"], "the tokenizer has no token <|begin_of_summary|>"),
        (["--prompt", "x", "--policy", "zommr"], "unknown policy 'zommr': did you mean 'zoomr'"),
        (["--prompt", "x", "--budget", "0.1"], "policy 'full' has no option 'budget'"),
        (["--prompt", "x", "--budget", "much"], "argument --budget: 'much' is not a number"),
        (["--prompt", "x", "--option", "window"], "write NAME=VALUE"),
        (["--prompt", " "], "the prompt is empty"),
        ([], "give one prompt"),
        (["--prompt", "x", "--file", "y"], "give one prompt"),
        (["--file", "/no/such/file"], "/no/such/file"),
        (["--prompt", "x", "--temperature", "-1"], "choose --temperature"),
        (["--prompt", "x", "--precision", "fp8"], "precision 'fp8'"),
    ],
)
def test_bad_input_to_generate(capfd, base, words, message):
    code, out, line = run(capfd, "generate", base, *words)
    assert code == 2 and out == "" and message in line and line.startswith("zoomkv: ")


def test_a_checkpoint_that_is_not_there(capfd, tmp_path):
    code, _, line = run(capfd, "export", tmp_path / "none", tmp_path / "artifact")
    assert code == 2 and "there is no such checkpoint or run" in line
