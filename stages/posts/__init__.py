"""Text in, tokens out.

toy           the built-in world: posts, references, preferences
world         that world as files
readers       the schemas of the real data, checked row by row
hub           posts and comparisons of the hub, at one commit
tokens        the prompt, truncation, tokenised splits, padding
text_metrics  measures of text that need no model
"""
