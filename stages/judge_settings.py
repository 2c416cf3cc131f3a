"""The settings of the judge. Standard library only."""

from dataclasses import dataclass

from stages.errors import in_range, one_of, positive


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Who compares a summary with the reference."""

    kind: str = "openai"
    """`openai`: any OpenAI-compatible server; `facts`: offline, built-in world only;
    `reward_model`: the run's own reward model, an optimistic proxy."""
    model: str = "gpt-4o-mini-2024-07-18"
    """Model id asked of the server."""
    base_url: str = ""
    """Server; empty: the client's default or OPENAI_BASE_URL. The key is OPENAI_API_KEY."""
    temperature: float = 0.0
    max_tokens: int = 256
    """Longest reply, tokens."""
    concurrency: int = 8
    """Requests under way at once."""

    def __post_init__(self) -> None:
        one_of(self, "judge", "kind", ("openai", "facts", "reward_model"))
        positive(self, "judge", "max_tokens", "concurrency")
        in_range(self, "judge", "temperature", 0, 2)
