"""A causal LM as a policy: log-probabilities of chosen tokens instead of logits of every position.

`PolicyModel` is what the training code calls, what accelerate wraps and what is sharded. The model
inside is a plain transformers model, which is loaded and saved without this wrapper.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from stages.functional import entropy, paper_token_logprobs, token_logprobs
from stages.models.logprobs import chunked_logprobs

# Families, by `model_type`, whose logits are the product of hidden states and output layer, and
# nothing else. Their logits can be computed in chunks.
PLAIN_HEAD = frozenset({"gpt_neox", "gpt2", "llama", "qwen2", "gemma"})


class PolicyModel(nn.Module):
    """A causal LM that returns log-probabilities. Its logits exist only where they are needed.

    Letters: R rows of L tokens, C columns that are read, V vocabulary. `inputs` are the keyword
    arguments of a forward pass of the model. `columns` [R, C] are positions in `inputs`: the logits
    at position i predict token i + 1.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        # Any, because the attributes used below differ between families.
        self.model: Any = model
        self._keeps_head_copy = False
        self._head_copy: Tensor | None = None

    @property
    def config(self) -> Any:
        """The configuration of the model."""
        return self.model.config

    def forward(
        self,
        inputs: dict[str, Tensor],
        columns: Tensor,
        targets: Tensor,
        *,
        temperature: float = 1.0,
        logprob_dtype: str = "float32",
        with_entropy: bool = False,
        entropy_requires_grad: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of each target given the text up to its column, and the entropy there.

        `logprob_dtype` is float32, or bf16 for the formula of the paper's code. The entropy is 0
        unless `with_entropy` is set, and has a gradient if `entropy_requires_grad` is set too.

        Shapes: columns, targets [R, C] -> both [R, C], nats, in float32 or wider.
        """
        if self._has_plain_head and logprob_dtype == "float32":
            hidden = self._hidden_states(inputs, columns)
            device = hidden.device.type
            if torch.is_autocast_enabled(device):
                hidden = hidden.to(torch.get_autocast_dtype(device))
            logprobs, entropies = chunked_logprobs(
                hidden,
                weight=self._head_weight(hidden.dtype),
                targets=targets,
                temperature=temperature,
                with_entropy=with_entropy,
            )
            return logprobs, entropies if entropy_requires_grad else entropies.detach()

        logits = self.logits(inputs, columns)
        formula = paper_token_logprobs if logprob_dtype == "bf16" else token_logprobs
        logprobs = formula(logits, targets, temperature)
        if not with_entropy:
            return logprobs, torch.zeros_like(logprobs)
        # Without a gradient, no tensor as large as the logits is kept for the backward pass.
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_requires_grad):
            return logprobs, entropy(logits / temperature)

    def logits(self, inputs: dict[str, Tensor], columns: Tensor) -> Tensor:
        """The logits at these columns, [R, C, V], all at once."""
        if self._has_plain_head:
            output_layer = self.model.get_output_embeddings()
            logits: Tensor = output_layer(self._hidden_states(inputs, columns))
            return logits

        # The model may do more than multiply, so it computes its logits itself, from the first
        # needed column to the end. A family that cannot leave out columns returns all.
        length = inputs["input_ids"].shape[1]
        needed = length - int(columns.min())
        logits = self.model(**inputs, use_cache=False, logits_to_keep=needed).logits
        left_out = length - logits.shape[1]
        return _at_columns(logits, columns - left_out)

    def next_logits(self, inputs: dict[str, Tensor], cache: Cache) -> Tensor:
        """The logits that predict the next token of each row, [R, 1, V].

        The cache holds the keys and values of the rows' text so far, and takes those of `inputs`.
        """
        output = self.model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits: Tensor = output.logits
        return logits

    @contextmanager
    def head_cast_once(self) -> Iterator[None]:
        """Inside this context, the output layer's weight is converted to another dtype only once.

        Autocast cannot keep this copy: `chunked_logprobs` needs the weight itself, not a product.
        """
        self._keeps_head_copy = True
        try:
            yield
        finally:
            self._keeps_head_copy = False
            self._head_copy = None

    @property
    def _has_plain_head(self) -> bool:
        """Whether logits are hidden states times a matrix: no bias, adapter, scale or softcap."""
        head = self.model.get_output_embeddings()
        is_linear = type(head) is nn.Linear and head.bias is None
        return is_linear and self.config.model_type in PLAIN_HEAD

    def _hidden_states(self, inputs: dict[str, Tensor], columns: Tensor) -> Tensor:
        """The last layer's hidden states at these columns, [R, C, H]."""
        output = self.model.base_model(**inputs, use_cache=False)
        return _at_columns(output.last_hidden_state, columns)

    def _head_weight(self, dtype: torch.dtype) -> Tensor:
        """The output layer's weight [V, H], converted if it has another dtype."""
        weight: Tensor = self.model.get_output_embeddings().weight
        if weight.dtype == dtype:
            return weight
        if self._head_copy is not None and self._head_copy.dtype == dtype:
            return self._head_copy
        converted = weight.to(dtype)
        if self._keeps_head_copy:
            self._head_copy = converted
        return converted


def _at_columns(x: Tensor, columns: Tensor) -> Tensor:
    """Shapes: x [R, L, ..], columns [R, C] -> [R, C, ..]."""
    rows = torch.arange(len(columns), device=columns.device).unsqueeze(1)
    return x[rows, columns]


@contextmanager
def weights_cast_once(network: nn.Module) -> Iterator[None]:
    """Inside this context, autocast makes one copy of each weight of a network, not one per pass.

    No weight may change meanwhile. Networks that never learn are included if gradients are off.
    """
    # Autocast keeps copies only of weights that require a gradient.
    frozen = []
    if not torch.is_grad_enabled():
        frozen = [weight for weight in network.parameters() if not weight.requires_grad]
    for weight in frozen:
        weight.requires_grad_(True)

    try:
        with ExitStack() as stack:
            for module in network.modules():
                if isinstance(module, PolicyModel):
                    stack.enter_context(module.head_cast_once())
            # Autocast drops its copies where the outermost autocast context ends: this one.
            stack.enter_context(torch.autocast("cpu", enabled=False))
            yield
    finally:
        for weight in frozen:
            weight.requires_grad_(False)
