"""The hub of `tests/hub_server.py`, to which the unmodified client uploads too.

Served are what creates a repository, what says of each file how it is to be sent, large-file
storage, and commits. Who a token belongs to decides where it may write. Private repositories are
not there for strangers, as on the hub.
"""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import yaml

from tests.hub_server import LARGE, Files, Handler, Hub, RefusedError, blob_id, digest_of, serving

TOKEN = "hf_of_anna"


@dataclass
class UploadHub(Hub):
    """A hub with users, and the files that were sent but are in no commit yet."""

    users: dict[str, str] = field(default_factory=lambda: {TOKEN: "anna"})
    """Token -> its user's name."""
    stored: dict[str, bytes] = field(default_factory=dict)
    """What large-file storage holds, by SHA-256."""
    refused: dict[str, int] = field(default_factory=dict)
    """Part of a path -> status with which requests to it are refused."""

    def files(self, kind: str, name: str) -> Files:
        """The files of a repository's main branch."""
        repository = self.repositories[f"{kind}/{name}"]
        return repository.commits.get(repository.branches.get("main", ""), {})


class Uploads(Handler):
    """Answers one client that uploads."""

    hub: UploadHub

    def answer(self) -> None:
        path = urlsplit(self.path).path.strip("/")
        parts = path.split("/")
        try:
            for part, status in self.hub.refused.items():
                if part in path:
                    raise RefusedError(status, "", f"refused: {part}")
            if self.command == "PUT" and parts[-1] == "settings":
                self.send_json(self.settle("/".join(parts[2:4]), self.read()))
            elif self.command == "PUT":
                self.send_json(self.store(parts[-1]))
            elif self.command == "POST":
                self.post(path, parts)
            else:
                self.hide_from_strangers(path)
                super().answer()
        except RefusedError as refused:
            headers = {"X-Error-Code": refused.code, "X-Error-Message": str(refused)}
            headers["Connection"] = "close"  # what was sent with the request is not read
            self.send_json({"error": str(refused)}, refused.status, headers)

    def post(self, path: str, parts: list[str]) -> None:
        """The requests of an upload; others are the plain hub's."""
        if path == "api/validate-yaml":
            self.send_json(self.validate(self.read()["content"]))
        elif path == "api/repos/create":
            self.send_json(*self.create(self.read()))
        elif parts[-1] == "batch":
            self.writer("/".join(parts[:2]).removesuffix(".git"))
            self.send_json(self.batch(self.read()))
        elif len(parts) > 4 and parts[4] in ("preupload", "commit"):
            name = "/".join(parts[2:4])
            self.writer(name)
            body = self.content()
            self.hub.requests.append(f"{self.command} {self.path}")
            answer = self.preupload if parts[4] == "preupload" else self.commit
            self.send_json(answer(parts[1], name, body))
        else:
            super().answer()

    # -- who asks ----------------------------------------------------------------------------------

    def user(self) -> str | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return self.hub.users.get(token)

    def writer(self, name: str) -> None:
        """Raise unless the asking user may write to a repository."""
        if self.user() is None:
            raise RefusedError(401, "", "Invalid username or password.")
        if name.split("/")[0] != self.user():
            raise RefusedError(403, "", f"You don't have the rights to write to {name}.")

    def hide_from_strangers(self, path: str) -> None:
        for key, repository in self.hub.repositories.items():
            name = key.split("/", 1)[1]
            if repository.private and name in path and self.user() != name.split("/")[0]:
                raise RefusedError(401, "RepoNotFound", "Invalid username or password.")

    # -- what is sent ------------------------------------------------------------------------------

    def content(self) -> bytes:
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def read(self) -> Any:
        self.hub.requests.append(f"{self.command} {self.path}")
        return json.loads(self.content())

    def validate(self, text: str) -> dict[str, Any]:
        """The head of a card must be YAML that names a licence, and tags in a list."""
        head = yaml.safe_load(text.split("---\n")[1])
        assert isinstance(head["license"], str)
        assert isinstance(head["tags"], list)
        return {"errors": [], "warnings": []}

    def create(self, asked: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """The repository and 200, or the one that is there and 409."""
        name = f"{asked['organization']}/{asked['name']}"
        self.writer(name)
        answer = {"url": f"{self.hub.url}/{name}", "id": name, "name": name}
        if f"models/{name}" in self.hub.repositories:
            return answer | {"error": "You already created this model repo"}, 409
        repository = self.hub.add("models", name)
        repository.private = asked.get("visibility") == "private"
        repository.commit({".gitattributes": b""})
        return answer, 200

    def settle(self, name: str, asked: dict[str, Any]) -> dict[str, Any]:
        """Make a repository private or public."""
        self.writer(name)
        self.hub.repositories[f"models/{name}"].private = asked["visibility"] == "private"
        return asked

    def preupload(self, kind: str, name: str, body: bytes) -> dict[str, Any]:
        there = self.hub.files(kind, name)

        def known(path: str) -> str | None:
            if path not in there:
                return None
            return digest_of(there[path]) if path.endswith(LARGE) else blob_id(there[path])

        paths = [one["path"] for one in json.loads(body)["files"]]
        modes = {path: "lfs" if path.endswith(LARGE) else "regular" for path in paths}
        rows = [{"path": k, "uploadMode": v, "shouldIgnore": False} for k, v in modes.items()]
        return {"files": [row | {"oid": known(str(row["path"]))} for row in rows]}

    def batch(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Where to send large files; those that are there need not be sent."""
        objects = []
        for one in asked["objects"]:
            action = {"upload": {"href": f"{self.hub.storage}/upload/{one['oid']}"}}
            missing = one["oid"] not in self.hub.stored
            objects.append(one | ({"actions": action} if missing else {}))
        return {"transfer": "basic", "objects": objects}

    def store(self, oid: str) -> dict[str, Any]:
        self.hub.requests.append(f"{self.command} {self.path}")
        content = self.content()
        assert digest_of(content) == oid
        self.hub.stored[oid] = content
        return {}

    def commit(self, kind: str, name: str, body: bytes) -> dict[str, Any]:
        files = dict(self.hub.files(kind, name))
        for line in body.decode().splitlines():
            row = json.loads(line)
            value = row["value"]
            if row["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif row["key"] == "lfsFile":
                files[value["path"]] = self.hub.stored[value["oid"]]
        repository = self.hub.repositories[f"{kind}/{name}"]
        sha = repository.commit(files)
        return {"commitUrl": f"{self.hub.url}/{name}/commit/{sha}", "commitOid": sha}


@contextmanager
def taking_uploads() -> Iterator[UploadHub]:
    """An empty hub at a free port of this machine, which takes uploads."""
    with serving(UploadHub(), Uploads) as hub:
        assert isinstance(hub, UploadHub)
        yield hub
