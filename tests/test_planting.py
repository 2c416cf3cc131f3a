"""What `make planted` makes: each error from its first stage on, once, with checks' words."""

import json
import re
import shutil

import pytest

from stages.driving.grid import Execution
from stages.finished import partial_of, read_manifest, stage_folder, why_not
from stages.settings import config as settings
from stages.settings.command_line import Request, config_of
from stages.settings.config import UserError
from tests import planting
from tests.conftest import ROOT
from tests.planted import PLANTED, refused_file
from tests.planting import Planter, cells_of, make_planted, run_of
from tests.resuming import SETTINGS
from tests.test_pipeline import EVALUATED, Recorder, finish, typed

ERRORS = ("kl-rewarded", "swapped-pairs", "sft-without-eos")


class Recording(Planter, Recorder):
    """Its stages are one file each; a check has words for PPO of the runs with some errors."""

    def __init__(self, errors=ERRORS, refused=(), **execution):
        Recorder.__init__(self, Execution(**execution))
        self.errors = {f"tiny-planted-{name}": name for name in errors}
        self.refused = refused

    def command(self, cell, stage):
        plain = Planter(self.execution, self.errors)
        self.commands.append(plain.command(cell, stage))
        return [cell.config.name, str(cell.config.seed), stage, *cell.request.arguments]

    def call(self, words, label=""):
        name, seed, stage, *_ = words
        if stage == "ppo" and self.errors.get(name) in self.refused:
            path = settings.RUNS / name / f"seed{seed}" / "refused.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"stage": "ppo", "message": "step 0: no"}))
        return super().call(words, label)


def make(maker, seeds=(1,), names=ERRORS, request=None):
    return make_planted(maker, *cells_of(request or Request(), seeds, names), names)


def stages_made(maker, name):
    return [stage for run, stage in maker.made if run == name]


def test_an_error_makes_its_first_stage_and_what_follows_and_takes_the_others(runs):
    maker = Recording()
    assert make(maker, seeds=(1, 2)) == 0
    assert stages_made(maker, "tiny") == 2 * EVALUATED
    for name, first in zip(ERRORS, ("ppo", "rm", "sft"), strict=True):
        own = EVALUATED[EVALUATED.index(first) :]
        assert stages_made(maker, f"tiny-planted-{name}") == 2 * own
    swapped = runs / "tiny-planted-swapped-pairs/seed2"
    for path in (runs / "tiny/seed2/sft").rglob("*"):
        assert path.samefile(swapped / "sft" / path.relative_to(runs / "tiny/seed2/sft"))
    assert not (runs / "tiny-planted-kl-rewarded/seed2/sft").exists()
    assert maker.made[-1][1] == "reports.planted_page"
    written = json.loads((runs / "tiny/planted-errors.json").read_text())
    assert list(written) == list(ERRORS)
    assert written["swapped-pairs"]["stage"] == "rm"
    assert "counts as chosen" in written["swapped-pairs"]["what"]


def test_the_launcher_starts_the_stages_that_run_models_and_no_others(runs):
    maker = Recording()
    make(maker, names=("kl-rewarded",))
    own = [words for words in maker.commands if "tiny-planted-kl-rewarded" in words]
    planted = [words for words in own if "tests.planted" in words]
    assert [words[6] for words in planted] == ["stages.ppo", "eval.summaries"]
    assert planted[0][1:6] == ["-m", "tests.planted", "kl-rewarded", "-m", "stages.driving.start"]
    assert planted[0][-2:] == ["--upstream", "tiny"]
    assert not [words for words in maker.commands if "tests.planted" in words and words not in own]


def test_finished_runs_are_not_made_again_and_a_changed_default_is_taken_over_anew(runs):
    make(Recording())
    again = Recording()
    assert make(again) == 0
    assert [stage for _, stage in again.made] == ["reports.planted_page"]
    default = config_of(Request(seed=1))
    shutil.rmtree(stage_folder(default, "sft"))
    finish(default, "sft", "another one")
    third = Recording(names := ("swapped-pairs",))
    assert make(third, names=names) == 0
    name = "tiny-planted-swapped-pairs"
    # What puts out the same as before makes nothing else anew.
    assert stages_made(third, name) == ["rm", "ppo", "summaries", "report"]
    taken = read_manifest(runs / name / "seed1/sft") or {}
    assert taken["content"] == (read_manifest(stage_folder(default, "sft")) or {})["content"]


