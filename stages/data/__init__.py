"""Text in, tokens out.

builtin       the built-in posts: what they say, what a summary is worth, their files
readers       the real data, from files or the hub, checked row by row
formats       the user's own kinds of rows, converted to the schemas of the real data
tables        JSONL, CSV and Parquet, row by row
bad_rows      rows that cannot be used: stop, or skip and list them
tokens        the prompt, truncation, rows in tokens
ragged        tokenized splits as stages read them, padding
text_metrics  measures of text that need no model
"""
