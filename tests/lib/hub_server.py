"""A hub for the tests: repositories in memory, served as the Hugging Face clients ask for them.

`HF_ENDPOINT` leads the unmodified clients here. Served are information, trees and references of a
repository, and its files by branch or commit. As on the hub, a repository that is not there answers
401.
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

KINDS = {"models": "", "datasets": "datasets/"}  # kind -> what its web addresses begin with
Files = dict[str, bytes]


class RefusedError(Exception):
    """An answer that is an error: status, and what the headers X-Error-* say."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass
class Repository:
    """Commits by their hash, and the branches that point at them."""

    commits: dict[str, Files] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, files: Files, branch: str = "main") -> str:
        """Add a commit with exactly these files to a branch; return its hash, 40 digits."""
        listing = [(branch, name, blob_id(content)) for name, content in sorted(files.items())]
        sha = hashlib.sha1(json.dumps(listing).encode()).hexdigest()
        self.commits[sha], self.branches[branch] = files, sha
        return sha

    def resolve(self, revision: str) -> tuple[str, Files]:
        sha = self.branches.get(revision, revision)
        if sha not in self.commits:
            raise RefusedError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha, self.commits[sha]


@dataclass
class Hub:
    """What is served, what was asked, and what is to go wrong."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    """By kind and id: `datasets/openai/summarize_from_feedback`."""
    requests: list[str] = field(default_factory=list)
    """Method and path of every request."""
    broken: bool = False
    """Whether every answer is that the server has an error."""

    def add(self, kind: str, name: str) -> Repository:
        """A new repository without commits."""
        return self.repositories.setdefault(f"{kind}/{name}", Repository())

    def repository(self, kind: str, name: str) -> Repository:
        found = self.repositories.get(f"{kind}/{name}")
        if found is None:  # the hub does not tell a stranger what is private and what is missing
            raise RefusedError(401, "RepoNotFound", "Invalid username or password.")
        return found


def blob_id(content: bytes) -> str:
    """The hash that git gives a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def file_entry(path: str, content: bytes) -> dict[str, Any]:
    """A file as trees list it."""
    return {"type": "file", "path": path, "size": len(content), "oid": blob_id(content)}


def tree(files: Files, folder: str, recursive: bool) -> list[dict[str, Any]]:
    """What lies in a folder; deeper files and their folders too if it is recursive."""
    prefix = f"{folder}/" if folder else ""
    inside = {path: content for path, content in files.items() if path.startswith(prefix)}
    if not inside:
        raise RefusedError(404, "EntryNotFound", f"{folder} does not exist")
    folders = {
        "/".join(path.split("/")[:depth])
        for path in inside
        for depth in range(prefix.count("/") + 1, path.count("/") + 1)
    }
    listed = [
        *({"type": "directory", "path": one, "size": 0, "oid": "0" * 40} for one in folders),
        *(file_entry(path, content) for path, content in inside.items()),
    ]
    if not recursive:
        listed = [one for one in listed if "/" not in one["path"][len(prefix) :]]
    return sorted(listed, key=lambda one: one["path"])


def information(name: str, sha: str, repository: Repository) -> dict[str, Any]:
    """What the hub says of a repository at one commit."""
    siblings = [{"rfilename": path} for path in sorted(repository.commits[sha])]
    about = {"id": name, "modelId": name, "sha": sha, "gated": False, "siblings": siblings}
    return {**about, "private": False, "disabled": False, "tags": [], "downloads": 0, "likes": 0}


def references(repository: Repository) -> dict[str, Any]:
    """Branches, and what the hub's bots converted."""
    found: dict[str, list[dict[str, str]]] = {"branches": [], "converts": [], "tags": []}
    for name, sha in repository.branches.items():
        converted = name.startswith("refs/convert/")
        ref = name if converted else f"refs/heads/{name}"
        one = {"name": name.rpartition("/")[2], "ref": ref, "targetCommit": sha}
        found["converts" if converted else "branches"].append(one)
    return found


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
        address = urlsplit(self.path)
        parts = [unquote(part) for part in address.path.strip("/").split("/")]
        try:
            if self.hub.broken:
                raise RefusedError(503, "", "Service Unavailable")
            if parts[0] == "api" and parts[1] in KINDS:
                self.send_json(self.ask(parts[1:], parse_qs(address.query), body))
            else:
                kind = "datasets" if parts[0] == "datasets" else "models"
                owner, name, verb, revision, *path = parts[1:] if kind == "datasets" else parts
                if verb != "resolve":
                    raise RefusedError(404, "EntryNotFound", "no such page")
                self.resolve(kind, f"{owner}/{name}", revision, "/".join(path))
        except RefusedError as refused:
            headers = {"X-Error-Code": refused.code, "X-Error-Message": str(refused)}
            self.send_json({"error": str(refused)}, refused.status, headers)
        except (ValueError, IndexError):
            self.send_json({"error": "no such page"}, 404)

    def ask(self, parts: list[str], query: dict[str, list[str]], body: str) -> Any:
        """`/api/<kind>/<owner>/<name>[/<verb>/<revision>[/<folder>]]`."""
        kind, name, verb = (
            parts[0],
            "/".join(parts[1:3]),
            parts[3] if len(parts) > 3 else "revision",
        )
        repository = self.hub.repository(kind, name)
        if verb == "refs":
            return references(repository)
        sha, files = repository.resolve(parts[4] if len(parts) > 4 else "main")
        if verb == "revision":
            return information(name, sha, repository)
        if verb == "tree":
            recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
            return tree(files, "/".join(parts[5:]), recursive)
        if verb == "paths-info":
            is_json = "json" in self.headers["Content-Type"]
            wanted = json.loads(body)["paths"] if is_json else parse_qs(body)["paths"]
            everything = tree(files, "", recursive=True)
            return [one for one in everything if one["path"] in wanted]
        raise RefusedError(404, "EntryNotFound", "no such page")

    def resolve(self, kind: str, name: str, revision: str, path: str) -> None:
        """A file by revision."""
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
        self.send_headers(
            status, len(content), {"Content-Type": "application/json"} | (headers or {})
        )
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
