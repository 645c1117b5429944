"""Every config that we ship is parsed, and its model and data are made."""

from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from lightning import Trainer

from zoomkv.training import cli
from zoomkv.training.cli import TrainingCLI, main

CONFIGS = Path(__file__).parents[2] / "configs"
FITS = sorted((CONFIGS / "fit").rglob("*.yaml"))


@pytest.fixture
def made(monkeypatch, base, tmp_path):
    """What ``zoomkv fit`` makes of a config, with a tiny base and without running it."""
    runs = []

    def keep(self, subcommand):
        runs.append(self)

    def no_trainer(self, **settings):
        wanted = dict(self._get(self.config_init, "trainer"))
        if wanted["accelerator"] == "gpu":  # there is none to be had here
            wanted |= {"accelerator": "cpu", "devices": 1, "strategy": "auto"}
        return Trainer(**(wanted | {"default_root_dir": tmp_path, "logger": False}))

    monkeypatch.setattr(TrainingCLI, "_run_subcommand", keep)
    monkeypatch.setattr(TrainingCLI, "instantiate_trainer", no_trainer)

    def make(path):
        main(["fit", "--config", str(path), "--model.init_args.base", base])
        return runs[-1]

    return make


@pytest.mark.parametrize("path", FITS, ids=lambda path: path.stem)
def test_parses_and_makes_its_parts(made, path):
    run = made(path)
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    wanted, found = settings["model"]["init_args"], dict(run.model.hparams)
    for name in wanted.keys() - {"base"}:
        if isinstance(wanted[name], dict):
            assert {key: _listed(found[name][key]) for key in wanted[name]} == wanted[name]
        else:
            assert found[name] == wanted[name]
    given, data = settings["data"]["init_args"], run.datamodule
    for name in given.keys() & {"max_length", "steps", "continuation", "batch_size", "weights"}:
        assert getattr(data, name) == given[name]
    if "stages" in given:
        assert [asdict(stage) for stage in data.stages] == given["stages"]
    assert len(data.sources) == len(given["train"])
    parsed = run.config["fit"]["trainer"]
    assert parsed["use_distributed_sampler"] is False
    for name in settings["trainer"].keys() - {"strategy", "logger", "callbacks"}:
        assert str(parsed[name]) == str(settings["trainer"][name])


def test_a_large_model_is_sharded_by_layer(made):
    for path, layer in [("zoomr_r1_qwen_7b", "Qwen2DecoderLayer"),
                        ("zoomr_r1_llama_8b", "LlamaDecoderLayer"),
                        ("sekv_llama31_8b", "LlamaDecoderLayer")]:  # fmt: skip
        run = made(CONFIGS / "fit" / f"{path}.yaml")
        policy = run.config_init["fit"]["trainer"]["strategy"].kwargs["auto_wrap_policy"]
        assert {kind.__name__ for kind in policy._module_classes} == {layer}


def test_every_config_has_a_smoke_twin():
    names = {path.stem for path in FITS}
    assert {f"{name.removesuffix('_smoke')}_smoke" for name in names} <= names


def test_a_twin_trains_like_its_original():
    for path in FITS:
        original = path.with_stem(path.stem.removesuffix("_smoke"))
        if path == original or not original.exists():
            continue
        ours, theirs = (yaml.safe_load(file.read_text()) for file in (path, original))
        for part in ("lora", "gradient_checkpointing", "router", "splitter", "memory", "loss"):
            a, b = (settings["model"]["init_args"].get(part) for settings in (ours, theirs))
            assert a == b
        votes = [bool(s["model"]["init_args"].get("vote_weight")) for s in (ours, theirs)]
        assert votes[0] == votes[1]
        assert ours["trainer"]["precision"] == theirs["trainer"]["precision"]
        tags = [s["data"]["init_args"].get("thought_tags") for s in (ours, theirs)]
        assert tags[0] == tags[1]


def _listed(value):
    return list(value) if isinstance(value, tuple) else value


def test_errors_of_options_are_one_line(base):
    assert cli.SUBCOMMANDS[0] == "fit"
    config = ["--config", str(CONFIGS / "fit" / "zoomr_smollm2_smoke.yaml")]
    for words, message in [
        (["fit", "--config", "none.yaml"], "none.yaml"),
        (["fit", *config, "--model.init_args.lora.rank", "3"], "lora.rank"),
        (["fit", *config, "--model.init_args.precision", "fp8"], "fp8"),
        (["fit", *config, "--trainer.max_steps", "many"], "many"),
        (["fit", *config, "--ckpt_path", "gone.ckpt"], "gone.ckpt: there is no such checkpoint"),
        (["fit", *config, "--model.init_args.base", "/no/such/model"], "/no/such/model"),
        (["test", *config, "--model.init_args.base", base], "test"),
    ]:
        with pytest.raises(ValueError) as failed:
            main(words)
        assert message in str(failed.value), (words, str(failed.value))
        assert "Subtypes" not in str(failed.value)
