"""What users get wrong, group by group, and the one line that they expect for it.

Each table's rows hold what is wrong and a part of the line; `tests/test_bad_inputs.py` runs them
through the real commands.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chat_server import GOOD, chat
from tests.test_errors import PAIR, POST

Change = Callable[[Path], object]


def changed(row: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of a row with one value, at keys with dots between them, replaced."""
    copy = json.loads(json.dumps(row))
    *parents, last = path.split(".")
    place = copy
    for key in parents:
        place = place[int(key) if isinstance(place, list) else key]
    place[last] = value
    return copy


# -- rows: file, its second row, the line ----------------------------------------------------------

TRAIN, PAIRS = "sft_train", "comparisons_train"
ROWS: list[tuple[str, Any, str]] = [
    (TRAIN, '{"id": "p1", ', "sft_train.jsonl:2: not JSON"),
    (TRAIN, '{"id": "p1", "post": "a", "post": "b"}', "jsonl:2: key 'post' is there twice"),
    (PAIRS, '{"info": {"id": "a", "id": "b"}}', "jsonl:2: key 'id' is there twice"),
    (TRAIN, "[1]", "sft_train.jsonl:2: "),
    (TRAIN, "null", "sft_train.jsonl:2: "),
    (TRAIN, b'{"id": "\xff"}', "sft_train.jsonl:2: "),
    (TRAIN, b'{"id": "\xe4\xb8"}', "sft_train.jsonl:2: "),
    (TRAIN, "[" * 100_000, "nested too deeply"),
    (TRAIN, {key: POST[key] for key in POST if key != "id"}, "field id is missing"),
    (TRAIN, {**POST, "title": None}, "field title is missing"),
    (TRAIN, {**POST, "post": 7}, "field post is of type int, not str"),
    (TRAIN, {**POST, "post": ["a"]}, "field post is of type list, not str"),
    (TRAIN, {**POST, "subreddit": {}}, "field subreddit is of type dict, not str"),
    (TRAIN, {**POST, "summary": " \n"}, "field summary is empty"),
    (TRAIN, {**POST, "post": "\ud83d"}, "field post holds half a character"),
    (TRAIN, {**POST, "title": "x " * 400}, "cannot be cut to fit"),
    (TRAIN, {**POST, "summary": "x " * 90}, "limit"),
    ("sft_validation", {**POST, "summary": 1.5}, "sft_validation.jsonl:2: field summary is of"),
    (PAIRS, {**PAIR, "choice": 2}, "comparisons_train.jsonl:2: field choice"),
    (PAIRS, {**PAIR, "choice": True}, "field choice"),
    (PAIRS, {**PAIR, "choice": "1"}, "field choice"),
    (PAIRS, {**PAIR, "summaries": PAIR["summaries"][:1]}, "summaries"),
    (PAIRS, {**PAIR, "summaries": "two"}, "summaries"),
    (PAIRS, changed(PAIR, "summaries.0.text", None), "summaries[0].text"),
    (PAIRS, changed(PAIR, "summaries.1.text", "\ud83d"), "summaries[1].text holds half a"),
    (PAIRS, changed(PAIR, "info.post", None), "field info.post is missing"),
    (PAIRS, {**PAIR, "info": None}, "field info is missing"),
    (PAIRS, {**PAIR, "batch": None}, "field batch is missing"),
    (
        PAIRS,
        {**changed(PAIR, "info.post", None), "batch": None, "choice": None},
        "fields choice, batch, info.post are missing",
    ),
    (PAIRS, changed(PAIR, "extra.confidence", 10), "confidence"),
    (PAIRS, {**PAIR, "extra": "sure"}, "extra"),
]

# -- settings: words of a command line, the line ---------------------------------------------------

