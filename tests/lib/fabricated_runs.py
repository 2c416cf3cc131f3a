"""Fabricated finished runs for the tests of the reports: no stage has to run."""

import json
import random
from typing import Any

from reports import paper
from reports.curves import GRADIENT_GROUPS
from stages.config.command_line import make_config
from stages.config.identity import hash_of, settings_hash, settings_of
from stages.config.judge import JudgeSettings
from stages.config.stages import STAGES as TABLE
from stages.runs.inputs import current_inputs
from stages.runs.manifest import stage_folder
from stages.runs.run import open_stage

STAGES = ("base", "sft", "rm", "normalize", "ppo", "summaries", "judge", "controls", "win_rate")
NASTY = "SUBREDDIT: r/x\n\nTITLE: <script>alert(1)</script>\n\nPOST: a | b\n# no heading\n\nTL;DR:"
OFFLINE = {"kind": "facts", "name": "facts rule", "is_llm": False, "note": "counts right facts"}
ONLINE = {"kind": "openai", "name": "gpt-4o-mini", "is_llm": True, "note": "temperature 0"}


def curves(stage):
    noise = random.Random(stage)
    keys = {
        "sft": ["loss/train"],
        "rm": ["loss/train", "accuracy/train"],
        "ppo": [
            key for group in GRADIENT_GROUPS for metric in group.metrics for key in metric.keys
        ],
    }[stage]
    rows = [{"step": s, **{key: s / 60 + noise.random() for key in keys}} for s in range(1, 61)]
    return [{"step": 0, "loss/validation": 6.0}, *rows] if stage == "sft" else rows


WRITTEN = {
    "copied_title_words": None,
    "rouge1": 0.5,
    "rouge2": 0.3,
    "eos_rate": 0.991,
    "reference_score": 0.017,
}
GROUPS = {
    strength: {"accuracy": share, "accuracy_low": share - 0.02, "accuracy_high": share + 0.02}
    | {"pairs": pairs}
    for strength, share, pairs in (("1", 0.75, 1500), ("4", 0.83, 500))
}
POSTS = {"rows": 16000, "longest_query": 101, "longest_summary": 21, "longest_query_summary": 117}
PAIRS = {"rows": 15000, "longest_query": 101, "longest_chosen": 30, "longest_query_chosen": 120}
ODD = {"over_limit": 27, "most_over": 4, "empty_summaries": 14, "equal_summaries": 3}
LABELS = {"chose_first": 990, "contradicted": 0, "against_choice": 0}
COUNTED = {
    "sft_train": {"rows": 16000, "skipped": 0, "over_limit": 0, "most_over": 0},
    "comparisons_train": {"rows": 15000, "skipped": 2, "without_confidence": 158} | ODD | LABELS,
    "comparisons_validation": {"rows": 2000} | LABELS,
}
LEARNED = {"in": {}, "posts": 0, "of_posts": 600, "pairs": 0, "of_pairs": 2000, "against": 0}
OWN_TEXTS = {"reference": 0.0, "post": 0.0, "summary": 0.01}
PUBLISHED = {
    "sft_train": {"rows": 16000, "known": 16000},
    "comparisons_train": {"rows": 15002, "known": 15009},
}
OF_LENGTH = {"1": {"accuracy": 0.52, "pairs": 1500}, "4": {"accuracy": 0.7, "pairs": 500}}
LENGTH: dict[str, Any] = {
    "longer": {"estimate": 0.61, "low": 0.59, "high": 0.63, "pairs": 2000},
    "above_longer": {"estimate": 0.02, "low": 0.01, "high": 0.03, "pairs": 2000},
    "near_equal": None,
    "longer_near_equal": None,
    "at_equal_length": {"estimate": None, "low": None, "high": None, "why": "fabricated"},
    **dict.fromkeys(("by_split", "by_batch", "by_strength", "by_policies"), OF_LENGTH),
}
RESULTS: dict[str, Any] = {
    "base": {
        "vocabulary": 700,
        "tokens": {"sft_train": POSTS, "comparisons_train": PAIRS},
        "rows": COUNTED,
        "learned": LEARNED,
        "published": PUBLISHED,
    },
    "sft": {"loss/validation": 1.5, "rougeL": 0.4, "updates": 60},
    "rm": {
        "pairs": 2000,
        "training_pairs": 15000,
        "loss": 0.47,
        **dict.fromkeys(("by_split", "by_batch", "by_strength", "by_policies"), GROUPS),
        "cnndm": None,
        "length": LENGTH,
        "calibration": [[0.25, 0.55, 900], [0.75, 0.66, 600], [1.25, 0.8, 300], [1.75, 0.9, 80]],
    },
    "normalize": dict.fromkeys(("mean_before", "std", "minimum", "maximum", "mean_after"), 0.5)
    | {"references": 2000, "standard_error": 0.011, "padding_difference_over_0.01": 0.0},
    "ppo": {"objective/kl": 7.31, "objective/scores": 1.52, "updates": 60, "episodes": 7680}
    | {"queries_from": "sft_train"}
    | {"policy/eos_rate": 0.98},
    "summaries": {
        "policies": {
            "sft": WRITTEN | {"rougeL": 0.412, "tokens": 17.23, "score": -0.351},
            "ppo": WRITTEN | {"rougeL": 0.433, "tokens": 19.84, "score": 1.287},
        },
        "reference_tokens": 18.61,
        "posts": 600,
    },
    "judge": {"judgements": 2400, "share_first": 0.523, "models": []},
}
CONTROL = {"what": "the post's title", "judgements": 100, "passed": True, "unjudged": 0.0}
CONTROL |= {"preferred": 0.081, "low": 0.03, "high": 0.19}
MADE: dict[str, Any] = {"code_version": "508a0d9", "versions": {"python": "3.11.7"}}
MADE |= {"code": {"module": "", "files": {}}}
MADE |= {"processor": {"model": "AMD EPYC", "instructions": "AVX2"}}
MADE |= {"seconds": 83.0, "peak_memory_gib": 1.2, "device": "CPU, 2 cores", "finished": "2026"}


