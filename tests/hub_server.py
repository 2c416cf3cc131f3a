"""A hub for the tests: repositories in memory, served as the Hugging Face clients ask for them.

`HF_ENDPOINT` leads the unmodified clients here. Served are information, trees and references of a
repository, and its files by branch or commit. As on the hub, large files are elsewhere (a redirect
with the linked ETag), small ones are moved to their commit, a repository that is not there answers
401, and what is known of a gated one is public while its files are not.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests.chat_server import Server

LARGE = (".parquet", ".bin", ".safetensors")  # what repositories keep in large-file storage
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
    gated: bool = False

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
    storage: str = ""
    """Where large files are: the clients follow a redirect to another host only to load them."""
    repositories: dict[str, Repository] = field(default_factory=dict)
    """By kind and id: `datasets/openai/summarize_from_feedback`."""
    requests: list[str] = field(default_factory=list)
    """Method and path of every request."""
    broken: bool = False
    """Whether every answer is that the server has an error."""
    cuts: dict[str, int] = field(default_factory=dict)
    """File name -> how often its connection ends halfway; after that it is served whole."""

    def add(self, kind: str, name: str, gated: bool = False) -> Repository:
        """A new repository without commits."""
        return self.repositories.setdefault(f"{kind}/{name}", Repository(gated=gated))

    def repository(self, kind: str, name: str) -> Repository:
        found = self.repositories.get(f"{kind}/{name}")
        if found is None:  # the hub does not tell a stranger what is private and what is missing
            raise RefusedError(401, "RepoNotFound", "Invalid username or password.")
        return found

    def large_file(self, sha256: str) -> bytes:
        for repository in self.repositories.values():
            for files in repository.commits.values():
                for content in files.values():
                    if digest_of(content) == sha256:
                        return content
        raise RefusedError(404, "EntryNotFound", "no such object")


@cache
def digest_of(content: bytes) -> str:
    """The hash by which large-file storage knows a file."""
    return hashlib.sha256(content).hexdigest()


def blob_id(content: bytes) -> str:
    """The hash that git gives a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def file_entry(path: str, content: bytes) -> dict[str, Any]:
    """A file as trees list it."""
    entry = {"type": "file", "path": path, "size": len(content), "oid": blob_id(content)}
    if path.endswith(LARGE):
        digest = digest_of(content)
        entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 134}
    return entry


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
    gated = "auto" if repository.gated else False
    about = {"id": name, "modelId": name, "sha": sha, "gated": gated, "siblings": siblings}
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
            if parts[0] == "storage":
                self.send_file(parts[-1], self.hub.large_file(parts[1]), {})
            elif parts[:2] == ["api", "resolve-cache"]:
                self.resolve(parts[2], "/".join(parts[3:5]), parts[5], "/".join(parts[6:]), True)
            elif parts[0] == "api" and parts[1] in KINDS:
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

    def resolve(self, kind: str, name: str, revision: str, path: str, moved: bool = False) -> None:
        """A file by revision: sent to storage if it is large, else to its commit."""
        repository = self.hub.repository(kind, name)
        if repository.gated:
            known = self.headers.get("Authorization")
            raise RefusedError(
                403 if known else 401, "GatedRepo", f"Access to {name} is restricted."
            )
        sha, files = repository.resolve(revision)
        if path not in files:
            raise RefusedError(404, "EntryNotFound", "Entry not found")
        content, headers = files[path], {"X-Repo-Commit": sha}
        if path.endswith(LARGE):
            digest = digest_of(content)
            headers |= {"X-Linked-Size": str(len(content)), "X-Linked-ETag": f'"{digest}"'}
            headers["Location"] = f"{self.hub.storage}/storage/{digest}/{quote(path, safe='')}"
            self.send_json({}, 302, headers)
        elif not moved:
            headers["Location"] = f"/api/resolve-cache/{kind}/{name}/{sha}/{quote(path)}"
            self.send_json({}, 307, headers)
        else:
            self.send_file(path, content, {**headers, "ETag": f'"{blob_id(content)}"'})

    def send_file(self, path: str, content: bytes, headers: dict[str, str]) -> None:
        """A file or the range of it that is asked for; or its first half, and a hung-up line."""
        total = len(content)
        asked = self.headers.get("Range", "").removeprefix("bytes=")
        first, _, last = asked.partition("-")
        start = int(first or 0)
        part = content[start : int(last) + 1 if last else total]
        half = total // 2 - start
        cut = self.command == "GET" and self.hub.cuts.get(path, 0) > 0
        headers = {"Accept-Ranges": "bytes", **headers}
        if asked:
            headers["Content-Range"] = f"bytes {start}-{start + len(part) - 1}/{total}"
        self.send_headers(206 if asked else 200, len(part), headers)
        if self.command == "GET":
            self.wfile.write(part[: max(half, 0)] if cut else part)
        if cut:
            self.hub.cuts[path] -= 1
            self.close_connection = True

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
        hub.storage = f"http://localhost:{http.server_port}"
        threading.Thread(target=http.serve_forever, args=(0.01,)).start()
        try:
            yield hub
        finally:
            http.shutdown()
