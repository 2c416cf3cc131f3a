"""Two policies of one or two runs against each other, on the same posts."""

import json
import re
import shutil
from dataclasses import asdict, replace

import pytest

from eval.judges.offline import FactsJudge
from eval.judges.protocol import About, Judge, Reply
from eval.versus import changed_judge, judge_sides, main, read_side, summary_of, versus_config
from reports import versus_page
from reports.parts import page
from reports.parts.page import PUBLIC
from stages.finished import read_manifest, seal_of, stage_folder
from stages.running.files import read_lines
from stages.runs import open_stage
from stages.settings.command_line import make_config
from stages.settings.config import UserError
from stages.settings.prompt import format_post
from tests.told import told

POST = "SUBREDDIT: r/x\n\nTITLE: My lamp\n\nPOST: It is gone. I miss it.\n\nTL;DR:"


def page_of(name, seed):
    """The Markdown page of a comparison."""
    folder = stage_folder(make_config("tiny", name=name, seed=seed), "report")
    return (folder / f"{name}.md").read_text()


def summarise(seed, posts=40, skip=0, query="SUBREDDIT: r/x", **policies):
    """Finished summaries; a policy tells the named clauses of each post."""
    with open_stage(make_config("tiny", seed=seed), "summaries") as run:
        for number in range(skip, skip + posts):
            post = f"toy1-validation-{number}"
            for policy, clauses in policies.items():
                row = {"id": post, "query": query, "reference": "none"}
                row |= {
                    "summary": told(post, *clauses),
                    "score": float(len(clauses)),
                    "reference_score": 0.0,
                }
                run.append(f"{policy}.jsonl", row)
        run.finish({})


def test_the_better_policy_of_a_run_wins_and_the_page_says_so(runs, capsys):
    summarise(44413, sft=["event"], ppo=["event", "first"])
    main(["--a", "tiny:sft", "--b", "tiny"])
    folder = runs / "versus-tiny-44413-sft-tiny-44413-ppo/seed44413/versus/facts"
    manifest = read_manifest(folder) or {}
    found = manifest["results"]
    assert (found["estimate"], found["losses"], found["unjudged"]) == (0.0, 40, 0.0)
    assert found["high"] == pytest.approx(1.96**2 / (40 + 1.96**2), abs=1e-3)  # Wilson, 0 of 40
    assert found["p_value"] == pytest.approx(2.0**-39)
    policies = [row["policy"] for row in read_lines(folder / "judgements.jsonl")]
    assert (policies.count("versus"), policies.count("reference")) == (80, 80)
    assert list(manifest["inputs"]) == ["tiny/seed44413/summaries"]
    versus_page.main(["--a", "tiny:sft", "--b", "tiny"])
    said = capsys.readouterr().out
    assert max(len(line) for line in said.splitlines() if "/" not in line) <= 80
    assert "tiny-44413-ppo is preferred to tiny-44413-sft" in said
    text = page_of("versus-tiny-44413-sft-tiny-44413-ppo", 44413)
    assert text.count("**Not an LLM**") == 1
    assert "; one pair of policies; toy world" in text
    assert "all length ratios are alike" in text


@pytest.mark.parametrize(("explained", "said"), [(-0.7, True), (0.1, False)])
def test_the_page_tells_of_a_critic_that_was_worse_than_a_constant(runs, explained, said):
    summarise(44413, sft=["event"], ppo=["event", "first"])
    with open_stage(make_config("tiny"), "ppo") as run:
        run.log(16, **{"val/explained_variance": -9.0})  # the critic's last update alone
        run.log(17, **{"val/explained_variance": explained})
        run.finish({})
    main(["--a", "tiny:sft", "--b", "tiny"])
    versus_page.main(["--a", "tiny:sft", "--b", "tiny"])
    text = page_of("versus-tiny-44413-sft-tiny-44413-ppo", 44413)
    note = "less than a constant in 1 of 1 updates of tiny-44413-ppo (explained variance -0.7)"
    assert (note in text) == said
    assert ("The critic" in text) == said


