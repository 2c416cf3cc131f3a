"""Upload the models of a run, with their cards and the run's page, to the Hugging Face hub.

    make push HUB=me NAME=tiny SEED=44413

One repository a model, `me/tiny-seed44413-ppo` as an example; the page lies in that of PPO, below
`report/`. Repositories are private unless PUBLIC=1 says otherwise. Nothing stale is uploaded, and
of a page about real data the variant without the posts that others wrote. What an interrupted
upload has sent is not sent again.
"""

import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reports.parts.page import PUBLIC, files_of
from reports.parts.words import at_equal_length, judge, number, rate, whole
from reports.sharing.cards import POLICIES, LaterResult, card
from reports.sharing.publish import KINDS, Page, check_holds, pages_of_seed
from stages.finished import check_run, read_manifest
from stages.running.hub import LOGIN
from stages.settings import config as settings
from stages.settings.checks import Parser, in_one_line
from stages.settings.command_line import recorded_config
from stages.settings.config import TOY, Config, UserError, slug
from stages.settings.stages import CARD, TRAINING_STAGES

# Stage -> the end of its repository's name. The reward model is the normalized one.
PUSHED = {"normalize": "reward", **{policy: policy for policy in POLICIES}}
WITH_PAGES = "ppo"
# What the hub takes: `owner/name`, the name of 96 characters at most, no two dashes or dots.
NAME = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9_][\w.-]*/(?=.{1,96}$)[A-Za-z0-9_][\w.-]*", re.A)
PAGES = "report"  # folder of the pages in a repository
GOES_ON = "the same command goes on from there"


@dataclass(frozen=True, kw_only=True)
class Upload:
    """One repository and what it will hold."""

    repository: str
    stage: str
    files: dict[str, Path | bytes]
    """Path in the repository -> file, or its bytes."""

    @property
    def size(self) -> int:
        """Bytes."""
        parts = self.files.values()
        return sum(part.stat().st_size if isinstance(part, Path) else len(part) for part in parts)


# -- what is uploaded ------------------------------------------------------------------------------


def uploads_of(hub: str, name: str, seed: int, judge_folder: str = "") -> list[Upload]:
    """What is to be uploaded of one seed of a run.

    Raises UserError for an unknown run, one without a finished model, and anything that is stale.
    """
    folder = settings.RUNS / name / f"seed{seed}"
    check_run(name)
    configs = finished_configs(folder)
    if not configs.keys() & PUSHED.keys():
        raise UserError(f"{folder} holds no finished model: run `make ppo` for it first")
    for stage, config in configs.items():
        check_holds(config, stage)
    pages = [page for kind in KINDS for page in pages_of_seed(folder, kind, judge_folder)]
    refuse_texts_of_others(pages, next(iter(configs.values())))
    uploads = []
    for stage, config in configs.items():
        if stage in PUSHED:
            name = repository(hub, config, stage)
            files = files_of_model(folder, config, stage, pages, name)
            uploads.append(Upload(repository=name, stage=stage, files=files))
    return uploads


def finished_configs(folder: Path) -> dict[str, Config]:
    """Of each stage of a seed that has made a model, the config that it recorded."""
    recorded = {stage: recorded_config(folder / stage) for stage in ("base", *TRAINING_STAGES)}
    return {
        stage: config
        for stage, config in recorded.items()
        if config is not None and read_manifest(folder / stage) is not None
    }


def refuse_texts_of_others(pages: Sequence[Page], config: Config) -> None:
    """Raise UserError for a page about real data that is not the variant without its texts."""
    for page in pages:
        if page.kind == "run" and config.data.source != TOY and page.folder.name != PUBLIC:
            raise UserError(
                f"{page.stem} holds posts that others wrote, and has no variant without them: "
                f"remove {page.folder} and run `make eval` again"
            )


def repository(hub: str, config: Config, stage: str) -> str:
    """The repository of a model; `hub` is a name of the hub, or a name and what stands for the run.

    Raises UserError for what the hub does not take as a name.
    """
    owner, _, prefix = hub.partition("/")
    full_name = f"{owner}/{prefix or slug(config.name)}-seed{config.seed}-{PUSHED[stage]}"
    if not NAME.fullmatch(full_name):
        raise UserError(f"HUB={hub} is no name of the hub: give yours, as in `make push HUB=me`")
    return full_name


def files_of_model(
    folder: Path, config: Config, stage: str, pages: Sequence[Page], place: str
) -> dict[str, Path | bytes]:
    """A model's files; its card with what is known by now; the pages beside PPO's.

    `place` is the repository, which the card's code names.
    """
    model = folder / stage / "model"
    files: dict[str, Path | bytes] = {
        str(path.relative_to(model)): path for path in sorted(model.rglob("*")) if path.is_file()
    }
    manifest = read_manifest(folder / stage) or {}
    text = card(config, stage, "model", manifest, judged(stage, folder, pages), place)
    shown = pages if stage == WITH_PAGES else ()
    if shown:
        names = "\n".join(f"- [{page.stem}]({PAGES}/{page.stem}.md)" for page in shown)
        text += f"\n## Pages\n\n{names}\n"
    for page in shown:
        own = files_of(page.folder, page.stem)
        files |= {f"{PAGES}/{path.relative_to(page.folder)}": path for path in own}
    return files | {CARD: text.encode()}


