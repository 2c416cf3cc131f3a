"""Text in, tokens out.

toy           the built-in world: posts, references, preferences
world         that world as files
halves        the training comparisons in two halves without a common post
readers       the schemas of the real data, checked row by row
tokens        the prompt, truncation, tokenised splits, padding
text_metrics  measures of text that need no model
"""