def test_swapping_the_sides_mirrors_the_result_across_seeds(runs):
    summarise(1, ppo=["event", "first"])
    summarise(2, ppo=["event", "second"], sft=["event"])
    _, there = judge_sides("tiny/1:ppo", "tiny/2:sft")
    _, back = judge_sides("tiny/2:sft", "tiny/1:ppo")
    assert there["estimate"] == 1 - back["estimate"] == 1.0
    _, even = judge_sides("tiny/1", "tiny/2")  # one more fact each
    assert (even["estimate"], even["ties"], even["p_value"]) == (0.5, 40, 1.0)


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ("tiny/1", "tiny/3", "the posts differ: tiny-1-ppo has 40, tiny-3-ppo has 40, and 30"),
        ("tiny/1", "tiny/4", "toy1-validation-0 has another text in tiny-4-ppo"),
        ("tiny/1", "tiny/1:ppo", "are both tiny-1-ppo"),
        ("tiny/1", "tiny/1:dpo", "has no policy dpo: it has ppo, sft"),
        ("tiyn/1", "tiny/1", "unknown run 'tiyn': did you mean tiny?"),
        ("tiny/1", "tiny/9", "seed9/summaries is missing: run `make eval`"),
        ("", "tiny/1", "names no side"),
        ("tiny/one", "tiny/1", "names no side"),
    ],
)
def test_sides_that_cannot_be_compared_are_refused_in_one_line(runs, capsys, a, b, said):
    summarise(1, ppo=["event"], sft=["second"])
    summarise(3, skip=10, ppo=["event"])
    summarise(4, query="SUBREDDIT: r/y", ppo=["event"])
    with pytest.raises(SystemExit):
        main(["--a", a, "--b", b])
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_the_judge_is_the_runs_own_unless_set(runs):
    summarise(1, ppo=["event"], sft=["event", "second"])
    config, found = judge_sides("tiny/1:sft", "tiny/1:ppo", ["judge.kind=reward_model"])
    assert config.judge.kind == found["judge"]["kind"] == "reward_model"
    assert found["estimate"] == 1.0  # the recorded score is the number of clauses
    with pytest.raises(UserError, match="versus takes judge"):
        judge_sides("tiny/1:sft", "tiny/1:ppo", ["eval.posts=3"])


def test_posts_are_read_and_batched_as_run_a_does(runs):
    """Another prompt left the controls without a title, and a gold model cut posts as `tiny`."""
    forum = "Forum {subreddit}:\n{post}\n\nTITLE: {title}\n\nIn one sentence:"
    own = ("data.max_query_tokens=300", "memory.forward_batch_size=5")
    config = make_config("tiny", name="forum", overrides=own)
    config = replace(config, data=replace(config.data, prompt=forum))
    fields = {"subreddit": "x", "title": "My lamp is gone", "post": "It is gone. I miss it."}
    with open_stage(config, "summaries") as run:
        for number in range(4):
            post = f"toy1-validation-{number}"
            texts = {"id": post, "query": format_post(fields, forum), "reference": told(post)}
            for policy in ("ppo", "sft"):
                summary = {"summary": f"{policy} {number}", "score": 0.0}
                run.append(f"{policy}.jsonl", texts | summary | {"reference_score": 0.0})
        run.finish({})
    used, found = judge_sides("forum:ppo", "forum:sft")
    assert (used.data, used.memory) == (config.data, config.memory)
    assert found["controls"]["controls"]["title"]["posts"] == 4


ALPHA = ("judge.kind=openai", "judge.model=alpha@1", "judge.base_url=http://127.0.0.1:1/v1")
BETA = ("judge.kind=openai", "judge.model=beta", "judge.base_url=http://127.0.0.1:2/v1")