SETTINGS: list[tuple[str, str]] = [
    ("--preset tny", "unknown preset 'tny': did you mean tiny"),
    ("--preset posts", "needs a folder of posts"),
    ("--preset outputs", "needs a file of summaries: add INPUT="),
    ("--seed -1", "seed must be at least 0"),
    ("--set ppo.kl_coef=0.1", "ppo.kl_coef=0.1 needs a run name of its own"),
    ("--name a/b", "name must be the name of a folder"),
    ("--name ..", "name must be the name of a folder"),
    ("--name cache", "name must be the name of a folder"),
    ("--name tiny-s", "is the folder of that preset"),
    ("--name x --upstream gone", "upstream gone has no seed 44413"),
    ("--name x --upstream a/b", "upstream must be the name of a folder"),
    ("--name x --data gone", "data.source: no folder gone"),
    ("--name x --data bad\x1bname", "must hold no control characters"),
    ("--name x --data half\udce9", "must hold no control characters"),
    ("--name x --set normalize.posts=1", "normalize.posts must be 2 or more"),
    ("--name x --set base.hidden_size=36", "base.hidden_size must be an even multiple"),
    ("--set judge.model=gpt-6", "judge.model: judge.kind=facts judges and does not read it"),
    ("--set judge.kind=reward_model judge.asks=2", "judge.asks: judge.kind=reward_model judges"),
    ("--name x --set nothing", "--set takes section.key=value, not 'nothing'"),
    ("--name x --set ppo.klcoef=1", "unknown setting 'ppo.klcoef': did you mean"),
    ("--name x --set pppo.kl_coef=1", "unknown se"),
    ("--name x --set ppo.kl_coef=high", "ppo.kl_coef takes a value of type float"),
    ("--name x --set ppo.kl_coef=nan", "ppo.kl_coef takes a finite number"),
    ("--name x --set ppo.kl_coef=-1", "ppo.kl_coef must be at least 0"),
    ("--name x --set ppo.kl_target=6 ppo.kl_coef=0", "ppo.kl_coef must be above 0 with"),
    ("--name x --set rloo.kl_target=6 rloo.batch_size=100 rloo.kl_horizon=20", "rloo.kl_horizon"),
    ("--name x --set sft.epochs=1.5", "sft.epochs takes a value of type int"),
    ("--name x --set sft.learning_rate=0", "sft.learning_rate must be above 0"),
    ("--name x --set ppo.eos_trick=never", "ppo.eos_trick must be one of"),
    ("--name x --set ppo.batch_size=0", "ppo.batch_size must be above 0"),
    ("--name x --set optimizer.adam_beta1=1", "optimizer.adam_beta1 must be below 1"),
    ("--name x --set optimizer.adam_beta2=1.5", "optimizer.adam_beta2 must lie in [0, 1]"),
    ("--name x --set dpo.beta=0", "dpo.beta must be above 0"),
    ("--name x --set eval.posts=99999", "eval.posts must be at most 600"),
    ("--set judge.base_url=http://me:word@h/v1", "holds a user or a password"),
    ("--name x --set judge.kind=oracle", "judge.kind must be one of"),
    ("--name x --set memory.mixed_precision=fp7", "memory.mixed_precision must be one of"),
    ("--name x --set ppo.compat=paper ppo.whiten_over=batch", "has no effect: ppo.compat=paper"),
    ("--name x --set released.policy=p sft.epochs=2", "sft.* has no effect"),
]

# -- make variables: words after `make`, the line --------------------------------------------------

MAKE: list[tuple[str, str]] = [
    ("sft|PRESET=tny", "unknown preset 'tny'"),
    ("sft|SEED=one", "invalid int value: 'one'"),
    ("sft|SET=ppo.kl_coef=x|NAME=x", "ppo.kl_coef takes a value of type float"),
    ("sft|SETT=1", "unknown make variable 'SETT': did you mean SET"),
    ("sft|NAME=a/b", "name must be the name of a folder"),
    ("sft|NAME=it's; `a` $(b)/", "name must be the name of a folder"),
    ("sft|NAME=a\nb", "NAME holds a line break"),
    ("sft|DATA=two words|NAME=x", "data.source: no folder two words"),
    ("smt", "unknown goal 'smt'"),
    ("sft|REPLACE=nothing", "unknown stage 'nothing'"),
    ("eval|MAX_COST=lots", "MAX_COST=lots: give dollars above 0"),
    ("sft|GPUS=0", "GPUS=0 NODES=1: give the numbers"),
    ("sft|ENGINE=zero3|GPUS=2", "ENGINE=zero3 is refused"),
    ("sft|NODES=2", "NODES=2, but this is no Slurm job"),
    ("sft|LAUNCH=nosuchprogram", "there is no program nosuchprogram"),
    ("sft|LAUNCH=a 'b", "LAUNCH=a 'b: No closing quotation"),
    ("sft|study", "study stands alone"),
    ("status|NAME=gone", "unknown run 'gone'"),
    ("sft|NAME=x|SET=ppo.lam=1 ppo.kl_coef=1 ppo.lam=0.9", "ppo.lam is set twice: leave one out"),
    ("eval|JUDGE=foo", "JUDGE is for compare scaling"),
    ("publish", "name the pages"),
    ("sft|eval|NAME=x|SET=judge.kind=openai", "without a server: SET=judge.kind=reward_model"),
    ("sft|rm|pppo", "unknown goal 'pppo'"),
    ("sft|MAXCOST=5", "unknown make variable 'MAXCOST': did you mean MAX_COST"),
]

