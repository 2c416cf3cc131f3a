"""Text in, tokens out.

toy           the built-in world: what it says, what that is worth; its files
readers       the real data, from files or the hub, checked row by row; kinds are rows of one's own
tables        JSONL, CSV and Parquet, row by row
bad_rows      rows that cannot be used, or that belong to the other half
tokens        the prompt, truncation, rows in tokens
ragged        tokenised splits as stages read them, padding
text_metrics  measures of text that need no model
"""