def judged_by(*judges):
    """Finished verdicts of run tiny, seed 1, by judges with these settings; both sides."""
    summarise(1, ppo=["event"], sft=["event", "second"])
    for one in judges:
        with open_stage(make_config("tiny", seed=1, overrides=one), "judge") as run:
            run.finish({})
    return read_side("tiny/1:sft"), read_side("tiny/1:ppo")


@pytest.mark.parametrize("own", [(), ("judge.kind=openai",), ("judge.concurrency=2",)])
def test_of_several_judges_none_is_taken_unasked(runs, own):
    a, b = judged_by(ALPHA, BETA)
    with pytest.raises(UserError, match=r"judged by alpha-1-\w+, beta-\w+: choose one with JUDGE="):
        versus_config(a, b, own)
    folder = make_config("tiny", overrides=BETA).judge.folder
    assert versus_config(a, b, own, folder).judge.model == "beta"
    with pytest.raises(UserError, match=r"JUDGE=nobody has not judged tiny-1-sft: choose of alpha"):
        versus_config(a, b, own, "nobody")


def test_a_judge_that_no_judge_there_could_change_needs_no_choice(runs):
    a, b = judged_by(ALPHA, BETA)
    assert versus_config(a, b, ["judge.kind=reward_model"]).judge.gold == ""


def test_another_model_is_never_asked_at_the_server_of_the_recorded_one(runs):
    a, b = judged_by((*ALPHA, "judge.input_price=3", "judge.max_tokens=32"))
    judge = versus_config(a, b, ["judge.model=gpt-6-luna"]).judge
    assert (judge.kind, judge.base_url, judge.input_price) == ("openai", "", -1)
    assert judge.max_tokens == 32
    assert versus_config(a, b, ["judge.concurrency=2"]).judge.base_url.endswith(":1/v1")


def test_a_server_that_the_environment_names_is_another_judge(monkeypatch):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    url, own = "http://127.0.0.1:1/v1", ("judge.kind=openai", "judge.model=alpha@1")
    nowhere, rule = make_config("tiny", overrides=own).judge, make_config("tiny").judge
    monkeypatch.setenv("OPENAI_BASE_URL", url)
    named = make_config("tiny", overrides=own).judge
    assert named == make_config("tiny", overrides=ALPHA).judge
    assert named.folder != nowhere.folder
    assert make_config("tiny", overrides=BETA).judge.base_url == "http://127.0.0.1:2/v1"
    assert make_config("tiny").judge == rule  # which asks no server
    assert changed_judge(asdict(nowhere), {}) == named  # it would be asked there
    monkeypatch.delenv("OPENAI_BASE_URL")
    assert changed_judge(asdict(named), {}) == named


def test_the_worst_case_counts_posts_and_the_line_says_what_is_unjudged(runs, monkeypatch):
    class Half(Judge):
        about = About(kind="facts", name="half", is_llm=False, note="for tests")
        asked = 0

        def reply(self, comparison):
            self.asked += 1
            return Reply(choice=None if self.asked % 4 == 1 else "tie", text="")

    summarise(1, ppo=["event"], sft=["event", "second"])
    monkeypatch.setattr("eval.versus.make_judge", lambda config, policies: Half())
    _, found = judge_sides("tiny/1:sft", "tiny/1")
    left = found["unjudged"]  # each post of them has one verdict
    assert found["statistics"]["unjudged"] == pytest.approx(left / 2)
    bounds = [(1 - left) / 2, (1 - left) / 2 + left]
    assert found["statistics"]["worst_case"] == pytest.approx(bounds)
    long = found | {"a": "judged-systems-with-a-long-name-44413-ppo"}
    lines = summary_of(long)
    assert max(map(len, lines)) <= 80
    assert " ".join(line.strip() for line in lines).endswith(f"{left:.1%} of the posts unjudged")