# -- models: a change of a good folder, the line ---------------------------------------------------


def config_with(**values: Any) -> Change:
    """A change of a model's config.json."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def cut(name: str, size: int) -> Change:
    """A file of which only the first bytes are left."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def written(name: str, text: str) -> Change:
    """A file with another text."""
    return lambda folder: (folder / name).write_text(text)


def a_folder(name: str) -> Change:
    """A folder where a file belongs."""

    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


def emptied(folder: Path) -> None:
    """A folder without a file."""
    for path in folder.iterdir():
        path.unlink()


def only_bin(content: bytes) -> Change:
    """Weights in the old format."""

    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(content)

    return change


LOADS = "model model does not load: "
NEW, OLD = (f"model/{name} does not load" for name in ("model.safetensors", "pytorch_model.bin"))
MODELS: list[tuple[str, Change, str]] = [
    ("half of the weights", cut("model.safetensors", 500), NEW),
    ("all but the last weights", cut("model.safetensors", -100), NEW),
    ("empty weights", cut("model.safetensors", 0), NEW),
    ("weights are text", written("model.safetensors", "hello"), NEW),
    ("no weights", lambda folder: (folder / "model.safetensors").unlink(), "holds no weights"),
    ("old weights are text", only_bin(b"hello"), OLD),
    ("old weights are a program", only_bin(b"cos\nsystem\n(S'touch hacked'\ntR."), OLD),
    ("old weights are empty", only_bin(b""), OLD),
    ("another width", config_with(hidden_size=64), "other shapes than its config.json"),
    ("another vocabulary", config_with(vocab_size=99), "other shapes than its config.json"),
    ("a layer too many", config_with(num_hidden_layers=3), "model model lacks"),
    ("a layer too few", config_with(num_hidden_layers=1), "has unexpected"),
    ("heads that do not divide", config_with(num_attention_heads=5), "does not load"),
    ("no heads", config_with(num_attention_heads=0), "does not load"),
    ("a width of text", config_with(hidden_size="wide"), "does not load"),
    ("unknown family", config_with(model_type="nonesuch"), LOADS),
    ("code of its own", config_with(model_type="x", auto_map={"AutoConfig": "x.Y"}), LOADS),
    ("bitsandbytes", config_with(quantization_config={"quant_method": "bitsandbytes"}), "is quant"),
    ("gptq", config_with(quantization_config={"quant_method": "gptq"}), "is quantised (gptq)"),
    ("an encoder", config_with(model_type="bert"), "model model lacks"),
    ("config is a list", written("config.json", "[]"), "does not load"),
    ("config is null", written("config.json", "null"), "does not load"),
    ("config is no JSON", written("config.json", "{"), "does not load"),
    ("config is empty", written("config.json", ""), "does not load"),
    ("config is a folder", a_folder("config.json"), "does not load"),
]
TOKENIZER = "tokenizer tokenizer "
TOKENIZERS: list[tuple[str, Change, str]] = [
    ("empty", written("tokenizer.json", ""), f"{TOKENIZER}does not load"),
    ("no JSON", written("tokenizer.json", "{"), f"{TOKENIZER}does not load"),
    ("a list", written("tokenizer.json", "[]"), f"{TOKENIZER}does not load"),
    ("an empty object", written("tokenizer.json", "{}"), f"{TOKENIZER}does not load"),
    ("cut", cut("tokenizer.json", 200), f"{TOKENIZER}does not load"),
    ("empty config", written("tokenizer_config.json", ""), f"{TOKENIZER}does not load"),
    ("config is a list", written("tokenizer_config.json", "[]"), f"{TOKENIZER}does not load"),
    ("no EOS", written("tokenizer_config.json", "{}"), "has no EOS token"),
    ("none", lambda folder: (folder / "tokenizer.json").unlink(), TOKENIZER),
    ("an empty folder", emptied, TOKENIZER),
    ("a folder for its file", a_folder("tokenizer.json"), TOKENIZER),
]