def interval(value, half=0.03):
    return {"estimate": value, "low": value - half, "high": value + half, "posts": 600}


def statistics(value, unjudged, at_length=None, first=0.523):
    """What `eval.stats.table.analyse` says of one policy, in its form."""
    names = ("raw", "order_balanced", "shown_first", "shown_second", "length_controlled")
    found: dict[str, Any] = {name: interval(value - k / 100) for k, name in enumerate(names)}
    if at_length is not None:
        found["length_controlled"] = interval(at_length)
    found["length_controlled"] |= {
        "order_logits": [0.41, 0.2, 0.6],
        "doubled_length_logits": [1.4, 1.1, 1.7],
        "near_equal": 300,
        "extrapolated": False,
    }
    part = {"from": 0.5, "to": 2.0, "judgements": 1200, "rate": value} | interval(value)
    return found | {
        "judgements": 1200,
        "posts": 600,
        "unjudged": unjudged,
        "worst_case": [value - unjudged, value],
        "share_first": interval(first),
        "swap_consistency": interval(0.912),
        "length_bins": [part],
        "median_length_ratio": 1.0,
        "median_other_ratio": 1.07,
    }


def make_controls(passed):
    title = CONTROL | ({} if passed else {"passed": False, "preferred": 0.6, "high": 0.7})
    lacking = {"what": "the post's first sentence", "judgements": 0, "passed": None, "why": "none"}
    controls = {"title": title, "first_sentence": lacking}
    return {"posts": 50, "controls": controls, "failed": [] if passed else ["title"]}


def rate(value, unjudged, **leanings):
    counts = {"wins": round(600 * value), "ties": 0, "losses": 600 - round(600 * value)}
    judged = value * (1 - unjudged)
    bounds = {"low": value - 0.03, "high": value + 0.03, "worst_case": [judged, judged + unjudged]}
    found = {"win_rate": value, "unjudged": unjudged, "p_value": 0.0001, "identical": OWN_TEXTS}
    found |= {"rm_agrees": None, "score_gain": None}
    return found | counts | bounds | {"statistics": statistics(value, unjudged, **leanings)}