def test_a_judge_that_fails_a_control_is_flagged_on_the_page_of_two_policies(
    runs, monkeypatch, capsys
):
    """Whichever judge was set for the comparison: its controls go with it."""

    class First(Judge):
        about = About(kind="facts", name="who takes the first", is_llm=False, note="for tests")

        def reply(self, comparison):
            return Reply(choice="A", text="")

    summarise(1, query=POST, ppo=["event"], sft=["event", "second"])
    sides = ["--a", "tiny/1:sft", "--b", "tiny/1:ppo"]
    monkeypatch.setattr("eval.versus.make_judge", lambda config, policies: First())
    main(sides)
    versus_page.main(sides)
    text = page_of("versus-tiny-1-sft-tiny-1-ppo", 1)
    assert "THE JUDGE FAILED ITS CHECKS: it does not reliably prefer the reference to" in text
    assert "THE JUDGE FAILED ITS CHECKS" in capsys.readouterr().out
    assert re.search(r"\| the post's title \| \d+ \| 50.0% \[", text)
    assert re.search(r"the reference itself \| \d+ \| 50.0%", text)
    (found,) = [one for one in text.splitlines() if one.startswith("| the judge |")]
    assert found.startswith("| the judge | 100.0% [")  # of the 80 judgements of the pairs alone


def test_the_page_holds_both_sides_of_each_post_and_a_public_one_holds_no_real_post(runs):
    summarise(1, query=POST, ppo=["event"], sft=["event", "second"])
    saved = read_side("tiny/1").folder / "config.json"
    saved.write_text(saved.read_text().replace('"source": "toy"', '"source": "posts"'))
    sides = ["--a", "tiny/1:sft", "--b", "tiny/1:ppo"]
    main(sides)
    versus_page.main(sides)
    name = "versus-tiny-1-sft-tiny-1-ppo"
    folder = stage_folder(make_config("tiny", name=name, seed=1), "report")
    judgements = read_lines(folder.parents[1] / "versus/facts/judgements.jsonl")
    row = versus_page.posts([read_side("tiny/1:sft"), read_side("tiny/1:ppo")], judgements)[0]
    better, worse = row["sides"]
    assert (better["verdict"], worse["verdict"]) == ("won", "lost")
    shown = [[(one["shown"], one["prefers"]) for one in each["said"]] for each in row["sides"]]
    assert shown == [[("A", "policy"), ("B", "policy")], [("B", "reference"), ("A", "reference")]]
    assert better["said"][0]["text"] == worse["said"][0]["text"] != ""
    own, public = ((folder / part / f"{name}.html").read_text() for part in ("", PUBLIC))
    for theirs in ("I miss it", better["said"][0]["text"]):
        assert theirs in own
        assert theirs not in public
    assert better["text"] in public


def test_scores_of_two_reward_models_are_not_compared(runs):
    summarise(1, ppo=["event"])
    summarise(2, ppo=["event"])
    for seed, mark in ((1, "a"), (2, "b")):
        path = read_side(f"tiny/{seed}").folder / "manifest.json"
        made = json.loads(path.read_text()) | {"inputs": {"normalize": mark}}
        path.write_text(json.dumps(made | {"seal": seal_of(made)}))
    with pytest.raises(UserError, match="two reward models"):
        judge_sides("tiny/1", "tiny/2", ["judge.kind=reward_model"])


def test_summaries_that_no_reward_model_scored_are_not_judged_by_scores(runs):
    """As those of two files are: it ended in a TypeError."""
    summarise(1, ppo=["event"], sft=["second"])
    path = read_side("tiny/1").folder / "sft.jsonl"
    rows = [json.dumps(row | {"score": None}) for row in read_lines(path)]
    path.write_text("\n".join(rows) + "\n")
    for sides in (("tiny/1", "tiny/1:sft"), ("tiny/1:sft", "tiny/1")):
        with pytest.raises(UserError, match="no reward model scored the summaries of tiny-1-sft"):
            judge_sides(*sides, ["judge.kind=reward_model"])


