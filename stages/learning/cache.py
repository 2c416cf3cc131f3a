"""The sampler's keys and values, in memory that is reserved once.

transformers' DynamicCache lays out all keys and values anew for every token. Here a layer reserves
room for the whole response with the prompt, and a token is written into it.
"""

from typing import Any

from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer


class ReservedLayer(DynamicLayer):
    """A layer's keys and values, each [B, heads, tokens so far, width], views of a larger tensor.

    It stands in for a DynamicLayer, whose other methods read `keys` and `values` too.
    """

    room: int
    """Tokens after the prompt."""
    _whole: list[Tensor]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add tokens, and return all there are. Raises IndexError where the room is used up."""
        new = (key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._whole = [
                one.new_empty(*one.shape[:2], one.shape[2] + self.room, one.shape[3]) for one in new
            ]
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if end > self._whole[0].shape[-2]:
            raise IndexError(f"a cache with room for {self.room} tokens was given more")
        for whole, one in zip(self._whole, new, strict=True):
            whole[:, :, start:end] = one
        self._show(end)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch."""
        tokens = self.get_seq_length()
        self._whole = [whole[indices] for whole in self._whole]
        self._show(tokens)

    def _show(self, tokens: int) -> None:
        self.keys, self.values = (whole[:, :, :tokens] for whole in self._whole)


def sampler_cache(config: PretrainedConfig, room: int) -> DynamicCache:
    """An empty cache for prompts that `room` tokens will follow.

    A layer of another kind, such as one with a sliding window, stays as transformers made it.
    """
    cache = DynamicCache(config=config)
    for layer in cache.layers:
        if type(layer) is DynamicLayer:
            layer.__class__ = ReservedLayer
            layer.room = room
    return cache