# -- state on disk: a change of a finished run, a command, the line --------------------------------

LACKS = "restore it, or make anew (REPLACE=) what has written it"


def without(name: str, key: str) -> Change:
    """A JSON file of which a person has taken a key out."""

    def change(folder: Path) -> None:
        values = json.loads((folder / name).read_text())
        del values[key]
        (folder / name).write_text(json.dumps(values))

    return change


def a_file(name: str) -> Change:
    """A file where a folder belongs."""

    def change(folder: Path) -> None:
        (folder / name).rename(folder / "away")
        (folder / name).write_text("")

    return change


def with_value(name: str, path: str, value: Any) -> Change:
    """A JSON or JSONL file in which a person has changed a value, of the first row."""

    def change(folder: Path) -> None:
        first, *rest = (folder / name).read_text().split("\n" if name.endswith("l") else "\0")
        text = json.dumps(changed(json.loads(first), path, value))
        (folder / name).write_text("\n".join([text, *rest]))

    return change


BY_HAND = "was changed after its stage wrote it: restore it, or move runs/tiny/seed44413/"
ON_DISK = "has changed on disk"
STATE: list[tuple[Change, str, str]] = [
    (written("sft/manifest.json", "{"), "look", "sft/manifest.json is no manifest"),
    (written("sft/manifest.json", "[1]"), "look", "sft/manifest.json is no manifest"),
    (written("sft/manifest.json", ""), "look", "sft/manifest.json is no manifest"),
    (written("sft/manifest.json", "{}"), "look", "was written by no stage"),
    (without("sft/manifest.json", "sizes"), "look", "sft/manifest.json is no manifest"),
    (without("sft/manifest.json", "settings_hash"), "look", "sft/manifest.json " + BY_HAND),
    (a_folder("sft/manifest.json"), "look", "a folder stands where a file belongs"),
    (a_file("sft"), "look", "a file stands where a folder belongs"),
    (without("rm/manifest.json", "results"), "page", "rm/manifest.json is no manifest"),
    (written("ppo/metrics.jsonl", "{}\n"), "page", f"stage ppo {ON_DISK} (metrics.jsonl)"),
    (written("ppo/metrics.jsonl", "{\n"), "page", f"stage ppo {ON_DISK} (metrics.jsonl)"),
    *(
        (with_value("ppo/manifest.json", key, value), command, "ppo/manifest.json " + BY_HAND)
        for command in ("look", "page")
        for key, value in (
            *(("seconds", []), ("seconds", 1), ("results.kl", "low"), ("results.policies", 5)),
            *(("content", None), ("inputs.sft", 3), ("sizes", {"x": "big"}), ("versions", [])),
        )
    ),
    (with_value("ppo/manifest.json", "code", 5), "look", "ppo/manifest.json is no manifest"),
    (with_value("ppo/manifest.json", "outputs", []), "look", "ppo/manifest.json is no manifest"),
    *(
        (
            with_value(f"{stage}/{file}", key, value),
            "page",
            f"stage {stage.split('/')[0]} {ON_DISK} (",
        )
        for stage, file, key, value in (
            ("ppo", "metrics.jsonl", "objective/kl", "low"),
            ("ppo", "metrics.jsonl", "objective/kl", None),
            ("ppo", "metrics.jsonl", "step", [1]),
            ("ppo", "samples.jsonl", "query", 5),
            ("sft", "metrics.jsonl", "loss", {}),
            ("judge/facts", "judgements.jsonl", "verdict", 3),
            ("judge/facts", "judgements.jsonl", "verdict", "nobody"),
            ("judge/facts", "judgements.jsonl", "policy", None),
            ("win_rate/facts", "config.json", "seed", "one"),
        )
    ),
    *(
        (with_value("sft/config.json", key, value), "named", f"sft/config.json: {line}")
        for key, value, line in (
            ("ppo.kl_coef", "high", "ppo.kl_coef must be of type float, not 'high': " + LACKS),
            ("ppo.batch_size", 8.5, "ppo.batch_size must be of type int, not 8.5"),
            ("ppo.batch_size", -8, "ppo.batch_size must be above 0"),
            ("eval.temperature", None, "eval.temperature must be of type float, not None"),
            ("judge.model", [], "judge.model must be of type str, not []"),
            ("upstream", -1.5, "upstream must be of type str"),
            ("seed", "one", "seed must be of type int"),
            ("overrides", [1], "overrides must be texts"),
        )
    ),
    (with_value("rm/config.json", "rm.batch_size", "8"), "upstream", "must be of type int"),
    (with_value("rm/config.json", "rm", [8]), "upstream", "rm/config.json is no config of ours"),
    (written("replacing.json", "{}"), "replace", "replacing.json lacks 'request'"),
    (written("replacing.json", "["), "replace", "replacing.json is no JSON"),
    (written("replacing.json", "[]"), "replace", "replacing.json is no JSON object"),
    (written("../../hub.json", "["), "hub", "hub.json is no JSON"),
    (written("../../hub.json", "[]"), "hub", "hub.json is no JSON object"),
    (written("judge_cache", "garbage"), "cache", "judge_cache: the cache of replies fails"),
]

