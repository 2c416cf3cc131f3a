"""Models: what they are loaded from, and what is read from them.

loading           load and save; the scalar head of a reward model, in any family
foreign           reward models that others have saved
reward_function   a Python function in place of a reward model
lora              adapters: small matrices next to frozen weights, merged when saved
forward           forward passes: log-probabilities, values and scores
logprobs          log-probabilities without all logits at once
sampling          responses sampled from a policy
"""