def test_what_a_check_refuses_goes_on_and_its_words_last_as_long_as_the_stage(runs):
    first = Recording(refused=("kl-rewarded",))
    assert make(first) == 0
    config = cells_of(Request(), [1], ["kl-rewarded"])[1][0].config
    kept = json.loads(refused_file(config).read_text())
    assert kept["message"] == "step 0: no"
    assert why_not(config, "report") is None
    again = Recording()
    assert make(again) == 0
    assert [stage for _, stage in again.made] == ["reports.planted_page"]
    assert refused_file(config).exists()
    shutil.move(stage_folder(config, "ppo"), partial_of(stage_folder(config, "ppo")))
    assert make(Recording()) == 0  # the words came before it was interrupted
    assert refused_file(config).exists()
    shutil.rmtree(stage_folder(config, "ppo"))
    assert make(Recording()) == 0
    assert not refused_file(config).exists()
    refused_file(config).write_text("{}")
    assert make(Recording(replace="1")) == 0
    assert not refused_file(config).exists()


def test_a_stage_that_fails_without_a_checks_word_is_a_failure(runs, capsys):
    maker = Recording(names := ("kl-rewarded",))
    default, _ = cells_of(Request(), [1], names)
    assert maker.make_all(default) == [0]
    maker.fails = "ppo"
    assert make(maker, names=names) == 3
    assert "1 runs failed: tiny-planted-kl-rewarded seed 1" in capsys.readouterr().err


def test_a_run_with_settings_of_its_own_passes_them_on():
    mine = Request(name="mine", overrides=("sft.epochs=3", "ppo.lam=0.9"))
    _, planted = cells_of(mine, [1, 2], ["kl-rewarded", "sft-without-eos"])
    for cell in planted:
        assert (cell.config.sft.epochs, cell.config.ppo.lam) == (3, 0.9)
    assert planted[0].request.upstream == "mine"
    assert planted[0].request.overrides == ("ppo.lam=0.9",)
    assert planted[1].request.overrides == mine.overrides
    assert planted[3].label == "mine-planted-sft-without-eos seed 2"


@pytest.mark.parametrize(
    ("request_", "errors", "words"),
    [
        (Request(), ["kl-rewardet"], "unknown error 'kl-rewardet': did you mean kl-rewarded"),
        (Request(name="hot", upstream="tiny"), ["kl-rewarded"], "leave out UPSTREAM="),
    ],
)
def test_what_cannot_be_planted_is_refused(request_, errors, words):
    with pytest.raises(UserError, match=words):
        cells_of(request_, [1], errors)


def test_a_dry_run_names_every_run_and_makes_nothing(tmp_path):
    found = typed(tmp_path, "-n", "-j2", "planted", "SEEDS=1 2", "ERRORS=kl-left-out swapped-pairs")
    assert found.returncode == 0, found.stderr
    lines = [line for line in found.stdout.splitlines() if ": would make" in line]
    assert lines[-4:] == [
        f"tiny-planted-{name} seed {seed}: would make {stage} and what follows, with {name} planted"
        for seed in (1, 2)
        for name, stage in (("kl-left-out", "ppo"), ("swapped-pairs", "rm"))
    ]
    assert lines[0] == "tiny seed 1: would make base (is missing)"
    assert not list(tmp_path.iterdir())
    assert planting.parse([]).errors == list(PLANTED)
    with pytest.raises(UserError, match="invalid int value: 'x'"):
        planting.parse(["--seeds", "x"])


@pytest.mark.walk
def test_errors_run_to_their_end_also_where_a_check_refuses_them(whole, tmp_path, monkeypatch):
    """As `make planted` does, up to PPO and from a small run that is there."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(whole, tmp_path / "runs/resumed/seed44413")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    names = ("dropout-in-policy", "kl-rewarded", "swapped-pairs")
    request = Request(name="resumed", overrides=tuple(SETTINGS))
    monkeypatch.setattr(planting, "GOALS", ("ppo",))
    default, planted = cells_of(request, [44413], names)
    with Planter(Execution(), {run_of(default[0].config, name): name for name in names}) as maker:
        assert maker.make_all([*default, *planted]) == [0, 0, 0, 0]
    words = (r"step 0: the first ratio is not 1", r"update \d+: the rewards of an episode are not")
    for cell, beginning in zip(planted, words, strict=False):
        assert re.match(beginning, json.loads(refused_file(cell.config).read_text())["message"])
    assert not refused_file(planted[2].config).exists()
    right, *found = (
        (read_manifest(stage_folder(cell.config, "ppo")) or {})["results"]
        for cell in [*default, *planted]
    )
    for results in found:
        assert results["updates"] == right["updates"]
        assert results["objective/kl"] != right["objective/kl"]
