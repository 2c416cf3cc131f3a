"""Models: load, save, and run them.

loading           load and save policies, reward models and critics
tokenizers        load tokenizers, with a [PAD] token that no text contains
weights           read and check the weights of a model's folder
heads             the scalar head of a reward model or critic, in any family
foreign           reward models that others have saved
reward_function   a Python function in place of a reward model
lora              adapters: small matrices next to frozen weights, merged when saved
forward           forward passes: log-probabilities, values and scores
logprobs          log-probabilities without all logits at once
sampling          responses sampled from a policy
"""