def make_results(judge, sft, ppo, accuracy, unjudged, size, controls_pass, **leanings):
    gap = interval(ppo - sft, 0.04) | {"p_value": 0.0001, "alike": 0.1}
    agrees = None if judge["kind"] == "reward_model" else interval(0.7)
    win_rate = {
        "judge": judge,
        "posts": 600,
        "texts": 600,
        "policies": {
            "sft": rate(sft, 0.0),
            "ppo": rate(ppo, unjudged, **leanings) | {"rm_agrees": agrees},
        },
        "differences": {"ppo-sft": gap},
    }
    spread = {"accuracy_low": accuracy - 0.02, "accuracy_high": accuracy + 0.02}
    return RESULTS | {
        "base": RESULTS["base"] | {"parameters": size},
        "rm": RESULTS["rm"] | {"accuracy": accuracy} | spread,
        "judge": RESULTS["judge"] | {"judge": judge, "unjudged": unjudged / 2},
        "controls": make_controls(controls_pass),
        "win_rate": win_rate,
    }


def make_files(folder, stage, scores, texts, means):
    """`means`: the mean score of each policy's summaries."""
    if stage in ("sft", "rm", "ppo"):
        write_rows(folder / "metrics.jsonl", curves(stage))
    if stage == "summaries":
        for policy, text in (("sft", "my aunt lost <b>it</b>"), ("ppo", "My aunt sold my lamp.")):
            row = {"reference": "the aunt | lamp", "summary": text, "tokens": 7}
            row |= {"has_eos": True, "reference_score": 0.25, "reference_tokens": 6}
            spread = [(index - 4) / 10 * (policy == "ppo") for index in range(9)]
            rows = [
                {"id": f"toy{index}", "query": NASTY.replace("a | b", f"a | b{' c' * index}")}
                | row
                | {"score": means[policy]["score"] + apart}
                for index, apart in enumerate(spread)
            ]
            if texts and policy == "ppo":
                rows = [{**one, "summary": text} for one, text in zip(rows, texts, strict=True)]
            write_rows(folder / f"{policy}.jsonl", rows)
    if stage == "win_rate":
        found = [(p, i, s) for p in ("sft", "ppo") for i, s in enumerate(scores)]
        rows = [{"policy": p, "id": f"toy{i}", "score": s} for p, i, s in found]
        write_rows(folder / "post_scores.jsonl", rows)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def fabricate(
    config,
    judge=OFFLINE,
    sft=0.412,
    ppo=0.63,
    accuracy=0.781,
    unjudged=0.0,
    size=930_432,
    controls_pass=True,
    scores=(1.0, 0.5, 0.0, None),
    texts=None,
    found=None,
    **leanings,
):
    """A finished run on disk; returns its results by stage.

    `scores`: of the posts, alike for both policies; `texts`: PPO's summaries of the nine posts;
    `found`: changes to PPO's results, and under the names of stages to theirs. With an upstream its
    stages must be there already. A run that is there is judged by one more judge.
    """
    results = make_results(judge, sft, ppo, accuracy, unjudged, size, controls_pass, **leanings)
    changes = {"ppo": {}} | (found or {})
    changes["ppo"] |= {key: changes.pop(key) for key in [*changes] if key not in STAGES}
    results |= {stage: results[stage] | changed for stage, changed in changes.items()}
    written = {policy: row["score"] for policy, row in results["summaries"]["policies"].items()}
    gain = interval(written["ppo"] - written["sft"])
    results["win_rate"]["policies"]["ppo"]["score_gain"] = gain
    for stage in STAGES:
        folder = stage_folder(config, stage)
        judged_before = not TABLE[stage].per_judge and folder.exists()
        if judged_before or config.is_from_upstream(stage):
            continue
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config.model_dump()))
        make_files(folder, stage, scores, texts, results["summaries"]["policies"])
        write_manifest(config, stage, results[stage])
    return results


def finish_summaries(config, **policies):
    """A finished stage `summaries` with the rows of these policies."""
    with open_stage(config, "summaries") as run:
        for policy, rows in policies.items():
            write_rows(run.partial / f"{policy}.jsonl", rows)
        run.finish({})


def two_judges():
    """One run and the configs of the two judges who judged it: PPO wins 63% and 55%."""
    facts = make_config("tiny")
    other = facts.changed(judge=JudgeSettings(kind="openai", model="another"))
    fabricate(facts)
    fabricate(other, judge=ONLINE, ppo=0.55)
    return facts, other


