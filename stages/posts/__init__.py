"""Text in, tokens out.

toy           the built-in world: what it says, what that is worth; its files
readers       the schemas of the real data, checked row by row
hub           posts and comparisons of the hub, at one commit
tables        JSONL, CSV and Parquet, row by row
bad_rows      rows that cannot be used, or that belong to the other half
published     what the published data hold: known counts, odd rows that are kept
tokens        the prompt, truncation, rows in tokens
ragged        tokenised splits as stages read them, padding
text_metrics  measures of text that need no model
"""