# -- outputs: a file's name, its content, the line -------------------------------------------------

GIVEN: dict[str, Any] = {"id": 1, "post": "p", "summary": "s", "reference": "r"}


def lines(*rows: dict[str, Any]) -> bytes:
    """A JSONL file."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


OUTPUTS: list[tuple[str, bytes, str]] = [
    ("x.jsonl", b"", "holds no summaries"),
    ("x.jsonl", b"{\n", "x.jsonl:1: not JSON"),
    ("x.jsonl", b"[1]\n", "not a JSON object"),
    ("x.jsonl", b"\xff\n", "x.jsonl:1: "),
    ("x.jsonl", lines({"id": 1, "text": "p", "summary": "s"}), "no column post"),
    ("x.jsonl", lines(GIVEN | {"summary": None}), "column summary is null"),
    ("x.jsonl", lines(GIVEN | {"summary": 3}), "column summary is of type int"),
    ("x.jsonl", lines(GIVEN | {"post": " "}), "column post is empty"),
    ("x.jsonl", lines(GIVEN | {"summary": "\ud800"}), "half a character"),
    ("x.jsonl", lines(GIVEN, GIVEN | {"summary": "t"}), "stands at"),
    ("x.jsonl", lines(GIVEN, GIVEN | {"system": "b", "post": "q"}), "the post of id 1 differs"),
    ("x.csv", b'id,post\n1,"p\n', "not CSV"),
    ("x.csv", b"id,post\n1\n", "has not 2 cells"),
    ("x.csv", b"id,id\n1,1\n", "two columns are called id"),
    ("x.csv", b"id,post\n1,\xff\n", "not UTF-8"),
    ("x.parquet", b"x", "not a Parquet file"),
    ("x.jsonl", lines(GIVEN | {"summary": "x " * 6000}), "x.jsonl:1: column summary has 12,000 ch"),
    ("x.jsonl", lines(GIVEN | {"reference": "x" * 10_001}), "column reference has 10,001 charact"),
    ("x.xlsx", b"x", "a file of unknown kind"),
]

# -- server: what it answers, the line -------------------------------------------------------------


def error(status: int, text: str = "no way", **more: str) -> tuple[int, Any]:
    """A refusal as the protocol spells it."""
    return status, {"error": {"message": text, **more}}


SERVER: list[tuple[Any, str]] = [
    (error(400), "400"),
    (error(401), "401"),
    (error(403), "403"),
    (error(404), "404"),
    (error(401, "line\nbreak"), "401"),
    (error(401, "\x1b[31mred"), "\\u001b[31mred"),
    (error(429, code="insufficient_quota"), "credit"),
    (error(500), "run it again to go on"),
    (error(503), "run it again to go on"),
    ((200, "<html>a page</html>"), "base_url"),
    ((200, {}), "run it again to go on"),
    ((200, {"choices": []}), "run it again to go on"),
    (chat(GOOD, model="another"), "another"),
]
