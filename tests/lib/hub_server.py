"""A hub for the tests: repositories in memory, served as the Hugging Face clients ask for them.

`HF_ENDPOINT` sends the unmodified clients here. The server knows a repository's information, trees
and references, and its files by branch or commit. As on the real hub, the answer for a repository
that does not exist is 401.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.lib.chat_server import Server

KINDS = ("models", "datasets")
Files = dict[str, bytes]


class RefusedError(Exception):
    """An answer that is an error: status, and what the headers X-Error-* say."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass
class Repository:
    """Commits by their hash, and the branches that point at them."""

    commits: dict[str, Files] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, files: Files, branch: str = "main") -> str:
        """Add a commit with exactly these files to a branch; return its hash, 40 digits."""
        listing = [(branch, name, blob_id(content)) for name, content in sorted(files.items())]
        sha = hashlib.sha1(json.dumps(listing).encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        return sha

    def resolve(self, revision: str) -> tuple[str, Files]:
        """The commit of a branch or of a commit's own hash, and its files."""
        sha = self.branches.get(revision, revision)
        if sha not in self.commits:
            raise RefusedError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha, self.commits[sha]


@dataclass
class Hub:
    """The repositories, the requests so far, and whether the hub is broken."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    """By kind and id: `datasets/openai/summarize_from_feedback`."""
    requests: list[str] = field(default_factory=list)
    """Method and path of every request."""
    broken: bool = False
    """Whether every answer is a server error."""

    def add(self, kind: str, name: str) -> Repository:
        """A new repository without commits."""
        return self.repositories.setdefault(f"{kind}/{name}", Repository())

    def repository(self, kind: str, name: str) -> Repository:
        """A repository. Raises RefusedError if there is none."""
        repository = self.repositories.get(f"{kind}/{name}")
        if repository is None:  # the hub does not tell what is private and what is missing
            raise RefusedError(401, "RepoNotFound", "Invalid username or password.")
        return repository


def blob_id(content: bytes) -> str:
    """The hash that git gives a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def file_entry(path: str, content: bytes) -> dict[str, Any]:
    """A file as trees list it."""
    return {"type": "file", "path": path, "size": len(content), "oid": blob_id(content)}


def folder_entry(path: str) -> dict[str, Any]:
    """A folder as trees list it."""
    return {"type": "directory", "path": path, "size": 0, "oid": "0" * 40}


def tree(files: Files, folder: str, recursive: bool) -> list[dict[str, Any]]:
    """The entries of a folder; if `recursive`, with all files and folders below it."""
    prefix = f"{folder}/" if folder else ""
    entries = {}
    for path, content in files.items():
        if not path.startswith(prefix):
            continue
        entries[path] = file_entry(path, content)
        parent = path.rpartition("/")[0]
        while len(parent) > len(prefix):
            entries[parent] = folder_entry(parent)
            parent = parent.rpartition("/")[0]
    if not entries:
        raise RefusedError(404, "EntryNotFound", f"{folder} does not exist")
    return [
        entries[path] for path in sorted(entries) if recursive or "/" not in path[len(prefix) :]
    ]


def information(name: str, sha: str, repository: Repository) -> dict[str, Any]:
    """What the hub says about a repository at one commit."""
    return {
        "id": name,
        "modelId": name,
        "sha": sha,
        "gated": False,
        "private": False,
        "disabled": False,
        "tags": [],
        "downloads": 0,
        "likes": 0,
        "siblings": [{"rfilename": path} for path in sorted(repository.commits[sha])],
    }


def references(repository: Repository) -> dict[str, Any]:
    """A repository's branches, and those that the hub's bots converted."""
    branches = []
    converts = []
    for name, sha in repository.branches.items():
        reference = {"name": name.rpartition("/")[2], "targetCommit": sha}
        if name.startswith("refs/convert/"):
            converts.append(reference | {"ref": name})
        else:
            branches.append(reference | {"ref": f"refs/heads/{name}"})
    return {"branches": branches, "converts": converts, "tags": []}


class Handler(BaseHTTPRequestHandler):
    """Answers one client; `hub` is set by `serving`."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length).decode()
        self.hub.requests.append(f"{self.command} {self.path}")
        try:
            if self.hub.broken:
                raise RefusedError(503, "", "Service Unavailable")
            self.answer_path(body)
        except RefusedError as refused:
            headers = {"X-Error-Code": refused.code, "X-Error-Message": str(refused)}
            self.send_json({"error": str(refused)}, refused.status, headers)
        except (ValueError, IndexError):
            self.send_json({"error": "no such page"}, 404)

    def answer_path(self, body: str) -> None:
        """`/api/...`, or a file: `[/datasets]/<owner>/<name>/resolve/<revision>/<path>`."""
        address = urlsplit(self.path)
        parts = [unquote(part) for part in address.path.strip("/").split("/")]
        if parts[0] == "api" and parts[1] in KINDS:
            self.send_json(self.describe(parts[1:], parse_qs(address.query), body))
            return
        kind = "models"
        if parts[0] == "datasets":
            kind = parts.pop(0)
        owner, name, verb, revision, *path = parts
        if verb != "resolve":
            raise RefusedError(404, "EntryNotFound", "no such page")
        self.send_file(kind, f"{owner}/{name}", revision, "/".join(path))

    def describe(self, parts: list[str], query: dict[str, list[str]], body: str) -> Any:
        """`/api/<kind>/<owner>/<name>[/<verb>[/<revision>[/<folder>]]]`."""
        kind, owner, repository_name, *rest = parts
        name = f"{owner}/{repository_name}"
        verb = rest[0] if rest else "revision"
        repository = self.hub.repository(kind, name)
        if verb == "refs":
            return references(repository)

        revision = rest[1] if len(rest) > 1 else "main"
        sha, files = repository.resolve(revision)
        if verb == "revision":
            return information(name, sha, repository)
        if verb == "tree":
            recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
            return tree(files, "/".join(rest[2:]), recursive)
        if verb == "paths-info":
            if "json" in self.headers["Content-Type"]:
                paths = json.loads(body)["paths"]
            else:
                paths = parse_qs(body)["paths"]
            return [entry for entry in tree(files, "", recursive=True) if entry["path"] in paths]
        raise RefusedError(404, "EntryNotFound", "no such page")

    def send_file(self, kind: str, name: str, revision: str, path: str) -> None:
        """A repository's file at a revision."""
        sha, files = self.hub.repository(kind, name).resolve(revision)
        if path not in files:
            raise RefusedError(404, "EntryNotFound", "Entry not found")
        content = files[path]
        headers = {"X-Repo-Commit": sha, "ETag": f'"{blob_id(content)}"'}
        self.send_headers(200, len(content), headers)
        if self.command == "GET":
            self.wfile.write(content)

    def send_json(
        self, value: Any, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        content = json.dumps(value).encode()
        all_headers = {"Content-Type": "application/json", **(headers or {})}
        self.send_headers(status, len(content), all_headers)
        if self.command != "HEAD":
            self.wfile.write(content)

    def send_headers(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving() -> Iterator[Hub]:
    """An empty hub at a free port of this machine."""
    hub = Hub()
    handler = type("HubHandler", (Handler,), {"hub": hub})
    with Server(("127.0.0.1", 0), handler) as http:
        hub.url = f"http://127.0.0.1:{http.server_port}"
        threading.Thread(target=http.serve_forever, args=(0.01,)).start()
        try:
            yield hub
        finally:
            http.shutdown()