def judged(stage: str, folder: Path, pages: Sequence[Page]) -> list[LaterResult]:
    """What was found of a model after it was made: its accuracy, or how it was judged."""
    reward = (read_manifest(folder / "rm") or {"results": {}})["results"]
    if stage == "normalize" and "accuracy" in reward:
        what = "held-out comparisons ranked as by the labellers, before normalization"
        return [LaterResult(what, f"{reward['accuracy']:.1%} of {reward['pairs']:,}")]
    numbers = next((page.numbers for page in pages if page.kind == "run"), {})
    if f"{stage}/rougeL" not in numbers:
        return []
    posts = f"{whole(numbers['posts'])} held-out posts"
    given = numbers[f"{stage}/controlled"] is not None
    controlled = numbers[f"{stage}/statistics"]["length_controlled"] if given else None
    won = f"win rate against the references of {posts}, judged by {judge(numbers)}"
    return [
        LaterResult(won, rate(numbers, stage)),
        LaterResult("the same at equal length", at_equal_length(controlled)),
        LaterResult("ROUGE-L on these posts", number(numbers[f"{stage}/rougeL"], 3)),
        LaterResult("length there, tokens", number(numbers[f"{stage}/tokens"], 1)),
        LaterResult("length of the references, tokens", number(numbers["reference/tokens"], 1)),
    ]


def plan_lines(uploads: Sequence[Upload], public: bool, listed: bool) -> list[str]:
    """What goes where, for people; each file too if it is `listed`."""
    who = "public: everybody can read them" if public else "private; PUBLIC=1 makes them public"
    lines = [f"{len(uploads)} repositories, {who}"]
    for upload in uploads:
        lines.append(f"{upload.repository}: {len(upload.files)} files, {upload.size / 1e6:.1f} MB")
        lines += [f"  {name}" for name in sorted(upload.files)] if listed else []
    return lines


# -- uploading -------------------------------------------------------------------------------------


def send(uploads: Sequence[Upload], public: bool) -> Iterator[str]:
    """Upload; yields a line for each repository.

    Raises UserError, one line, for what the hub refuses or the network does not carry.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # `one_line` tells of the last
    if not sys.stderr.isatty():
        disable_progress_bars()
    api = HfApi()
    for upload in uploads:
        with one_line(upload.repository):
            api.create_repo(upload.repository, private=not public, exist_ok=True)
            before = api.repo_info(upload.repository)
            if not public and not before.private:
                raise UserError(
                    f"{upload.repository} is public already: add PUBLIC=1, or make it private first"
                )
            if public and before.private:
                api.update_repo_settings(upload.repository, private=False)
            operations = [
                CommitOperationAdd(path_in_repo=name, path_or_fileobj=path)
                for name, path in upload.files.items()
            ]
            made = api.create_commit(
                upload.repository, operations, commit_message=f"Upload of stage {upload.stage}"
            )
            news = "as it was" if made.oid == before.sha else "uploaded"
            yield f"{news}: {api.endpoint}/{upload.repository} at commit {made.oid[:10]}"


@contextmanager
def one_line(name: str) -> Iterator[None]:
    """Turn what the hub's client raises into one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{name}: {_reason(name, error)}") from error


def _reason(name: str, error: BaseException) -> str:
    """What is wrong and how to mend it; an error of one file stands behind that of the upload."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    chain = [error]
    while chain[-1].__cause__ is not None and not isinstance(chain[-1], HfHubHTTPError):
        chain.append(chain[-1].__cause__)
    last: Any = chain[-1]
    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set: unset it where there is a network"
    if isinstance(last, LocalTokenNotFoundError):
        return f"the hub does not know you: {LOGIN}"
    if not isinstance(last, HfHubHTTPError):
        why = (str(last).splitlines() or [""])[0][:120] or type(last).__name__
        return f"{constants.ENDPOINT} fails ({why}): {GOES_ON}"
    status = last.response.status_code
    owner = name.partition("/")[0]
    known = {
        401: f"the hub does not know you: {LOGIN}",
        403: f"this login may not write there: correct HUB={owner}, or take a token that may write",
        409: f"somebody else changed it at the same time: {GOES_ON}",
        412: f"somebody else changed it at the same time: {GOES_ON}",
    }
    answer = (last.server_message or str(last)).splitlines()[0][:120]
    return known.get(status, f"the hub answers {status} ({answer}): {GOES_ON}")


# -- command line ----------------------------------------------------------------------------------


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Say what is uploaded where, and upload it."""
    parser = Parser(description="upload models, cards and pages to the hub")
    parser.add_argument("--hub", default="", help="your name on the hub, or name/what-for-the-run")
    parser.add_argument("--name", default="tiny", help="run")
    parser.add_argument("--seed", type=int, default=44413)
    parser.add_argument("--judge", default="", help="where the run was judged by several")
    parser.add_argument("--public", action="store_true", help="repositories that all can read")
    parser.add_argument("--dry-run", action="store_true", help="say what would be uploaded")
    args = parser.parse_args(argv)
    uploads = uploads_of(args.hub, args.name, args.seed, args.judge)
    lines = plan_lines(uploads, args.public, args.dry_run)
    print("\n".join(["would upload:" if args.dry_run else "upload:", *lines]), flush=True)
    for line in () if args.dry_run else send(uploads, args.public):
        print(line, flush=True)


if __name__ == "__main__":
    main()
