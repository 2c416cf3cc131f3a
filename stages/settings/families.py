"""What differs between model families, by `model_type` of transformers. Standard library only."""

# Rotary or learned positions, and attention that takes any mask: a row may hold several summaries
# of one post (stages/learning/passes.py). tests/test_shared_query.py shows it for each.
SHARING = frozenset({"gpt_neox", "gpt2", "llama", "qwen2", "gemma"})

# Their logits are the output layer's product and nothing else, so they can be read in chunks
# (stages/learning/vocabulary.py).
PLAIN_HEAD = frozenset({"gpt_neox", "gpt2", "llama", "qwen2", "gemma"})


# Logits of one chunk. A GPU needs more to be busy.
CHUNK = {"cpu": 2**24, "cuda": 2**27}
# Logits that a processor reads several times over before it goes on: 2 MB of float32.
CACHED = 2**19

# References on which `normalize` checks the saved model. A wrong shift, or padding that is read,
# moves the score of every row, so some rows show it.
CHECKED_ROWS = 1024