PAPER_JUDGE = {"kind": "openai", "name": "gpt-3.5-turbo-0125", "is_llm": True, "note": ""}
PYTHIA = {"1b": 1_011_781_632, "2.8b": 2_775_208_960, "6.9b": 6_857_302_016}
# KL, nats, and mean score at the end: of the collapsed 1B seeds, and of the others of each size.
ENDS = {44413: (86.0, 6.7), 66613: (50.0, 4.5)}
OTHERS = {"1b": (38.0, 3.4), "2.8b": (28.0, 3.3), "6.9b": (26.3, 3.33)}


def pythia_study(judge=PAPER_JUDGE, **changes):
    """Three sizes with four seeds and the paper's rates; two 1B seeds collapse. Their names.

    `changes` go to the config of every run.
    """
    numbers = paper.load()["sizes"]
    rates = numbers["ppo_win_rate"]
    for size, parameters in PYTHIA.items():
        by_seed = zip(rates["seed_names"][size], rates["seeds"][size], strict=True)
        for number, (seed, rate) in enumerate(sorted(by_seed)):
            kl, score = ENDS.get(seed, OTHERS[size]) if size == "1b" else OTHERS[size]
            written = RESULTS["summaries"]["policies"]
            policies = {
                policy: written[policy]
                | {"tokens": numbers[f"{policy}_tokens"]["seeds"][size][number], "score": value}
                | {"rougeL": numbers["sft_rougeL"]["mean"][size], "copied_title_words": 0.3}
                for policy, value in (("sft", 0.4), ("ppo", score))
            }
            fabricate(
                make_config(f"pythia-{size}", seed=seed).changed(**changes),
                judge=judge,
                sft=numbers["sft_win_rate"]["seeds"][size][number],
                ppo=rate,
                at_length=rate - 0.06,
                accuracy=numbers["rm_accuracy"]["mean"][size],
                size=parameters,
                found={
                    "objective/kl": kl + number / 10,
                    "objective/scores": score + number / 100,
                    "summaries": {"policies": policies, "reference_tokens": 28.4},
                },
            )
    return [f"pythia-{size}" for size in PYTHIA]


def write_manifest(config, stage, results):
    """The manifest of a finished stage whose inputs are those that lie there now."""
    inputs = current_inputs(config, stage)
    manifest = MADE | {
        "stage": stage,
        "name": config.name,
        "preset": config.preset,
        "seed": config.seed,
        "upstream": config.upstream,
        "settings_hash": settings_hash(config, stage),
        "settings": settings_of(config, stage),
        "inputs": inputs,
        "outputs": {},
        "sizes": {},
        "content": hash_of([results, inputs]),
        "results": results,
    }
    (stage_folder(config, stage) / "manifest.json").write_text(json.dumps(manifest))


def calibrated(config, flags):
    """A calibration beside a run: a judge who is right on 9 of 10 labels of each kind."""
    folder = stage_folder(config, "calibration")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.model_dump()))
    keys = ("agreement", "agreement_decided", "sensitivity", "specificity")
    results = {key: interval(0.75) | {"pairs": 200} for key in keys}
    results |= {"pairs": 200, "of_pairs": 900, "posts": 180, "ties": 3, "flags": flags}
    results |= {"statistics": statistics(0.5, 0.0), "source": "labelled comparisons"}
    results |= {"judge": OFFLINE}
    results |= {"error_pairs": 200, "with_reference": True, "by_family": {}}
    kappa = interval(0.5, 0.1)
    more = interval(0.12, 0.05)
    longest = {"agreement": interval(0.63), "kappa": interval(0.26, 0.1), "difference": more}
    results |= {"kappa_interval": kappa, "simple": {"longest": longest}}
    results |= {"prefers_longer": {"judge": interval(0.6), "labels": interval(0.63)}}
    results |= {"asking": {"seconds": 80.0, "questions": 400}, "judged": 197}
    write_manifest(config, "calibration", results)
    pairs = [
        {"label": label, "answer": float(label == right), "with_reference": True, "family": ""}
        for label in (True, False)
        for right in [True] * 90 + [False] * 10
    ]
    rows = [
        pair | {"id": f"pair{number}", "post": f"p{number}"} for number, pair in enumerate(pairs)
    ]
    write_rows(folder / "pairs.jsonl", rows)