@pytest.mark.parametrize("own", [1, 2])
def test_the_reward_model_of_a_side_is_no_gold_one(runs, own):
    """The guard looked at the folder of the comparison, which has no reward model."""
    summarise(1, ppo=["event"])
    summarise(2, ppo=["event", "second"])
    with open_stage(make_config("tiny", seed=own), "normalize") as run:
        run.finish({})
    gold = ["judge.kind=reward_model", f"judge.model=tiny/seed{own}"]
    said = rf"judge\.model=tiny/seed{own} is the reward model of tiny-{own}-ppo itself: name"
    with pytest.raises(UserError, match=said):
        judge_sides("tiny/1", "tiny/2", gold)


def test_the_reward_model_of_a_side_is_no_gold_one_by_its_path_either(runs):
    summarise(1, ppo=["event"])
    summarise(2, ppo=["event", "second"])
    with open_stage(make_config("tiny", seed=2), "normalize") as run:
        (run.partial / "model").mkdir()
        (run.partial / "model/model.safetensors").write_bytes(b"weights")
        run.finish({})
    folder = runs / "tiny/seed2/normalize/model"
    gold = ["judge.kind=reward_model", f"judge.model={folder}"]
    with pytest.raises(UserError, match=r"is the reward model of tiny-2-ppo itself: name"):
        judge_sides("tiny/1", "tiny/2", gold)


def test_a_page_without_a_comparison_names_the_command(runs, capsys):
    summarise(1, ppo=["event"], sft=["second"])
    with pytest.raises(SystemExit):
        versus_page.main(["--a", "tiny/1", "--b", "tiny/1:sft"])
    assert "run `make versus A=tiny/1 B=tiny/1:sft`" in capsys.readouterr().err


def test_a_winner_is_named_only_where_the_test_says_so_too(runs):
    summarise(1, ppo=["event"], sft=["event", "second"])
    _, found = judge_sides("tiny/1:sft", "tiny/1")
    sure = found | {"low": 0.503, "high": 0.831, "p_value": 0.04}
    assert " is preferred to " in versus_page.verdict(sure)
    assert "is inconclusive" in versus_page.verdict(sure | {"p_value": 0.289})


def test_too_many_unjudged_posts_give_no_rate(runs):
    summarise(1, ppo=["event"], sft=["event", "second"])
    _, found = judge_sides("tiny/1:sft", "tiny/1")
    assert "is inconclusive" not in versus_page.verdict(found)
    unjudged = found | {"unjudged": 0.05}
    assert "more than 2.0%, so no rate is given" in versus_page.verdict(unjudged)
    assert versus_page.verdict(unjudged).endswith("].")
    text = page.to_markdown("x", "x", versus_page.blocks(unjudged, ["it takes the first"]))
    assert "THE JUDGE FAILED ITS CHECKS: it takes the first" in text
    assert "100.0% [" not in text.split("## Every rate")[1].split("## The judge")[0]


class Stopping(FactsJudge):
    """The rule, which somebody stops after some questions."""

    def __init__(self, questions):
        self.left = questions

    def reply(self, comparison):
        self.left -= 1
        if self.left < 0:
            raise UserError("stopped")
        return super().reply(comparison)


def test_verdicts_about_summaries_that_were_made_anew_since_are_not_kept(runs, monkeypatch):
    summarise(44413, sft=["event"], ppo=["event", "first"])
    judges = [Stopping(30), Stopping(30), Stopping(1000)]
    monkeypatch.setattr("eval.versus.make_judge", lambda *_: judges.pop(0))
    for _ in range(2):  # the second try goes on from the first
        with pytest.raises(UserError, match="stopped"):
            judge_sides("tiny:sft", "tiny")
    shutil.rmtree(stage_folder(make_config("tiny"), "summaries"))
    summarise(44413, sft=["event", "first"], ppo=["event"])
    config, found = judge_sides("tiny:sft", "tiny")
    assert (found["wins"], found["losses"]) == (40, 0)
    assert not (stage_folder(config, "versus") / "sides.json").exists()
